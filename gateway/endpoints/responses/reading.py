"""JSON objects inside a body, read by their types. What does not fit is refused by its name, and so is what nobody here
knows: a field that is left out of sight would be a wish that is not fulfilled."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec

from gateway.core.errors import BadRequest
from gateway.prompts.reader import Fields, decode, read_fields

ABSENT = msgspec.Raw(b"null")  # the default of what is read later: null is as good as nothing, as at OpenAI

Known = TypeVar("Known", bound=msgspec.Struct)


class _Typed(msgspec.Struct):
    type: str | None = None


_typed = msgspec.json.Decoder(_Typed)


def is_given(value: msgspec.Raw) -> bool:
    return bytes(value) != b"null"


def read(kind: type[Known], value: msgspec.Raw, path: str) -> Known:
    """Of a type that forbids unknown fields. Raises `BadRequest`."""
    decoder: msgspec.json.Decoder[Known] = _decoder(kind)
    try:
        return decoder.decode(value)
    except (msgspec.MsgspecError, RecursionError):
        return _read_closely(kind, value, path)


def _read_closely(kind: type[Known], value: msgspec.Raw, path: str) -> Known:
    """What is wrong with it; or nothing, where the fields that are not known are null."""
    decoder: msgspec.json.Decoder[Known] = _decoder(kind)
    fields = fields_of(value, path)
    check_names(kind, fields, path)
    known = {name: given for name, given in fields.items() if name in kind.__struct_encode_fields__}
    try:
        return decode(decoder, msgspec.json.encode(known))
    except BadRequest as error:
        raise _at(path, error) from None


def check_names(kind: type[msgspec.Struct], fields: Fields, path: str = "") -> None:
    """Raises `BadRequest` for a field that is none of the type's."""
    for name, value in fields.items():
        if name not in kind.__struct_encode_fields__ and is_given(value):
            param = f"{path}.{name}" if path else name
            raise unsupported(param, "this field is not supported here; leave it out")


def unsupported(param: str, why: str) -> BadRequest:
    return BadRequest(f"{param}: {why}", param=param)


@cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _at(path: str, error: BadRequest) -> BadRequest:
    """What was said of the fields of an object, said of those at its place in the body."""
    if error.param is None:
        return unsupported(path, error.message.replace("the body", "it"))
    return unsupported(f"{path}.{error.param}", error.message.removeprefix(f"{error.param}: "))


def type_of(value: msgspec.Raw, path: str, default: str | None = None) -> str:
    """The `type` of an object, by which it is read. Raises `BadRequest`."""
    try:
        kind = _typed.decode(value).type or default
    except (msgspec.MsgspecError, RecursionError):
        fields_of(value, path)
        raise unsupported(f"{path}.type", "it must be a text") from None
    if kind is None:
        raise unsupported(f"{path}.type", "it is missing")
    return kind


def fields_of(value: msgspec.Raw, path: str) -> Fields:
    """Of an object. Raises `BadRequest`."""
    try:
        return read_fields(bytes(value))
    except BadRequest as error:
        raise _at(path, error) from None
