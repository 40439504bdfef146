"""Cookies that only the gateway can make."""

from __future__ import annotations

import msgspec
import pytest

from gateway.auth.signed_cookies import MAX_CHARACTERS, CookieSigner


class Value(msgspec.Struct, frozen=True):
    text: str


class Other(msgspec.Struct, frozen=True):
    number: int


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_a_value_is_read_until_it_expires() -> None:
    clock = Clock()
    signer = CookieSigner(b"secret", clock=clock)
    cookie = signer.sign("p", Value("é"), life_seconds=10)
    assert cookie.isascii() and not set(cookie) & set('";, ')
    clock.now = 1_009.9
    assert signer.read("p", cookie, Value) == Value("é")
    clock.now = 1_010.0
    assert signer.read("p", cookie, Value) is None


def test_only_unchanged_cookies_of_the_same_secret_and_purpose_are_read() -> None:
    signer = CookieSigner(b"secret")
    cookie = signer.sign("p", Value("a"), life_seconds=60)
    content, _, signature = cookie.partition(".")
    assert CookieSigner(b"another").read("p", cookie, Value) is None
    assert signer.read("q", cookie, Value) is None
    assert signer.read("p", cookie, Other) is None
    other, _, _ = signer.sign("p", Value("b"), life_seconds=60).partition(".")
    for changed in (
        f"{other}.{signature}",
        content,
        f"{content}.",
        f"{cookie}A",
        f"x{cookie}",
        "",
        ".",
        "é",
        "a" * 9999,
    ):
        assert signer.read("p", changed, Value) is None, changed


def test_a_value_that_no_browser_would_store_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        CookieSigner(b"secret").sign("p", Value("a" * MAX_CHARACTERS), life_seconds=60)
