"""Fields and bodies that are accepted or rejected for every request type."""

import json

import pytest

from backend.server.errors import InvalidRequest
from backend.server.request_body import HARMLESS, ONLY, decode_body
from backend.server.requests import ChatRequest


def chat(**fields: object) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return decode_body(json.dumps(body).encode(), ChatRequest)


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_harmless_fields_are_accepted(name: str) -> None:
    chat(**{name: "anything"})


@pytest.mark.parametrize("name", sorted(ONLY))
def test_a_field_with_one_supported_value_accepts_only_that_and_null(name: str) -> None:
    chat(**{name: None})
    for value in ONLY[name]:
        chat(**{name: value})
    with pytest.raises(InvalidRequest, match=name) as caught:
        chat(**{name: "something else"})
    assert caught.value.param == name


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff", b'{"model": "\xff"}', b"[" * 100_000])
def test_a_body_that_is_not_a_json_object_is_rejected(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="body"):
        decode_body(body, ChatRequest)


def test_deep_nesting_is_rejected() -> None:
    body = b'{"model": "m", "messages": [], "tools": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}"
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        decode_body(body, ChatRequest)
