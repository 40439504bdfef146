"""Attempts that no tenant pays for: the ledger has what their vendors bill, and never 0 for work that was sent."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gateway.billing.ledger.reader import unbilled_work
from gateway.billing.unbilled import UnbilledAttempt, unbilled_attempts
from gateway.policy import Deployment
from gateway.providers.base import Fault, ProviderFailure
from gateway.types import AttemptRow, UnbilledTokens
from tests.gateway.billing.ledger.receipts import a_receipt
from tests.gateway.billing.test_hedge_usage import HEDGED, until_both_attempts
from tests.gateway.billing.test_recovery import an_open_call, leave_open, recover
from tests.gateway.harness import DONE, Client, Rig, a_rig, chat, delta, in_time, policy_of, usage_frame


def deployment(url: str) -> Deployment:
    return Deployment(name="d", base_url=url, provider="openai", model="m")


STOPS, READS_ON = deployment("https://api.openai.com/v1"), deployment("https://api.groq.com/openai/v1")


@pytest.mark.parametrize(
    ("attempt", "tokens"),
    [
        ({"outcome": "hedge_lost"}, (10, 0)),
        ({"outcome": "timeout", "answer_tokens": 7}, (10, 0)),
        ({"outcome": "cut", "received_tokens": 3, "answer_tokens": 7}, (10, 3)),
        ({"outcome": "cut", "opened": an_open_call(output_tokens_received=5)}, (10, 5)),
        ({"outcome": None}, (10, 0)),  # a gateway died, so how it ended is unknown
        ({"outcome": "status_503", "status": 503}, (0, 0)),
        ({"outcome": "connect_error"}, (0, 0)),
        ({"outcome": "pool_exhausted"}, (0, 0)),
        ({"outcome": "not_sent"}, (0, 0)),
    ],
)
def test_what_a_vendor_bills_that_stops(attempt: dict[str, Any], tokens: tuple[int, int]) -> None:
    usage = UnbilledAttempt(**{"opened": an_open_call(stream=True), **attempt}).estimate(10, STOPS)
    assert ((usage.input_uncached, usage.output), usage.exact) == (tokens, False)


@pytest.mark.parametrize(("stream", "output"), [(True, 0), (False, 7)])
def test_a_vendor_that_reads_on_bills_an_answer_as_long_as_the_other_one(stream: bool, output: int) -> None:
    attempt = UnbilledAttempt(an_open_call(stream=stream), "hedge_lost", answer_tokens=7)
    assert attempt.estimate(10, STOPS).output == output, "OpenAI notices that the client of a stream leaves"
    assert attempt.estimate(10, READS_ON).output == 7
    assert attempt.estimate(10, None).output == 0


def test_each_attempt_has_the_outcome_of_its_own_row() -> None:
    rows = [
        AttemptRow("0" * 16, outcome="status_503", status=503),  # without a deployment: the receipt's
        AttemptRow("0" * 16, deployment="b", outcome="cut", unbilled=UnbilledTokens(9, 4, False)),
        AttemptRow("0" * 16, outcome="timeout", status=None),
        AttemptRow("0" * 16),
    ]
    opened = [an_open_call(deployment=name, attempt=number) for number, name in enumerate("aba", start=1)]
    found = unbilled_attempts(a_receipt(deployment="a", attempts=tuple(rows), output=8), opened)
    assert [(each.opened.attempt, each.outcome, each.received_tokens, each.answer_tokens) for each in found] == [
        (1, "status_503", 0, 8), (2, "cut", 4, 8), (3, "timeout", 0, 8),
    ]  # fmt: skip
    (unknown,) = unbilled_attempts(a_receipt(attempts=()), opened[:1])
    assert unknown.outcome is None


def without_records(rig: Rig) -> None:
    for server in rig.servers.values():
        server.has_usage_records = False


def unbilled(rig: Rig) -> list[dict[str, Any]]:
    return [row for row in rig.rows() if row["kind"] == "unbilled"]


@pytest.mark.parametrize(("bill", "output"), [("received", 0), ("read_to_end", 2)])
async def test_a_lost_hedge_is_in_the_ledger_with_its_cost(tmp_path: Path, bill: str, output: int) -> None:
    policy = policy_of(**HEDGED)
    for each in policy["deployments"]:
        each["on_disconnect"] = {"bill": bill}
    async with a_rig(tmp_path, **policy) as rig:
        without_records(rig)
        serving = rig.begin(Client(chat(stream=True)))
        await until_both_attempts(rig)
        rig.servers["b"].replies[0].say(delta("one"), usage_frame(10, 2), DONE)
        await in_time(serving)
        await rig.recovery.catch_up()
        (row,) = unbilled(rig)
        prompt = rig.last_call.input_tokens_estimate
        assert (row["deployment"], row["outcome"], row["exact"]) == ("a", "hedge_lost", False)
        assert (row["input_uncached"], row["output"]) == (prompt, output) and prompt > 0
        assert row["currency"] == "USD" and float(row["cost"]) == pytest.approx((prompt + 2 * output) / 1e6)
        (receipt,) = rig.receipts()
        assert (receipt["deployment"], receipt["cost"]) == ("b", "0.000014"), "the tenant pays the winner only"
    (line,) = unbilled_work(tmp_path / "ledger")
    assert (line.deployment, line.outcome, line.attempts, line.input, line.output) == (
        "a",
        "hedge_lost",
        1,
        prompt,
        output,
    )
    assert (line.inexact, line.unpriced, line.cost) == (1, 0, {"USD": Decimal(row["cost"])})


async def test_an_attempt_that_timed_out_is_in_the_ledger_and_a_rejected_one_costs_nothing(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        without_records(rig)
        rig.servers["a"].script = (ProviderFailure(Fault.STATUS, "busy", status=503),)
        rig.servers["b"].script = (ProviderFailure(Fault.TIMEOUT, "no output"),)
        rig.servers["c"].script = (ProviderFailure(Fault.CONNECT, "refused"),)
        assert (await rig.ask(chat())).status >= 500
        await rig.recovery.catch_up()
        (receipt,) = rig.receipts()
        assert (receipt["deployment"], receipt["cost"]) == (None, "0")
        prompt = rig.last_call.input_tokens_estimate
        found = {(row["deployment"], row["outcome"], row["input_uncached"]) for row in unbilled(rig)}
        assert found >= {("a", "status_503", 0), ("b", "timeout", prompt), ("c", "connect_error", 0)}
        assert all((row["cost"] == "0") == (row["input_uncached"] == 0) for row in unbilled(rig))


async def test_a_cut_stream_that_was_resumed_counts_what_was_received(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        without_records(rig)
        rig.servers["a"].script = (delta("one two three four"), ProviderFailure(Fault.CUT, "cut"))
        rig.servers["b"].script = (delta(" five"), usage_frame(14, 2), DONE)
        assert (await rig.ask(chat(stream=True))).status == 200
        await rig.recovery.catch_up()
        (row,) = unbilled(rig)
        assert (row["deployment"], row["outcome"]) == ("a", "cut")
        assert row["input_uncached"] > 0 and row["output"] > 0


async def test_after_a_crash_an_attempt_without_a_known_end_counts_its_prompt(tmp_path: Path) -> None:
    await leave_open(tmp_path, an_open_call(), an_open_call(deployment="b", attempt=2))
    async with a_rig(tmp_path) as rig:
        without_records(rig)
        await recover(rig)
        (row,) = unbilled(rig)
        assert (row["deployment"], row.get("outcome"), row["input_uncached"], row["cost"]) == ("a", None, 9, "0.000009")


async def test_a_deployment_that_is_gone_from_the_policy_has_no_known_price(tmp_path: Path) -> None:
    await leave_open(tmp_path, an_open_call(deployment="former"), an_open_call(deployment="b", attempt=2))
    async with a_rig(tmp_path) as rig:
        without_records(rig)
        await recover(rig)
        (row,) = unbilled(rig)
        assert (row["deployment"], row["input_uncached"], row["cost"]) == ("former", 9, None)
    (line,) = unbilled_work(tmp_path / "ledger")
    assert (line.unpriced, line.cost) == (1, {})
