"""Strict decoding of the JSON objects in a request body: rejects wrong types and unknown fields.

The error names the path of the field in the body, such as `tools[0].name`. Unknown fields are rejected because ignoring
them would suggest that they have an effect. An unknown field is accepted only if its value is null, or if no answer
depends on it (`WITHOUT_EFFECT`).
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec

from gateway.core.errors import BadRequest
from gateway.prompts.reader import Fields, decode, read_fields

ABSENT = msgspec.Raw(b"null")  # default of a field that is decoded later; null counts as absent, as in OpenAI's API

# Codex's own provider adds this to items, for OpenAI's records. No answer depends on it.
WITHOUT_EFFECT = frozenset({"internal_chat_message_metadata_passthrough"})

StructType = TypeVar("StructType", bound=msgspec.Struct)


class _TypeField(msgspec.Struct):
    type: str | None = None


_type_field = msgspec.json.Decoder(_TypeField)


def is_given(value: msgspec.Raw) -> bool:
    """Whether a field is present and not null."""
    return bytes(value) != b"null"


def read(kind: type[StructType], value: msgspec.Raw, path: str) -> StructType:
    """Decode the value at `path` of the body as `kind`, which forbids unknown fields. Raises `BadRequest`."""
    decoder: msgspec.json.Decoder[StructType] = _decoder(kind)
    try:
        return decoder.decode(value)
    except (msgspec.MsgspecError, RecursionError):
        return _read_by_field(kind, value, path)


def _read_by_field(kind: type[StructType], value: msgspec.Raw, path: str) -> StructType:
    """Raise `BadRequest` for the first invalid field. Returns the value if all unknown fields are null."""
    decoder: msgspec.json.Decoder[StructType] = _decoder(kind)
    fields = fields_of(value, path)
    check_names(kind, fields, path)
    known = {name: given for name, given in fields.items() if name in kind.__struct_encode_fields__}
    try:
        return decode(decoder, msgspec.json.encode(known))
    except BadRequest as error:
        raise _at(path, error) from None


def check_names(kind: type[msgspec.Struct], fields: Fields, path: str = "") -> None:
    """Raise `BadRequest` if a field that the type does not define has a value other than null, and an effect."""
    for name, value in fields.items():
        if name not in kind.__struct_encode_fields__ and name not in WITHOUT_EFFECT and is_given(value):
            param = f"{path}.{name}" if path else name
            raise unsupported(param, "this field is not supported; omit it")


def unsupported(param: str, why: str) -> BadRequest:
    """Return an error for the field at the path `param`. The caller raises it."""
    return BadRequest(f"{param}: {why}", param=param)


@cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _at(path: str, error: BadRequest) -> BadRequest:
    """Return the error with the field's path in the body instead of its path in the object at `path`."""
    if error.param is None:
        return unsupported(path, error.message.replace("the body", "it"))
    return unsupported(f"{path}.{error.param}", error.message.removeprefix(f"{error.param}: "))


def type_of(value: msgspec.Raw, path: str, default: str | None = None) -> str:
    """Return the `type` field of the object at `path`. Raises `BadRequest` if it is missing or not a string."""
    try:
        kind = _type_field.decode(value).type or default
    except (msgspec.MsgspecError, RecursionError):
        fields_of(value, path)
        raise unsupported(f"{path}.type", "must be a string") from None
    if kind is None:
        raise unsupported(f"{path}.type", "is missing")
    return kind


def fields_of(value: msgspec.Raw, path: str) -> Fields:
    """Return the fields of the object at `path`, undecoded. Raises `BadRequest`."""
    try:
        return read_fields(bytes(value))
    except BadRequest as error:
        raise _at(path, error) from None
