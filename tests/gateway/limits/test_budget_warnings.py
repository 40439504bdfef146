"""Each threshold of a budget is one signed event, sent until it is answered, and not sent again after a restart."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.limits.budget import BudgetLimit
from gateway.limits.budget_warnings import COMPLETE_SECONDS, RETRY_SECONDS, BudgetWarnings
from gateway.limits.scope import Scope
from gateway.limits.slices import Slices
from gateway.policy.file import PolicyHolder
from gateway.storage.base import Grant
from gateway.storage.memory import MemoryStorage
from tests.gateway.calls import a_policy

KEY = b"k" * 24
SECRET = "whsec_" + base64.b64encode(KEY).decode()
NOW = 1_790_000_000.0


class Receiver:
    """A receiver of webhooks whose answers a test sets."""

    def __init__(self) -> None:
        self.status = 200
        self.got: list[tuple[Mapping[str, str], dict[str, Any]]] = []

    async def send(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        signed = b"%b.%b.%b" % (headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body)
        expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
        self.got.append((headers, json.loads(body)))
        return self.status


class Bench:
    def __init__(self, folder: Path, *others: dict[str, Any], **more: Any) -> None:
        webhook = {"url": "https://example.invalid/hook", "secret": {"env": "HOOK_SECRET"}, **more}
        tenants = [{"name": "t", "limits": {"budget": {"amount": 10}}}, *others]
        policy = a_policy(tenants=tenants, webhooks=[webhook])
        (folder / "policy.yaml").write_text(yaml.safe_dump(json.loads(policy.model_dump_json(by_alias=True))))
        self.policies = PolicyHolder(folder / "policy.yaml")
        self.storage, self.receiver, self.now, self.folder = MemoryStorage(), Receiver(), NOW, folder
        self.warnings = self.start()

    def start(self) -> BudgetWarnings:
        return BudgetWarnings(
            self.policies, self.storage, lambda secret: SECRET, self.folder / "warnings",
            lambda: self.policies.current.tenants_by_name.values(), send=self.receiver.send, clock=lambda: self.now,
        )  # fmt: skip

    async def spend(self, nanos: int) -> None:
        budget = BudgetLimit.from_policy(self.policies.current.tenants[0].limits, Scope("t"))
        assert budget is not None
        name = f"t/{self.now}-{nanos}"
        await self.storage.force_reserve(name, [budget.charge_for(nanos, self.now)], lease_seconds=30, now=self.now)
        await self.storage.settle(name, [nanos], now=self.now)

    async def round(self) -> list[float]:
        before = len(self.receiver.got)
        await self.warnings.check()
        await self.warnings.send_due()
        return [body["data"]["threshold"] for _, body in self.receiver.got[before:]]


async def test_each_threshold_is_one_event(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert await bench.round() == []
    await bench.spend(5_000_000_000)
    assert await bench.round() == [0.5]
    assert await bench.round() == []
    await bench.spend(6_000_000_000)
    assert await bench.round() == [0.8, 1.0]
    assert next(iter(bench.warnings.spent.values())) >= 1
    assert {(labels[0], labels[3]): left for labels, left in bench.warnings.left.items()} == {("t", ""): 0.0}
    _, body = bench.receiver.got[0]
    assert (
        body["type"] == "budget.threshold_reached" and body["data"]["tenant"] == "t" and body["data"]["amount"] == "10"
    )
    bench.warnings = bench.start()
    assert await bench.round() == [], "a restart sends nothing again"
    assert len({headers["webhook-id"] for headers, _ in bench.receiver.got}) == 3


async def test_only_budgets_of_tenants_that_called_are_read_between_complete_checks(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"name": "u", "limits": {"budget": {"amount": 10}}})
    slices = bench.warnings._slices = Slices(bench.storage, "a")
    assert await bench.round() == []
    await bench.spend(5_000_000_000)
    assert await bench.round() == []  # another gateway has spent it, and will see it
    slices.used_roots.add("t")
    assert await bench.round() == [0.5]
    assert {labels[0] for labels in bench.warnings.spent} == {"t", "u"}
    await bench.spend(5_000_000_000)
    bench.now += COMPLETE_SECONDS
    assert await bench.round() == [0.8, 1.0]


async def test_an_event_that_was_not_sent_before_a_restart_is_sent_after_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.receiver.status = 503
    await bench.spend(5_000_000_000)
    assert await bench.round() == [0.5]
    bench.receiver.status, bench.warnings = 200, bench.start()
    assert await bench.round() == [0.5]
    assert len({headers["webhook-id"] for headers, _ in bench.receiver.got}) == 1


async def test_the_gauges_show_the_budgets_that_are_spent_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.limits.budget_warnings.MAX_SHOWN", 2)
    bench = Bench(tmp_path, *({"name": name, "limits": {"budget": {"amount": 10}}} for name in ("u", "v")))
    await bench.spend(4_000_000_000)
    await bench.round()
    assert {labels[0]: share for labels, share in bench.warnings.spent.items()} == {"t": 0.4, "v": 0.0}
    assert sorted(left for left in bench.warnings.left.values()) == [6.0, 10.0]


async def test_an_event_is_sent_again_until_it_is_answered_and_then_dropped(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.receiver.status = 503
    await bench.spend(5_000_000_000)
    assert await bench.round() == [0.5]
    assert await bench.round() == [], "not before its time"
    bench.now += RETRY_SECONDS[0]
    bench.receiver.status = 204
    assert await bench.round() == [0.5] and bench.warnings.sent == 1
    assert len({headers["webhook-id"] for headers, _ in bench.receiver.got}) == 1
    bench.receiver.status = 500
    await bench.spend(3_000_000_000)
    for seconds in (*RETRY_SECONDS, 0.0):
        assert await bench.round() == [0.8]
        bench.now += seconds
    assert await bench.round() == [] and bench.warnings.dropped == 1


async def test_an_hour_of_unusual_spend_is_one_event_and_a_gauge(tmp_path: Path) -> None:
    bench = Bench(tmp_path)  # its budget is 10, of which 1.2 are spent in the first day
    for _ in range(26):
        await bench.round()
        await bench.spend(45_000_000)
        bench.now += 3600
    assert await bench.round() == [] and bench.receiver.got == []
    await bench.spend(1_500_000_000)
    await bench.warnings.check()
    await bench.warnings.send_due()
    (headers, body) = bench.receiver.got[-1]
    assert body["type"] == "budget.unusual_spend"
    assert (body["data"]["tenant"], body["data"]["spent"], body["data"]["usual"]) == ("t", 1.545, 0.045)
    assert bench.warnings.pace["t", "tenant t"] == pytest.approx(1.545 / 0.045, rel=0.01)
    bench.warnings = bench.start()
    await bench.spend(1_500_000_000)
    await bench.warnings.check()
    await bench.warnings.send_due()
    assert [each["webhook-id"] for each, _ in bench.receiver.got].count(headers["webhook-id"]) == 1


async def test_a_soft_budget_refuses_nothing_and_warns(tmp_path: Path) -> None:
    soft = {"amount": 1, "soft": True, "cut_streams": True}
    bench = Bench(tmp_path, {"name": "u", "limits": {"budget": soft}})
    budget = BudgetLimit.from_policy(bench.policies.current.tenants[1].limits, Scope("u"))
    assert budget is not None and not budget.cuts_streams
    for number in range(3):
        charge = budget.charge_for(1_000_000_000, bench.now)
        granted = await bench.storage.reserve(f"u/{number}", [charge], lease_seconds=30, now=bench.now)
        assert isinstance(granted, Grant)
    assert await bench.round() == [0.5, 0.8, 1.0]
    assert {labels[0]: left for labels, left in bench.warnings.left.items()} == {"t": 10.0, "u": -2.0}
