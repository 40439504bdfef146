"""The ledger row that is written before an upstream request is sent."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from gateway.billing.ledger import OpenCall
from gateway.billing.open_calls import CallLog, CallOpener
from gateway.deployments.fleet import Fleet
from gateway.policy import Policy
from gateway.providers.offline import OfflineProvider
from gateway.types import Operation, PhaseTimings, Trace
from tests.gateway.calls import a_call

POLICY = Policy.model_validate(
    {
        "deployments": [{"name": name, "base_url": "http://a/v1", "model": "served"} for name in ("a", "b")],
        "models": [{"name": "m", "deployments": ["a", "b"]}],
        "tenants": [{"name": "acme"}],
    }
)


class RecordingCallLog(list[OpenCall]):
    """A call log that only keeps the open rows."""

    def open_call(self, opened: OpenCall) -> None:
        self.append(opened)


def test_every_field_of_an_open_row_is_in_its_place() -> None:
    call = msgspec.structs.replace(
        a_call(policy=POLICY, tenant="acme", key="key_1"),
        id="req_1", operation=Operation.EMBEDDING, asked_model="alias", end_user="user_1", service_tier="flex",
        class_name="batch", prompt_tokens_estimate=7, trace=Trace(0xABC, 0, sampled=False),
    )  # fmt: skip
    timings = PhaseTimings()
    timings.started_ns = 1_790_000_000_000_001_999
    fleet = Fleet(lambda deployment: OfflineProvider())
    fleet.apply(POLICY)
    first, second = fleet
    rows = RecordingCallLog()
    opener = CallOpener(cast(CallLog, rows), call, timings)
    opener(first)
    opener(second)
    known: dict[str, Any] = {
        "kind": "opened",
        "call_id": "req_1",
        "tenant": "acme",
        "key_id": "key_1",
        "end_user": "user_1",
        "operation": "embeddings",
        "model_asked": "alias",
        "latency_class": "batch",
        "service_tier": "flex",
        "started": "2026-09-21T14:13:20.000001Z",
        "prompt_tokens_estimate": 7,
        "expected_prompt_tokens": 7,
        "policy_hash": POLICY.hash,
        "trace_id": f"{0xABC:032x}",
    }
    assert [msgspec.json.decode(msgspec.json.encode(each)) for each in rows] == [
        {**known, "event_id": rows[0].event_id, "deployment": "a"},
        {**known, "event_id": rows[1].event_id, "deployment": "b", "attempt": 2},
    ]
    assert rows[0].event_id < rows[1].event_id
    usual = msgspec.structs.replace(call, operation=Operation.CHAT, class_name="".join(["real", "time"]))
    CallOpener(cast(CallLog, rows), usual, timings)(first)
    assert not {"operation", "latency_class"} & msgspec.json.decode(msgspec.json.encode(rows[2])).keys()
    assert (rows[2].operation, rows[2].latency_class) == ("chat/completions", "realtime")
    assert (opener.request_id, opener.request_id_at(first)) == ("req_1-2", "req_1")
