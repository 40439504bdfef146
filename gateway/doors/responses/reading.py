"""JSON objects inside a body, read by their types. What does not fit is refused by its name, and so is what nobody here
knows: a field that is left out of sight would be a wish that is not fulfilled."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec

from gateway.doors.base import Fields, decode, read_fields
from gateway.errors import BadRequest

ABSENT = msgspec.Raw(b"null")  # the default of what is read later: null is as good as nothing, as at OpenAI

Known = TypeVar("Known", bound=msgspec.Struct)


def is_given(value: msgspec.Raw) -> bool:
    return bytes(value) != b"null"


def read(kind: type[Known], value: msgspec.Raw, path: str) -> Known:
    """Raises `BadRequest`."""
    check_names(kind, fields_of(value, path), path)
    decoder: msgspec.json.Decoder[Known] = _decoder(kind)
    try:
        return decode(decoder, bytes(value))
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
    given = fields_of(value, path).get("type", ABSENT)
    if not is_given(given):
        if default is None:
            raise unsupported(f"{path}.type", "it is missing")
        return default
    kind: Any = msgspec.json.decode(given)
    if not isinstance(kind, str):
        raise unsupported(f"{path}.type", "it must be a text")
    return kind


def fields_of(value: msgspec.Raw, path: str) -> Fields:
    """Of an object. Raises `BadRequest`."""
    try:
        return read_fields(bytes(value))
    except BadRequest as error:
        raise _at(path, error) from None
