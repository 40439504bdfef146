"""Prices to the last decimal, which price applies, and every field of a receipt."""

from __future__ import annotations

import re
import time
from decimal import Context, Decimal, Inexact, localcontext
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.billing import receipts as billing
from gateway.billing.ledger.rows import complete_receipt
from gateway.billing.receipts import bill_of, cost_of, make_receipt
from gateway.core.money import atoms_to_nanos, atoms_to_text
from gateway.core.times import rfc3339, rfc3339_to_ns
from gateway.policy import Deployment, Policy, Price
from gateway.routing.attempt_log import AttemptLog
from gateway.types import Attempt, Operation, Outcome, PhaseTimings, Trace, Usage
from tests.gateway.calls import a_call

POLICY = Policy.model_validate(
    {
        "deployments": [
            {
                "name": "a",
                "base_url": "http://a/v1",
                "model": "served",
                "price": {"input": "0.10", "cached_input": "0.01", "output": "0.40", "version": "2026-11"},
            },
            {"name": "unpriced", "base_url": "http://b/v1", "model": "served"},
        ],
        "models": [{"name": "m", "deployments": ["a", "unpriced"]}],
        "tenants": [{"name": "acme"}],
    }
)
PRICED, UNPRICED = POLICY.deployments
CALL = msgspec.structs.replace(a_call(policy=POLICY, tenant="acme", key="key_1"), trace=Trace(0xABC, 0, sampled=True))
COUNTED = Usage(input_uncached=36, cache_read=64, output=3, reasoning=2, exact=True)
PRICE = Price(input=Decimal("0.10"), cached_input=Decimal("0.01"), output=Decimal("0.40"))


def test_cost_is_exact() -> None:
    usage = Usage(input_uncached=3, cache_read=7, cache_write=2, output=11, reasoning=5)
    assert cost_of(usage, PRICE) == 4_970_000_000  # (3+2)*0.10 + 7*0.01 + 11*0.40 per million
    assert cost_of(usage, Price(input=Decimal("0.10"))) == 1_200_000_000  # cached like any other input


counts = st.integers(0, 10**12)
money = st.decimals(0, 10**6, places=9)


@given(usage=st.builds(Usage, counts, counts, counts, counts), price=st.builds(Price, input=money, output=money))
def test_cost_loses_no_decimal(usage: Usage, price: Price) -> None:
    cost = cost_of(usage, price)
    with localcontext(Context(prec=100, traps=[Inexact])):
        assert Decimal(atoms_to_text(cost)) * 10**6 == usage.input * price.input + usage.output * price.output
        assert 0 <= Decimal(atoms_to_nanos(cost)).scaleb(-9) - Decimal(atoms_to_text(cost)) < Decimal("1e-9")


def test_receipt_of_a_finished_call() -> None:
    timings = PhaseTimings()
    timings.started_ns, timings.first_chunk_ns = 1_790_000_000_000_001_999, 1_790_000_000_250_001_999
    timings.ended_ns = 1_790_000_001_000_000_000
    attempts = [
        Attempt("unpriced", "status_503", timings.started_ns, timings.first_chunk_ns, span_id=0xF, status=503),
        Attempt("a", "ok", timings.started_ns, timings.ended_ns, span_id=0x10, status=200, predicted_cached_tokens=64),
    ]
    receipt = make_receipt(
        CALL, COUNTED, outcome=Outcome.COMPLETE, timings=timings, attempts=attempts, deployment=PRICED,
        bill=bill_of(CALL, COUNTED, PRICED, arrived_ns=timings.started_ns),
    )  # fmt: skip
    assert (receipt.tenant, receipt.key_id, receipt.latency_class) == ("acme", "key_1", "realtime")
    assert (receipt.model_asked, receipt.model_served, receipt.deployment) == ("m", "served", "a")
    assert (receipt.started, receipt.finished) == ("2026-09-21T14:13:20.000001Z", "2026-09-21T14:13:21.000000Z")
    assert receipt.ttft_seconds == 0.25
    assert (receipt.source, receipt.exact, receipt.outcome) == ("engine", True, "complete")
    assert (receipt.cost, receipt.currency, receipt.price_version) == ("0.00000544", "USD", "2026-11")
    assert (receipt.policy_hash, receipt.trace_id) == (POLICY.hash, f"{0xABC:032x}")
    assert [(a.deployment, a.outcome, a.span_id, a.after, a.seconds) for a in receipt.attempts] == [
        ("unpriced", "status_503", "000000000000000f", 0.0, 0.25),
        (None, "ok", "0000000000000010", 0.0, 0.999999),  # from microsecond to microsecond, as the receipt's times
    ]


def test_a_usual_call_omits_its_usual_values() -> None:
    """msgspec omits a default only if it is the same object, so an equal text from the policy would not be omitted."""
    call = msgspec.structs.replace(CALL, class_name="".join(["real", "time"]))
    receipt = make_receipt(
        call, COUNTED, outcome=Outcome.COMPLETE, timings=PhaseTimings(), bill=bill_of(call, COUNTED, None, arrived_ns=0)
    )
    assert not orjson.loads(msgspec.json.encode(receipt)).keys() & {"operation", "latency_class", "outcome"}
    assert (receipt.operation, receipt.latency_class, receipt.outcome) == ("chat/completions", "realtime", "complete")


microseconds = st.integers(0, 4 * 10**15)  # until the year 2096


@given(microseconds, st.integers(-(10**9), 10**13), st.integers(0, 10**13), st.integers(0, 999))
@example(1, 249, 251, 0)  # 0.000249 * 1e6 is less than 249
def test_the_times_of_attempts_are_exact(started: int, after: int, lasted: int, rest: int) -> None:
    timings = PhaseTimings()
    timings.started_ns = started * 1000 + rest
    begin = timings.started_ns + after * 1000 + 500
    attempt = Attempt("a", "ok", begin, begin + lasted * 1000 + 499, span_id=1)
    receipt = make_receipt(
        CALL, COUNTED, outcome=Outcome.COMPLETE, timings=timings, attempts=[attempt],
        bill=bill_of(CALL, COUNTED, None, arrived_ns=0),
    )  # fmt: skip
    (row,) = complete_receipt(orjson.loads(msgspec.json.encode(receipt)))["attempts"]
    assert (row["started"], row["ended"]) == (rfc3339(attempt.started_ns), rfc3339(attempt.ended_ns))


def test_every_field_of_a_receipt_is_in_its_place() -> None:
    price = {
        "input": "1", "cached_input": "2", "cache_write": "3", "output": "4", "reasoning": "5", "audio_input": "6",
        "audio_output": "7", "cache_write_1h": "8", "version": "v7", "currency": "EUR",
    }  # fmt: skip
    deployment = {"name": "a", "base_url": "http://a/v1", "model": "served", "price": price}
    policy = Policy.model_validate(
        {"deployments": [deployment], "models": [{"name": "m", "deployments": ["a"]}], "tenants": [{"name": "acme"}]}
    )
    call = msgspec.structs.replace(
        a_call(policy=policy, tenant="acme", key="key_1", operation=Operation.CHAT),
        id="req_1", end_user="user_1", service_tier="flex", trace=Trace(0xABC, 0, sampled=False),
    )  # fmt: skip
    timings = PhaseTimings()
    timings.started_ns, timings.first_chunk_ns = 1_790_000_000_000_000_000, 1_790_000_000_500_000_000
    timings.ended_ns = 1_790_000_001_000_000_000
    usage = Usage(20, 30, 40, 50, 11, exact=True, audio_input=12, audio_output=13, cache_write_1h=14)
    (served,) = policy.deployments
    attempts = [
        Attempt("a", "ok", timings.started_ns, timings.ended_ns, span_id=16, status=200, predicted_cached_tokens=9)
    ]
    bill = bill_of(call, usage, served, arrived_ns=timings.started_ns, service_tier="flex")
    receipt = make_receipt(
        call, usage, outcome=Outcome.CLIENT_GONE, timings=timings, attempts=attempts, deployment=served, bill=bill
    )
    assert complete_receipt(msgspec.to_builtins(receipt)) == {
        "kind": "receipt",
        "event_id": receipt.event_id,
        "call_id": "req_1",
        "tenant": "acme",
        "key_id": "key_1",
        "end_user": "user_1",
        "operation": "chat/completions",
        "model_asked": "m",
        "model_served": "served",
        "deployment": "a",
        "latency_class": "realtime",
        "service_tier": "flex",
        "started": "2026-09-21T14:13:20.000000Z",
        "finished": "2026-09-21T14:13:21.000000Z",
        "ttft_seconds": 0.5,
        "outcome": "client_gone",
        "source": "engine",
        "exact": True,
        "input_uncached": 20,
        "cache_read": 30,
        "cache_write": 40,
        "output": 50,
        "reasoning": 11,
        "audio_input": 12,
        "audio_output": 13,
        "cache_write_1h": 14,
        "price_version": "v7",
        "price_input": "1",
        "price_cached_input": "2",
        "price_cache_write": "3",
        "price_output": "4",
        "price_reasoning": "5",
        "price_audio_input": "6",
        "price_audio_output": "7",
        "price_cache_write_1h": "8",
        "cost": "0.00058",  # 8*1 + 12*6 + 30*2 + 26*3 + 14*8 + 26*4 + 11*5 + 13*7 per million
        "currency": "EUR",
        "attempts": [
            {
                "deployment": "a",
                "outcome": "ok",
                "status": 200,
                "started": "2026-09-21T14:13:20.000000Z",
                "ended": "2026-09-21T14:13:21.000000Z",
                "span_id": "0000000000000010",
                "predicted_cached_tokens": 9,
            }
        ],
        "policy_hash": policy.hash,
        "trace_id": f"{0xABC:032x}",
    }
    again = make_receipt(
        call, usage, outcome=Outcome.COMPLETE, timings=timings, bill=bill, started="then", trace_id="it"
    )
    assert (again.started, again.trace_id) == ("then", "it")


@pytest.mark.parametrize("hours", [-5, 5])
async def test_setting_the_clock_changes_no_duration(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    timings = PhaseTimings()
    attempts = AttemptLog(lambda: 1, lambda span: {}, now_ns=timings.now_ns)
    monkeypatch.setattr(time, "time_ns", lambda: timings.started_ns + hours * 3600 * 10**9)
    monkeypatch.setattr(billing, "new_event_id", lambda: "an id")  # real ids would be hours ahead from now on
    asked_ns = attempts.now_ns()
    timings.enter("chat")
    timings.first_chunk_ns = timings.now_ns()
    attempts.done.append(Attempt("a", "ok", asked_ns, asked_ns, span_id=1))
    attempts.conclude("cut")
    bill = bill_of(CALL, COUNTED, PRICED, arrived_ns=timings.started_ns)
    for _ in range(2):  # before and after the end is noted
        receipt = make_receipt(
            CALL, COUNTED, outcome=Outcome.COMPLETE, timings=timings, bill=bill, attempts=attempts.done
        )
        (attempt,) = complete_receipt(msgspec.to_builtins(receipt))["attempts"]
        times = [receipt.started, attempt["started"], attempt["ended"], receipt.finished]
        assert times == sorted(times)
        assert rfc3339_to_ns(receipt.finished) - rfc3339_to_ns(receipt.started) < 3600 * 10**9
        assert receipt.ttft_seconds is not None and 0 <= receipt.ttft_seconds < 3600
        timings.end()


def costs(usage: Usage, outcome: Outcome, deployment: Deployment | None, from_cache: bool) -> tuple[str, str | None]:
    bill = bill_of(CALL, usage, deployment, arrived_ns=0, from_cache=from_cache)
    receipt = make_receipt(
        CALL, usage, outcome=outcome, timings=PhaseTimings(), bill=bill, deployment=deployment, from_cache=from_cache
    )
    return receipt.source, receipt.cost


def test_what_each_source_costs() -> None:
    guess = Usage(input_uncached=10, output=5)
    assert costs(guess, Outcome.CLIENT_GONE, PRICED, False) == ("estimate", "0.000003")
    assert costs(COUNTED, Outcome.COMPLETE, UNPRICED, False) == ("engine", None)
    assert costs(COUNTED, Outcome.COMPLETE, None, True) == ("cache", "0")
    assert costs(Usage(), Outcome.REFUSED, None, False) == ("estimate", "0")
    assert costs(Usage(), Outcome.CLIENT_GONE, None, False) == ("estimate", "0")
    assert costs(Usage(), Outcome.CLIENT_GONE, UNPRICED, False) == ("estimate", None)


def priced(*prices: dict[str, Any], model: dict[str, Any] | None = None, fallback: bool = False) -> Policy:
    """A model on one deployment with these prices. `fallback`: the deployment is reached as a fallback only."""
    deployment = {"name": "a", "base_url": "http://a/v1", "model": "served", "price": list(prices)}
    models: list[dict[str, Any]] = [{"name": "m", "deployments": ["a"], **(model or {})}]
    deployments: list[dict[str, Any]] = [deployment]
    if fallback:
        deployments.append({"name": "down", "base_url": "http://b/v1", "model": "served"})
        models.append({"name": "asked", "deployments": ["down"], "fallbacks": ["m"]})
    document = {
        "deployments": deployments,
        "models": models,
        "tenants": [{"name": "acme", "service_tiers": ["flex", "batch"]}],
    }
    return Policy.model_validate(document)


def billed(policy: Policy, *, model: str = "m", tier: str | None = None, at: str = "2026-11-20", **changes: Any) -> Any:
    call = msgspec.structs.replace(CALL, policy=policy, model=policy.models_by_name[model], **changes)
    arrived_ns = rfc3339_to_ns(f"{at}Z" if "T" in at else f"{at}T00:00:00Z")
    bill = bill_of(call, Usage(1_000_000), policy.deployments[0], arrived_ns=arrived_ns, service_tier=tier)
    return None if bill.cost is None else atoms_to_text(bill.cost)


def test_the_first_matching_price_applies() -> None:
    policy = priced(
        {"input": 1, "class": "batch", "service_tier": "flex"},
        {"input": 2, "class": "batch"},
        {"input": 3, "service_tier": ["flex", "batch"]},
        {"input": 4, "until": "2026-11-20"},
        {"input": 5, "from": "2026-11-20", "until": "2026-12-01T06:00:00Z"},
    )
    assert billed(policy, class_name="batch", tier="flex") == "1"
    assert billed(policy, class_name="batch", tier="default") == "2"
    assert billed(policy, tier="batch") == "3"
    assert billed(policy, at="2026-11-19T23:59:59") == "4"
    assert billed(policy, tier="anything", at="2026-11-20") == "5"
    assert billed(policy, at="2026-12-01T05:59:59") == "5"
    to_the_microsecond = priced({"input": 6, "until": "2026-11-20T00:00:00.5Z"}, {"input": 7})
    assert billed(to_the_microsecond, at="2026-11-20T00:00:00.499999") == "6"
    assert billed(to_the_microsecond, at="2026-11-20T00:00:00.5") == "7"
    assert billed(policy, at="2026-12-01T06:00:00") is None  # unpriced, not free


def test_a_models_price_applies_if_its_deployment_has_none() -> None:
    own = {"price": {"input": 7}}
    assert billed(priced(model=own)) == "7"
    assert billed(priced({"input": 2}, model=own)) == "2"
    assert billed(priced(model=own, fallback=True), model="asked") == "7"
    assert billed(priced()) is None


def test_a_cached_answer_costs_the_models_cache_price() -> None:
    call = msgspec.structs.replace(CALL, policy=priced(model={"cache_price": {"input": 1, "output": 2}}))
    bill = bill_of(call, Usage(1_000_000, output=1_000_000), None, arrived_ns=0, from_cache=True)
    assert bill.cost is not None and atoms_to_text(bill.cost) == "3"


def test_every_bucket_has_its_price_or_inherits_one() -> None:
    usage = Usage(10, 20, 30, 40, 5, audio_input=3, audio_output=7, cache_write_1h=12)
    prices = {
        "input": 1, "cached_input": 2, "cache_write": 3, "output": 5, "reasoning": 7, "audio_input": 11,
        "audio_output": 13, "cache_write_1h": 17,
    }  # fmt: skip
    own = Price.model_validate(prices)
    expected = 7 * 1 + 3 * 11 + 20 * 2 + 18 * 3 + 12 * 17 + (40 - 5 - 7) * 5 + 5 * 7 + 7 * 13
    assert atoms_to_text(cost_of(usage, own) * 10**6) == str(expected)
    inherited = Price.model_validate({"input": 1, "output": 5})
    assert atoms_to_text(cost_of(usage, inherited) * 10**6) == str(60 * 1 + 40 * 5)
    of_any_write = Price.model_validate({"input": 1, "cache_write": 3})
    assert atoms_to_text(cost_of(usage, of_any_write) * 10**6) == str(30 * 1 + 30 * 3)
    assert own.highest == (17 * 10**9, 13 * 10**9)


def test_the_receipt_names_the_price_that_applied() -> None:
    policy = priced({"input": "0.1", "reasoning": "0.3", "service_tier": "flex", "version": "flex-1"})
    call = msgspec.structs.replace(CALL, policy=policy, service_tier="auto")
    bill = bill_of(call, COUNTED, policy.deployments[0], arrived_ns=0, service_tier="flex")
    receipt = make_receipt(call, COUNTED, outcome=Outcome.COMPLETE, timings=PhaseTimings(), bill=bill)
    assert (receipt.service_tier, receipt.price_version) == ("flex", "flex-1")
    assert (receipt.price_input, receipt.price_reasoning, receipt.price_output) == ("0.1", "0.3", "0")
    row = orjson.loads(msgspec.json.encode(receipt))
    assert "price_cache_write" not in row and "audio_input" not in row


@pytest.mark.parametrize(
    ("price", "message"),
    [
        ({"input": 1, "from": "2026-12-01", "until": "2026-11-01"}, "never applies"),
        ({"input": 1, "from": "soon"}, "as in 2026-12-01"),
        ({"input": 1, "class": "bach"}, "did you mean 'batch'"),
        ({"input": "0.0000000001"}, "9 decimal places"),
    ],
)
def test_an_impossible_price_is_rejected(price: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        priced(price)
