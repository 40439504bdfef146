"""Which bodies are large, and which have so many values that they are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import BadRequest
from gateway.core.worker_thread import LARGE_BYTES
from gateway.endpoints.chat import ChatEndpoint
from gateway.prompts import large_bodies
from gateway.prompts.large_bodies import MANY_VALUES, check_and_parse, check_values, is_large
from gateway.prompts.reader import MAX_FIELDS, UTF8_BYTES, read_fields


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


@pytest.mark.parametrize(
    ("body", "large"),
    [
        (body_of(), False),
        (body_of(x="a, b" * MANY_VALUES), False),
        (body_of(x=[1] * (MANY_VALUES + 1)), True),
        (body_of(x="a" * LARGE_BYTES), True),
    ],
)
def test_which_bodies_are_large(body: bytes, large: bool) -> None:
    assert is_large(body) is (large or b"a, b" in body)  # commas in text look like values


@pytest.mark.parametrize("commas", [MANY_VALUES, MANY_VALUES + 1])
@pytest.mark.parametrize("between", [b"", b"x" * 20])
def test_commas_are_counted_over_all_parts(commas: int, between: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for scanned in (1, 1000, 2**20):
        if scanned > 1 or not between:  # else it takes long
            monkeypatch.setattr(large_bodies, "SCANNED_BYTES", scanned)
            assert is_large((b"," + between) * commas + b" " * 2 * MANY_VALUES) is (commas > MANY_VALUES)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (body_of(x=["a"] * 400), "100 strings"),
        (body_of(**{f"field{number}": 1 for number in range(400)}), "100 strings"),
        (body_of(messages=[{"role": "user", "content": "hi"}] * 100), "100 strings"),
        (body_of(x=[1] * 400), "300 values"),
        (body_of(x=[{}] * 400), "300 values"),
        (b"[" + b"1," * 400, "300 values"),  # no JSON
        (b'"' + b'",' * 800, "100 strings"),
    ],
)
def test_too_many_values(body: bytes, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in {"MANY_VALUES": 50, "MAX_STRINGS": 100, "MAX_VALUES": 300, "LARGE_BYTES": 10}.items():
        monkeypatch.setattr(large_bodies, name, bound)
    with pytest.raises(BadRequest, match=f"the body has more than {what}"):
        check_and_parse(ChatEndpoint(), body)


def test_prose_with_many_commas_needs_no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "_string_end", None)  # the scan would call it
    check_values(body_of(x="so, " * 10 * MANY_VALUES))


def test_too_many_fields() -> None:
    with pytest.raises(BadRequest, match="the body has more than 1000 fields"):
        check_and_parse(ChatEndpoint(), body_of(**{f"field{number}": 1 for number in range(1000)}))


def test_too_many_fields_are_counted_without_parsing_them() -> None:
    """The decoder would hold Python's lock while it makes an object of each."""
    fields = {f"field{number}": {"x": [1, "a"]} for number in range(MANY_VALUES)}
    with pytest.raises(BadRequest, match="the body has more than 1000 fields"):
        check_values(body_of(**fields))
    check_values(body_of(x=fields))  # further down they are values like others
    check_values(body_of(**{f"field{number}": [{"a": "b"}] * 20 for number in range(MAX_FIELDS - 2)}))


@pytest.mark.parametrize("character", ["a", "\u00e9", "\u65e5", "\U0001f600"])
def test_long_texts_are_checked_in_parts(character: str) -> None:
    text = character * (2 * UTF8_BYTES // len(character.encode()))
    for shift in range(len(character.encode())):  # a part may end within a character
        body = body_of(x="a" * shift) + b" " * shift
        whole = body[: -1 - shift] + b', "y": "' + text.encode() + b'"}'
        assert read_fields(whole).keys() == {"model", "messages", "x", "y"}
        broken = whole[:-2] + b'\xff"}'
        with pytest.raises(BadRequest, match=f"can't decode byte 0xff in position {len(broken) - 3}"):
            read_fields(broken)


@pytest.mark.parametrize("text", ["a, " * 400, '"a", ' * 400, "\\, " * 400, '\\\\", ' * 400, "\n,\u2028," * 400])
def test_commas_in_texts_are_no_values(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in {"MANY_VALUES": 50, "MAX_STRINGS": 10, "MAX_VALUES": 30}.items():
        monkeypatch.setattr(large_bodies, name, bound)
    check_values(body_of(x=text))
    check_values(body_of(x=text).removesuffix(b'"}'))  # a string without end


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a,"\\[]{}:é\n')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a,"\\')), inner),
)


def counts(value: Any) -> tuple[int, int]:
    """How many strings a JSON value has, and how many commas are between values."""
    if isinstance(value, str):
        return 1, 0
    inner = [] if not isinstance(value, (list, dict)) else list(value.values() if isinstance(value, dict) else value)
    found = [counts(each) for each in inner]
    keys = len(value) if isinstance(value, dict) else 0
    return keys + sum(strings for strings, _ in found), max(0, len(inner) - 1) + sum(commas for _, commas in found)


@given(_JSON)
def test_the_count_is_exact(value: Any) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    strings, commas = counts(value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(large_bodies, "MANY_VALUES", -1)
        patched.setattr(large_bodies, "MAX_STRINGS", strings)
        patched.setattr(large_bodies, "MAX_VALUES", commas)
        check_values(body)
        if strings:
            patched.setattr(large_bodies, "MAX_STRINGS", strings - 1)
            with pytest.raises(BadRequest, match="strings"):
                check_values(body)
        patched.setattr(large_bodies, "MAX_STRINGS", strings)
        if commas:
            patched.setattr(large_bodies, "MAX_VALUES", commas - 1)
            with pytest.raises(BadRequest, match="values"):
                check_values(body)
