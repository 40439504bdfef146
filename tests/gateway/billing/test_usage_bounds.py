"""Which counts of a deployment are impossible for a call. Absurd ones are found, those of honest servers are not."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.billing.metering import Meter
from gateway.billing.usage_bounds import (
    CONTEXT_TOKENS,
    HIDDEN_TOKENS,
    find_implausible,
    is_plausible_prompt,
    max_prompt_tokens,
)
from gateway.policy.deployments import ADDED_PROMPT_TOKENS
from gateway.prompts.media.counting import IMAGE_TOKENS_BOUND
from gateway.providers.usage import ReportedUsage
from gateway.types import Call, Operation, Usage
from tests.gateway.calls import a_call, chat
from tests.gateway.harness import DONE, a_rig, answer, delta, tenant
from tests.gateway.harness import chat as harness_chat

PROMPT = "hello"
ANSWER = {"object": "chat.completion", "choices": [{"index": 0, "message": {"content": "12345678"}}]}
ESTIMATED = Usage(input_uncached=a_call(chat(PROMPT)).prompt_tokens_estimate, output=2)

ABSURD: list[Any] = [
    2**64 - 1, 2**80, -1, -(2**63), 1e308, 1e18, 8.5, True, False, [], [5], {}, {"tokens": 5}, "many", "", "-3",
    "NaN", "1e300", 2**53, 10**9,
]  # fmt: skip
NO_JSON = ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000]

# By dialect: a plausible usage, and the counts in it that may become absurd.
DIALECTS: dict[str, tuple[dict[str, Any], list[tuple[str, ...]]]] = {
    "openai": (
        {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11,
         "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}},
        [("prompt_tokens",), ("completion_tokens",), ("prompt_tokens_details", "cached_tokens"),
         ("completion_tokens_details", "reasoning_tokens")],
    ),
    "responses": (
        {"input_tokens": 9, "output_tokens": 2, "total_tokens": 11},
        [("input_tokens",), ("output_tokens",)],
    ),
    "anthropic": (
        {"input_tokens": 9, "output_tokens": 2, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0},
        [("input_tokens",), ("output_tokens",), ("cache_read_input_tokens",), ("cache_creation_input_tokens",)],
    ),
    "deepseek": (
        {"prompt_tokens": 9, "completion_tokens": 2, "prompt_cache_hit_tokens": 0},
        [("prompt_cache_hit_tokens",)],
    ),
}  # fmt: skip
PLACES = [(dialect, place) for dialect, (_, places) in DIALECTS.items() for place in places]


def with_count(dialect: str, place: tuple[str, ...], count: Any) -> dict[str, Any]:
    usage = json.loads(json.dumps(DIALECTS[dialect][0]))
    holder = usage
    for name in place[:-1]:
        holder = holder[name]
    holder[place[-1]] = count
    return dict(usage)


def meter_of(usage: Any, *, stream: bool = False, **fields: Any) -> Meter:
    """The meter of an answer of eight letters, to a request of five, with a usage object given as JSON or as text."""
    text = usage if isinstance(usage, str) else json.dumps(usage)
    meter = Meter(a_call(chat(PROMPT, stream=stream, **fields)))
    if not stream:
        meter.watch(json.dumps(ANSWER)[:-1].encode() + b', "usage": ' + text.encode() + b"}")
        return meter
    for letters in ("1234", "5678"):
        meter.watch(b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % letters.encode())
    meter.watch(b'data: {"choices":[],"usage":' + text.encode() + b"}\n\n")
    meter.watch(b"data: [DONE]\n\n")
    return meter


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", ABSURD, ids=repr)
@pytest.mark.parametrize(("dialect", "place"), PLACES, ids=lambda value: ".".join(value) if value else "")
def test_an_absurd_count_is_billed_by_an_estimate(
    dialect: str, place: tuple[str, ...], count: Any, stream: bool
) -> None:
    usage = with_count(dialect, place, count)
    meter = meter_of(usage, stream=stream)
    assert meter.complete and not meter.error, "the answer itself is fine"
    assert meter.usage == ESTIMATED
    assert meter.implausible is not None and len(meter.implausible) < 500
    assert json.dumps(usage)[:20].encode().decode("unicode_escape") in meter.implausible


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", NO_JSON)
def test_a_count_that_is_no_json_number_is_billed_by_an_estimate(count: str, stream: bool) -> None:
    meter = meter_of('{"prompt_tokens": 9, "completion_tokens": %s}' % count, stream=stream)  # noqa: UP031
    assert meter.usage.input_uncached == ESTIMATED.input_uncached
    assert 2 <= meter.usage.output < 2000 and not meter.usage.exact
    assert meter.implausible is not None and len(meter.implausible) < 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("dialect", "place"), PLACES, ids=lambda value: ".".join(value) if value else "")
@pytest.mark.parametrize("write", [str, float, lambda count: f"{count}.0"], ids=["text", "float", "decimal"])
def test_counts_written_in_another_way_are_counts(
    dialect: str, place: tuple[str, ...], write: Any, stream: bool
) -> None:
    holder = DIALECTS[dialect][0]
    for name in place:
        holder = holder[name]
    meter = meter_of(with_count(dialect, place, write(holder)), stream=stream)
    assert meter.implausible is None
    assert meter.usage == Usage(9, output=2, exact=True)


@pytest.mark.parametrize("count", [-1, 2**80, 10**9, "many", True])
@pytest.mark.parametrize("name", ["prompt_eval_count", "eval_count"])
def test_ollamas_counts_are_checked_as_well(name: str, count: Any) -> None:
    body = {**ANSWER, "prompt_eval_count": 9, "eval_count": 2}
    meter = Meter(a_call(chat(PROMPT)))
    meter.watch(json.dumps(body).encode())
    assert meter.usage == Usage(9, output=2, exact=True)
    meter = Meter(a_call(chat(PROMPT)))
    meter.watch(json.dumps({**body, name: count}).encode())
    assert meter.usage == ESTIMATED
    assert meter.implausible is not None and name in meter.implausible


@pytest.mark.parametrize("wrapper", ["response", "message", "warmpath", "x_groq"])
def test_counts_within_another_object_are_checked_as_well(wrapper: str) -> None:
    meter = Meter(a_call(chat(PROMPT)))
    meter.watch(json.dumps({**ANSWER, wrapper: {"id": "secret text", "usage": {"prompt_tokens": -7}}}).encode())
    assert meter.usage == ESTIMATED
    assert meter.implausible == 'malformed counts: {"prompt_tokens": -7}'


def test_the_audits_cases() -> None:
    liar = meter_of({"prompt_tokens": -1_000_000, "completion_tokens": 0, "total_tokens": 1})
    assert liar.usage == ESTIMATED
    overflown = meter_of({"prompt_tokens": 9, "completion_tokens": 18446744073709551615}, stream=True)
    assert overflown.usage == ESTIMATED
    assert overflown.implausible == 'malformed counts: {"prompt_tokens": 9, "completion_tokens": 18446744073709551615}'


def test_another_malformed_field_leaves_the_counts() -> None:
    meter = Meter(a_call(chat(PROMPT)))
    usage = {"prompt_tokens": 9, "completion_tokens": "2"}
    meter.watch(json.dumps({**ANSWER, "service_tier": 5, "usage": usage}).encode())
    assert meter.usage == Usage(9, output=2, exact=True) and meter.implausible is None


def test_malformed_counts_that_the_client_did_not_request_are_removed() -> None:
    meter = Meter(a_call(chat(PROMPT, stream=True)))
    assert meter.watch(b'data: {"choices":[],"usage":{"prompt_tokens":-1}}\n\n') == b""


def test_a_long_service_tier_is_not_taken_over() -> None:
    meter = Meter(a_call(chat(PROMPT)))
    meter.watch(json.dumps({**ANSWER, "service_tier": "x" * 1_000_000}).encode())
    assert meter.service_tier is None


def test_what_a_server_said_is_quoted_on_one_short_line() -> None:
    meter = meter_of('{"prompt_tokens": -1,\n "note": "\u202e%s"}' % ("é" * 1000))
    assert meter.implausible is not None
    assert meter.implausible.isascii() and meter.implausible.isprintable() and len(meter.implausible) < 400


# Honest servers


def finds(call: Call, *, received: int = 0, added: int = ADDED_PROMPT_TOKENS, **counts: int) -> str | None:
    given: dict[str, Any] = {"prompt": 9, "output": 2, **counts}
    reported = ReportedUsage(**given)
    return find_implausible(call, reported, received_tokens=lambda: received, added_prompt_tokens=added)


TOOLS = [{"type": "function", "function": {"name": "f", "description": "查询城市的天气" * 100}}]
IMAGE = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
RECORDING = [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}]
HONEST: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "a system prompt of the vendor's own": (chat("hi"), {"prompt": 700}),
    "the preamble of tools": (chat("hi", tools=[{"type": "function", "function": {"name": "f"}}]), {"prompt": 530}),
    "one token a byte": (chat("\u1e9e" * 3000), {"prompt": 9000}),
    "a template that escapes tools": (chat("hi", tools=TOOLS), {"prompt": 6 * 700}),
    "the prompt once per choice": (chat("x " * 50_000, n=4), {"prompt": 4 * 90_000}),
    "an image by its address": (chat(IMAGE), {"prompt": 48_169}),
    "a recording": (chat(RECORDING), {"prompt": 100_000}),
    "search results": (chat("hi", web_search_options={}), {"prompt": 120_000}),
    "a tool that the server runs": (chat("hi", tools=[{"type": "web_search_20250305"}]), {"prompt": 90_000}),
    "hidden reasoning": (chat("hi"), {"output": 128_000, "reasoning": 127_000}),
    "hidden reasoning that is not itemised": (chat("hi"), {"output": 128_000}),
    "hidden reasoning outside of max_tokens": (chat("hi", max_tokens=50), {"output": 20_050, "reasoning": 20_000}),
    "several choices": (chat("hi", max_tokens=50, n=8), {"output": 8 * 50}),
    "the token that ends an answer": (chat("hi", max_tokens=50, n=8), {"output": 8 * 51}),
    "a server that ignores max_tokens": (chat("hi", max_tokens=50), {"output": 500, "received": 2000}),
    "a long answer": (chat("hi"), {"output": 900_000, "received": 3_600_000}),
    "everything cached": (chat("hi"), {"prompt": 64, "cache_read": 64}),
    "cached audio": (chat(RECORDING), {"prompt": 100, "cache_read": 90, "audio_input": 40}),
    "an answer cut before its first token": (chat("hi"), {"prompt": 9, "output": 0}),
}  # fmt: skip


@pytest.mark.parametrize(("body", "counts"), HONEST.values(), ids=HONEST)
def test_an_honest_server_is_believed(body: dict[str, Any], counts: dict[str, int]) -> None:
    assert finds(a_call(body), **counts) is None


def test_an_honest_embedding_and_an_honest_completion_are_believed() -> None:
    texts = {"model": "m", "input": ["", "a", "b" * 20]}
    assert finds(a_call(texts, operation=Operation.EMBEDDING), prompt=26, output=0) is None
    ids = {"model": "m", "prompt": [1, 2, 3, 4]}
    assert finds(a_call(ids, operation=Operation.COMPLETION), prompt=4, output=16) is None
    unlimited = {"model": "m", "prompt": "a"}  # llama.cpp knows no default of 16 tokens
    assert finds(a_call(unlimited, operation=Operation.COMPLETION), output=700, received=2800) is None


DISHONEST: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "a prompt of more tokens than bytes": (chat("hi"), {"prompt": 10_000}, "a prompt of 10000 tokens is above"),
    "a context that no model has": (chat("hi", web_search_options={}), {"prompt": 20_000_000}, "a prompt of 20000000"),
    "an image of a million tokens": (chat(IMAGE), {"prompt": 1_000_000}, "a prompt of 1000000 tokens"),
    "more than max_tokens": (chat("hi", max_tokens=50), {"output": 67}, "an output of 67 tokens is above 66"),
    "more than the text": (chat("hi"), {"output": 700_000, "received": 4}, "an output of 700000 tokens is above"),
    "reasoning without an end": (chat("hi", max_tokens=5), {"output": 700_000, "reasoning": 700_000}, "an output of"),
    "cached": (chat("hi"), {"prompt": 5, "cache_read": 9}, "cached tokens 9 are above the prompt's 5"),
    "written": (chat("hi"), {"prompt": 5, "cache_read": 3, "cache_write": 3}, "cached tokens 6 are above"),
    "an hour": (chat("hi"), {"prompt": 5, "cache_write": 3, "cache_write_1h": 4}, "one-hour cache writes 4"),
    "heard": (chat("hi"), {"prompt": 5, "audio_input": 9}, "audio tokens 9 are above the prompt's 5"),
    "reasoned": (chat("hi"), {"output": 5, "reasoning": 9}, "reasoning and audio tokens 9 are above the output's 5"),
    "spoken": (chat("hi"), {"output": 5, "reasoning": 3, "audio_output": 3}, "reasoning and audio tokens 6"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "counts", "why"), DISHONEST.values(), ids=DISHONEST)
def test_impossible_counts_are_found(body: dict[str, Any], counts: dict[str, int], why: str) -> None:
    found = finds(a_call(body), **counts)
    assert found is not None and found.startswith(why)


def test_a_deployments_bound_of_added_tokens_applies() -> None:
    call = a_call(chat("hi"))
    assert finds(call, prompt=30_000, added=32_000) is None
    assert finds(call, prompt=1000, added=100) is not None


def test_a_parameter_called_image_does_not_allow_more_tokens() -> None:
    properties = {name: {"type": "string"} for name in ("image", "file", "video")}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    assert max_prompt_tokens(a_call(chat("hi", tools=tools))) < IMAGE_TOKENS_BOUND


def test_a_call_that_crash_recovery_has_rebuilt_is_bounded_by_its_estimate() -> None:
    call = msgspec.structs.replace(a_call(chat("hello " * 1000)), fields={})
    assert is_plausible_prompt(call, 6000)
    assert not is_plausible_prompt(call, 10**6)


@given(text=st.text(max_size=200))
def test_any_text_may_have_a_token_for_each_byte(text: str) -> None:
    assert is_plausible_prompt(a_call(chat(text)), len(text.encode()), 0)


# Whatever a server says

counts = (
    st.sampled_from(ABSURD) | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.integers(0, 100)
)  # fmt: skip
anything = st.recursive(counts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))
known = dict.fromkeys(
    (
        "prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens", "cached_tokens",
        "prompt_cache_hit_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "prompt_eval_count",
        "eval_count", "service_tier",
    ),
    counts | anything,
)  # fmt: skip
details = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("cached_tokens", "reasoning_tokens", "audio_tokens", "cache_write_tokens"), counts),
)
usages = anything | st.fixed_dictionaries(
    {},
    optional={
        **known,
        **dict.fromkeys(("prompt_tokens_details", "completion_tokens_details", "input_tokens_details"), details),
        "cache_creation": details | anything,
    },
)


@given(usage=usages, stream=st.booleans(), wrapper=st.sampled_from(["usage", "response", "message", "x_groq", "top"]))
def test_no_usage_document_makes_a_bill_impossible(usage: Any, stream: bool, wrapper: str) -> None:
    event: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": "x"}, "message": {"content": "x"}}]}
    if wrapper == "top":
        event |= usage if isinstance(usage, dict) else {}
    else:
        event[wrapper] = usage if wrapper == "usage" else {"usage": usage}
    call = a_call(chat(PROMPT, stream=stream))
    meter = Meter(call)
    body = json.dumps(event).encode()
    meter.watch(b"data: %b\n\ndata: [DONE]\n\n" % body if stream else body)
    billed = meter.usage
    assert 0 <= billed.input <= max_prompt_tokens(call) < CONTEXT_TOKENS
    assert 0 <= billed.output <= HIDDEN_TOKENS + len(body)
    assert min(billed.input_uncached, billed.cache_read, billed.cache_write, billed.reasoning, billed.audio_input) >= 0
    assert orjson.dumps(meter.implausible)
    assert not (billed.exact and meter.implausible)


@settings(max_examples=40)
@given(usage=usages, stream=st.booleans())
@example(usage={"prompt_tokens": 9, "completion_tokens": 2**64 - 1}, stream=True)
@example(usage={"prompt_tokens": -1_000_000, "completion_tokens": 0, "total_tokens": 1}, stream=False)
def test_no_usage_document_stops_the_settlement_of_the_next_call(usage: Any, stream: bool) -> None:
    async def run(directory: Path) -> None:
        limits = tenant(tokens="1000000/1d", budget={"amount": "10", "per": "total"})
        async with a_rig(directory, tenants=[limits]) as rig:
            whole = {"choices": [{"index": 0, "message": {"content": "x"}}], "usage": usage}
            counts = json.dumps({"choices": [], "usage": usage})
            rig.script(
                *((delta("x"), f"data: {counts}\n\n".encode(), DONE) if stream else (json.dumps(whole).encode(),))
            )
            await rig.ask(harness_chat(stream=stream))
            rig.script(answer())
            assert (await rig.ask(harness_chat())).status == 200
            settler = rig.components.settler
            await settler.stop()
            *_, honest = rig.receipts()
            assert (honest["input_uncached"], honest["output"], honest["exact"]) == (10, 2, True)
            assert settler.failed == 0 and rig.components.limiter.open_reservations == 0
            (account,) = (account for key, account in rig.storage._accounts.items() if "budget" in key)
            owed = sum(Decimal(receipt["cost"]) for receipt in rig.receipts())
            assert (Decimal(account.spent) / 10**9, account.held) == (owed, 0)

    with TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))
