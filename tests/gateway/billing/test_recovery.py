"""Open calls of a dead gateway are billed by the deployment's usage record, or else by an estimate."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.billing.ledger import OpenCall, verify
from gateway.billing.recovery import MAX_CONCURRENT_LOOKUPS, RECORDS_KEPT_SECONDS, CrashRecovery, call_of_row
from gateway.billing.unbilled import UnbilledAttempt
from gateway.core.errors import BudgetSpent
from gateway.core.ids import new_event_id
from gateway.core.times import rfc3339
from gateway.deployments.instances import Instance
from gateway.limits import LIMITS
from gateway.limits.limiter import Limiter
from gateway.types import Operation, Usage
from tests.gateway.billing.ledger.receipts import a_receipt
from tests.gateway.doubles import ScriptedProvider
from tests.gateway.harness import Rig, a_rig, counted, in_time, policy_of, tenant


def an_open_call(call_id: str = "req_1", **changes: Any) -> OpenCall:
    known = {
        "event_id": new_event_id(), "call_id": call_id, "tenant": "t", "key_id": "dev", "end_user": "u",
        "operation": "chat/completions", "model_asked": "m", "deployment": "a", "latency_class": "realtime",
        "service_tier": None, "started": "2026-11-20T10:00:00.000001Z", "prompt_tokens_estimate": 9,
        "policy_hash": "0" * 16, "trace_id": f"{5:032x}",
    }  # fmt: skip
    return OpenCall(**{**known, **changes})


async def leave_open(directory: Path, *rows: OpenCall) -> None:
    """Write open rows, as a gateway that died has left them."""
    rig = Rig(directory, policy_of())
    async with rig.ledger:
        for row in rows:
            rig.ledger.open_call(row)


async def recover(rig: Rig) -> list[dict[str, Any]]:
    components = rig.components
    recovery = CrashRecovery(
        rig.ledger,
        rig.fleet,
        components.policies,
        components.limiter,
        components.authenticator,
        owner="r",
        lookup_seconds=0.0,
    )
    recovery.take_over()
    await in_time(recovery.catch_up())
    return rig.receipts()


async def test_the_deployments_record_is_billed(tmp_path: Path) -> None:
    await leave_open(tmp_path, an_open_call())
    async with a_rig(tmp_path) as rig:
        rig.servers["a"].record = json.dumps({"usage": counted(10, 7)}).encode()
        (receipt,) = await recover(rig)
        kept = {name: receipt[name] for name in ("call_id", "tenant", "key_id", "end_user", "started", "trace_id")}
        assert kept == {name: getattr(an_open_call(), name) for name in kept}
        assert (receipt["outcome"], receipt["source"], receipt["exact"]) == ("gateway_lost", "engine", True)
        assert (receipt["input_uncached"], receipt["output"], receipt["cost"]) == (10, 7, "0.000024")
        assert [(a["deployment"], a["outcome"]) for a in receipt["attempts"]] == [("a", "gateway_lost")]
        assert await recover(rig) == [receipt], "nothing is billed twice"
    async with a_rig(tmp_path) as rig:
        assert await recover(rig) == [receipt]
    assert verify(tmp_path / "ledger").broken is None


async def test_a_clock_that_was_set_back_lets_no_call_end_before_it_began(tmp_path: Path) -> None:
    later = "2199-12-31T23:59:59.000001Z"
    await leave_open(tmp_path, an_open_call(started=later), an_open_call(started=later, attempt=2, deployment="b"))
    async with a_rig(tmp_path) as rig:
        (receipt,) = await recover(rig)
        assert (receipt["started"], receipt["finished"]) == (later, later)
        assert {(each["started"], each["ended"]) for each in receipt["attempts"]} == {(later, later)}
        (unbilled,) = [row for row in rig.rows() if row["kind"] == "unbilled"]
        assert unbilled["finished"] == later


@pytest.mark.parametrize(("per", "period"), [("day", "2025-12-31"), ("month", "2025-12")])
async def test_a_call_across_a_boundary_has_the_period_and_the_price_of_its_beginning(
    tmp_path: Path, per: str, period: str
) -> None:
    began = "2025-12-31T23:59:59.900000Z"
    prices = [
        {"until": "2026-01-01", "input": "1", "output": "2", "version": "old"},
        {"from": "2026-01-01", "input": "5", "output": "9", "version": "new"},
    ]
    policy = policy_of(tenants=[tenant(budget={"amount": "1", "per": per})])
    for deployment in policy["deployments"]:
        deployment["price"] = prices
    await leave_open(tmp_path, an_open_call(started=began))
    async with a_rig(tmp_path, **policy) as rig:
        rig.servers["a"].record = json.dumps({"usage": counted(10, 7)}).encode()
        (receipt,) = await recover(rig)
        await recover(rig)
        assert (receipt["price_version"], receipt["cost"]) == ("old", "0.000024")
        assert receipt["finished"] > began
        assert spent_nanos(rig) == {period: 24_000}


def spent_nanos(rig: Rig) -> dict[str, int]:
    return {key.rpartition("/")[2]: account.spent for key, account in rig.storage._accounts.items() if "budget" in key}


@pytest.mark.parametrize("known", [True, False])
async def test_budgets_are_charged(tmp_path: Path, known: bool) -> None:
    """In the period in which the call began. If the storage still has the reservation, by settling it."""
    await leave_open(tmp_path, an_open_call())
    limits = tenant(tokens="1000/1d", budget={"amount": "0.00003", "per": "month"})
    async with a_rig(tmp_path, tenants=[limits]) as rig:
        rig.servers["a"].record = json.dumps({"usage": counted(10, 7)}).encode()
        lost = call_of_row(an_open_call(), rig.components.policies.current)
        if known:
            call = msgspec.structs.replace(lost, max_output_tokens=8)
            await Limiter(rig.storage, LIMITS).admit(call)  # by the gateway that died
        await recover(rig)
        await recover(rig)
        (month,) = spent_nanos(rig)
        assert spent_nanos(rig) == {month: 24_000} and (known or month == "2026-11")
        refused = msgspec.structs.replace(lost, id="req_2", max_output_tokens=0)
        if known or month == f"{datetime.now(UTC):%Y-%m}":
            with pytest.raises(BudgetSpent):
                await rig.components.limiter.admit(refused)


async def test_the_receipt_of_a_passed_request_can_be_charged_again(tmp_path: Path) -> None:
    """Its operation is the path, for example `rerank`."""
    async with a_rig(tmp_path) as rig:
        call = call_of_row(a_receipt(operation="rerank"), rig.components.policies.current)
        assert call.operation is Operation.PASSED


@pytest.mark.parametrize("settled", [False, True])
async def test_a_call_whose_gateway_died_between_receipt_and_settlement_is_charged_once(
    tmp_path: Path, settled: bool
) -> None:
    dead = Rig(tmp_path, policy_of())
    async with dead.ledger:
        dead.ledger.open_call(an_open_call())
        dead.ledger.append(a_receipt(call_id="req_1", cost="0.000024", input_uncached=10, output=7))
    async with a_rig(tmp_path, tenants=[tenant(tokens="1000/1d", budget={"amount": "1", "per": "month"})]) as rig:
        call = msgspec.structs.replace(
            call_of_row(an_open_call(), rig.components.policies.current), max_output_tokens=8
        )
        reservation = await Limiter(rig.storage, LIMITS).admit(call)  # by the gateway that died
        if settled:
            await reservation.settle(Usage(10, output=7), 24_000)
        await recover(rig)
        await recover(rig)
        assert list(spent_nanos(rig).values()) == [24_000]
        assert await rig.storage.settle("t/req_1", [0, 0], now=time.time()) is False, "a reservation is left"


async def test_a_budget_is_charged_although_the_limits_have_changed(tmp_path: Path) -> None:
    await leave_open(tmp_path, an_open_call())
    async with a_rig(tmp_path, tenants=[tenant(budget={"amount": "1", "per": "total"})]) as rig:
        rig.servers["a"].record = json.dumps({"usage": counted(10, 7)}).encode()
        await Limiter(rig.storage, LIMITS).admit(call_of_row(an_open_call(), rig.components.policies.current))
        rig.write_policy(policy_of(tenants=[tenant(tokens="1000/1d", budget={"amount": "1", "per": "total"})]))
        await rig.components.policies.reload()
        await recover(rig)
        assert spent_nanos(rig) == {"total": 24_000}
        assert await rig.storage.settle("t/req_1", [0], now=time.time()), "the old reservation ends with its lease"


async def test_the_newest_attempts_deployment_is_queried_first(tmp_path: Path) -> None:
    await leave_open(tmp_path, an_open_call(), an_open_call(deployment="c", attempt=2))
    async with a_rig(tmp_path) as rig:
        rig.servers["a"].record = json.dumps({"usage": counted(1, 1)}).encode()
        rig.servers["c"].record = json.dumps({"usage": counted(2, 2)}).encode()
        (receipt,) = await recover(rig)
        assert (receipt["deployment"], receipt["output"]) == ("c", 2)
        assert [attempt["deployment"] for attempt in receipt["attempts"]] == ["a", "c"]
        assert rig.servers["c"].asked_for == ["req_1-2"] and rig.servers["a"].asked_for == ["req_1"]
        unbilled = rig.rows()[-1]
        assert (unbilled["kind"], unbilled["deployment"], unbilled["output"]) == ("unbilled", "a", 1)


async def test_unbilled_attempts_are_recorded_after_a_crash(tmp_path: Path) -> None:
    await leave_open(tmp_path, an_open_call(), an_open_call(deployment="c", attempt=2))
    dead = Rig(tmp_path, policy_of())
    async with dead.ledger:
        dead.ledger.append(a_receipt(call_id="req_1", deployment="c"))
    async with a_rig(tmp_path) as rig:
        rig.servers["a"].record = json.dumps({"usage": counted(1, 1)}).encode()
        await recover(rig)
        assert [(row["kind"], row["deployment"]) for row in rig.rows()[2:]] == [("receipt", "c"), ("unbilled", "a")]
        await recover(rig)
        assert len(rig.rows()) == 4


async def test_a_deployment_that_keeps_records_but_has_none_is_billed_nothing(tmp_path: Path) -> None:
    await leave_open(tmp_path, an_open_call(started=rfc3339(time.time_ns())))
    async with a_rig(tmp_path) as rig:
        (receipt,) = await recover(rig)
        assert (receipt["source"], receipt["exact"], receipt["deployment"]) == ("estimate", False, "a")
        assert (receipt["input_uncached"], receipt["output"], receipt["cost"]) == (0, 0, "0")


async def test_a_call_older_than_records_are_kept_is_estimated(tmp_path: Path) -> None:
    began = rfc3339(time.time_ns() - round((RECORDS_KEPT_SECONDS + 1) * 1e9))
    await leave_open(tmp_path, an_open_call(started=began, output_tokens_received=3))
    async with a_rig(tmp_path) as rig:
        (receipt,) = await recover(rig)
        assert (receipt["source"], receipt["input_uncached"], receipt["output"]) == ("estimate", 9, 3)


@pytest.mark.parametrize("leased", [False, True])
async def test_a_prompt_is_estimated_by_what_the_deployment_counted_before_the_crash(
    tmp_path: Path, leased: bool
) -> None:
    dead = Rig(tmp_path, policy_of())
    async with dead.ledger:
        for call_id in ("req_1", "req_2"):
            dead.ledger.open_call(an_open_call(call_id, expected_prompt_tokens=9, leased=leased))
        counts = {"exact": True, "input_uncached": 12, "cache_read": 6, "cache_write": 0}
        dead.ledger.append(a_receipt(call_id="req_1", deployment="a", leased=leased, **counts))
    async with a_rig(tmp_path) as rig:
        rig.servers["a"].has_usage_records = False
        *_, lost = await recover(rig)
        assert (lost["call_id"], lost["input_uncached"]) == ("req_2", 18), "twice as many tokens as estimated"


async def test_without_records_the_prompt_is_estimated(tmp_path: Path) -> None:
    await leave_open(tmp_path, an_open_call())
    async with a_rig(tmp_path) as rig:
        rig.servers["a"].has_usage_records = False
        (receipt,) = await recover(rig)
        assert (receipt["source"], receipt["exact"]) == ("estimate", False)
        assert (receipt["input_uncached"], receipt["output"], receipt["cost"]) == (9, 0, "0.000009")


async def test_a_call_of_a_removed_model_is_unpriced(tmp_path: Path) -> None:
    removed = {"tenant": "former", "model_asked": "former", "deployment": "former", "latency_class": "former"}
    await leave_open(tmp_path, an_open_call(**removed))
    async with a_rig(tmp_path) as rig:
        (receipt,) = await recover(rig)
        assert {name: receipt[name] for name in ("tenant", "model_asked", "latency_class")}.items() <= removed.items()
        assert (receipt["cost"], receipt["input_uncached"]) == (None, 9)


async def test_each_of_many_calls_gets_its_receipt(tmp_path: Path) -> None:
    await leave_open(tmp_path, *(an_open_call(f"req_{number}") for number in range(50)))
    async with a_rig(tmp_path) as rig:
        rig.servers["a"].record = json.dumps({"usage": counted(1, 1)}).encode()
        receipts = await recover(rig)
        assert sorted(receipt["call_id"] for receipt in receipts) == sorted(f"req_{number}" for number in range(50))
        assert len({row["event_id"] for row in rig.rows()}) == 100


async def test_a_call_that_cannot_be_closed_holds_up_no_other_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newer = an_open_call("req_newer", operation="rerank")  # as a newer version may have written
    calls = [newer, *(an_open_call(f"req_{number}") for number in range(20)), an_open_call("req_bad", trace_id="?")]
    await leave_open(tmp_path, *calls)
    async with a_rig(tmp_path) as rig:
        rig.servers["a"].record = json.dumps({"usage": counted(10, 7)}).encode()
        receipts = await recover(rig)
        assert {receipt["call_id"] for receipt in receipts} == {f"req_{number}" for number in range(20)}
        assert {record.getMessage().split()[2] for record in caplog.records if record.exc_info} == {
            "req_newer",
            "req_bad",
        }
        assert rig.ledger.open_call_count == 2, "the next start tries them again"
        rig.ledger.has_failed = True  # so that the rig expects them to be open


async def test_an_implausible_record_is_not_billed(tmp_path: Path) -> None:
    await leave_open(tmp_path, an_open_call())
    async with a_rig(tmp_path) as rig:
        rig.servers["a"].record = json.dumps({"usage": counted(10**9, 7)}).encode()
        (receipt,) = await recover(rig)
        assert (receipt["input_uncached"], receipt["output"], receipt["source"]) == (9, 0, "estimate")
        assert receipt["implausible"].startswith("a prompt of 1000000000 tokens is above ")


async def test_calls_whose_record_does_not_come_hold_up_no_other_one(tmp_path: Path) -> None:
    hopeless = [an_open_call(f"req_{number}") for number in range(3 * MAX_CONCURRENT_LOOKUPS)]
    await leave_open(tmp_path, *hopeless, an_open_call("req_known", deployment="c"))
    async with a_rig(tmp_path) as rig:
        rig.servers["c"].record = json.dumps({"usage": counted(10, 7)}).encode()
        components = rig.components
        recovery = CrashRecovery(
            rig.ledger, rig.fleet, components.policies, components.limiter, components.authenticator,
            owner="r", lookup_seconds=3600.0,
        )  # fmt: skip
        recovery.take_over()
        running = asyncio.create_task(recovery.run())
        while not rig.receipts():
            await asyncio.sleep(0.01)
        rig.ledger.open_call(answered := an_open_call("req_answered"))
        recovery.add_unbilled(UnbilledAttempt(answered, "status_503", 503))  # it has no record, and none will come
        while rig.ledger.open_attempts("req_answered"):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [row["call_id"] for row in rig.receipts()] == ["req_known", "req_answered"]
        rig.ledger.has_failed = True  # so that the rig expects the others to be open


POD = Instance("pod-1", "uid", "10.0.0.1", 8000)


def discovered_policy() -> dict[str, Any]:
    """Deployment a is a template, whose servers have prices by their region."""
    prices = [{"region": "eu", "input": "1", "output": "2"}, {"input": "100", "output": "100"}]
    policy = policy_of()
    template = {"name": "pods", "source": {"file": "none.json"}, "model": "served", "price": prices, "region": "eu"}
    policy["deployments"][0] = template
    policy["models"][0]["deployments"] = ["pods", "b"]
    return policy


async def test_recovery_waits_for_the_first_list_of_discovered_servers(tmp_path: Path) -> None:
    await leave_open(tmp_path, an_open_call(deployment="pods/pod-1"))
    async with a_rig(tmp_path, **discovered_policy()) as rig:
        pod = rig.servers["pods/pod-1"] = ScriptedProvider()
        pod.record = json.dumps({"usage": counted(10, 7)}).encode()
        components = rig.components
        recovery = CrashRecovery(
            rig.ledger, rig.fleet, components.policies, components.limiter, components.authenticator,
            owner="r", lookup_seconds=3600.0,
        )  # fmt: skip
        recovery.take_over()
        running = asyncio.create_task(recovery.catch_up())
        while not recovery._retries:
            await asyncio.sleep(0.01)
        assert rig.receipts() == []
        rig.fleet.set_instances("pods", [POD])
        await in_time(running)
        (receipt,) = rig.receipts()
        assert (receipt["deployment"], receipt["source"], receipt["output"]) == ("pods/pod-1", "engine", 7)
        assert receipt["cost"] == "0.000024"


async def test_a_discovered_server_that_has_left_is_still_asked_for_its_record(tmp_path: Path) -> None:
    await leave_open(tmp_path, an_open_call(deployment="pods/pod-1"))
    async with a_rig(tmp_path, **discovered_policy()) as rig:
        pod = rig.servers["pods/pod-1"] = ScriptedProvider()
        pod.record = json.dumps({"usage": counted(10, 7)}).encode()
        rig.fleet.set_instances("pods", [POD])
        rig.fleet.set_instances("pods", [])
        (receipt,) = await recover(rig)
        assert (receipt["source"], receipt["output"]) == ("engine", 7)


async def test_a_call_of_a_server_that_is_never_found_again_has_its_template_s_price(tmp_path: Path) -> None:
    await leave_open(tmp_path, an_open_call(deployment="pods/pod-1"))
    async with a_rig(tmp_path, **discovered_policy()) as rig:
        (receipt,) = await recover(rig)
        found = receipt["deployment"], receipt["model_served"], receipt["source"], receipt["cost"]
        assert found == ("pods/pod-1", "served", "estimate", "0.000009")
