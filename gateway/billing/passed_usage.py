"""Reads from the answer of a passed request what it used: tokens, another unit, or else the bytes of both."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from gateway.billing.reply_events import MalformedCounts, decode_event
from gateway.core.passed_requests import PassedRequest
from gateway.providers.sse import UNREADABLE
from gateway.providers.usage import read_usage
from gateway.types import Usage

QUANTITY_MAX = 1e12  # a number above is no quantity
TOKENS_MAX = 2**31 - 1  # of one request; a reranker may count its query once for each document


class _Billed(msgspec.Struct):
    search_units: float | None = None


class _Meta(msgspec.Struct):
    billed_units: _Billed | None = None


class _Usage(msgspec.Struct):
    seconds: float | None = None


class _Answer(msgspec.Struct):
    """Fields that say how much was done: transcriptions, reranks in Cohere's form, images, tokens of /tokenize."""

    usage: _Usage | None = None
    duration: float | str | None = None
    meta: _Meta | None = None
    data: list[Any] | None = None


_decode = msgspec.json.Decoder(_Answer, strict=False).decode


def usage_of(passed: PassedRequest, answer: bytes, answer_bytes: int | None = None) -> Usage:
    """Return the tokens that the server counted, or else the quantity of another unit.

    `answer` may be the event of a stream of `answer_bytes` that has the counts.
    """
    try:
        event = decode_event(answer)
    except UNREADABLE:
        event = None
    counts = None if event is None or isinstance(event, MalformedCounts) else event.counts
    reported = None if counts is None else read_usage(counts)
    if reported is not None and 0 < reported.prompt + reported.output <= TOKENS_MAX:
        return reported.usage()
    unit, amount = _quantity_of(passed, answer, len(answer) if answer_bytes is None else answer_bytes)
    return Usage(units=((unit, round(amount * 1_000)),), exact=unit != "byte")


def _quantity_of(passed: PassedRequest, answer: bytes, answer_bytes: int) -> tuple[str, float]:
    """A unit, as prices name it, and its amount."""
    try:
        read = _decode(answer)
    except UNREADABLE:
        read = _Answer()
    if (seconds := _number(read.usage.seconds if read.usage else None) or _number(read.duration)) is not None:
        return "second", seconds
    billed = read.meta.billed_units if read.meta else None
    if (searches := _number(billed.search_units if billed else None)) is not None:
        return "search", searches
    if passed.name.startswith("images/") and read.data:
        return "image", len(read.data)
    return "byte", passed.body_bytes + answer_bytes


def _number(value: float | str | None) -> float | None:
    try:
        number = float(value) if value is not None else math.nan
    except ValueError:
        return None
    return number if 0 <= number <= QUANTITY_MAX else None
