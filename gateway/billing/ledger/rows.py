"""The kinds of ledger rows. Each row is one JSON object with a `kind` and a unique `event_id`.

  opened       An attempt begins. The row is written before the request is sent. If no other row closes the attempt, its
               call is still in flight, or its gateway has died. A later row for the same attempt replaces it, and says
               how much of its answer has been received.
  receipt      The call has ended. The row states the billed usage and cost (`gateway.types.Receipt`). It closes the
               call's only attempt, or the newest attempt on the receipt's `deployment`. If no deployment is billed, it
               closes none.
  unbilled     An attempt is closed without being billed, because a failover or the other hedge attempt was billed.
  carried      A segment begins. The row repeats the attempts that are open, so that no older segment must be read.
  closing      A month was closed, with what each tenant owes for it.
  adjustment   A credit or an adjustment of a tenant's bill.
  act          An administrative act, in the audit log, which is a separate folder of chains.
  act_result   How an act ended.
  correction   A receipt was wrong. The row contains the difference between the right values and the receipt's.

Bills are sums over `receipt` and `correction`. The deployments' work is the sum over `receipt` and `unbilled`. Rows are
never changed.

A row omits fields with their usual values, and its attempts have relative times, since every byte of a row is written,
hashed and parsed. `complete_receipt` fills in the values and computes the times. Rows of earlier versions contain them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from gateway.core.times import rfc3339, rfc3339_to_ns
from gateway.policy import REALTIME
from gateway.types import Operation, Outcome, Receipt


class OpenCall(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="opened"):
    """Row that records an attempt before its request is sent. Its fields have the same meaning as in `Receipt`."""

    event_id: str
    call_id: str
    tenant: str
    key_id: str
    model_asked: str
    deployment: str  # receives the request
    started: str
    prompt_tokens_estimate: int
    policy_hash: str
    trace_id: str
    operation: str = Operation.CHAT._value_
    latency_class: str = REALTIME
    end_user: str | None = None
    service_tier: str | None = None
    attempt: int = 1
    in_vain: bool = False  # another attempt of the call is billed, so an `unbilled` row will close this one
    held: bool = False  # the receipt waits for a batch line's result; without a result, the attempt is unbilled
    expected_prompt_tokens: int = 0  # by the deployment's own rate; 0 if unknown
    output_tokens_received: int = 0  # of the answer, when this row was written
    leased: bool = False  # the call's limits were taken from slices, so the storage has no reservation of it
    route: str | None = None
    model_routed: str | None = None
    stream: bool = False

    @property
    def billed_prompt_tokens(self) -> int:
        """The prompt's tokens if the deployment has not counted them."""
        return self.expected_prompt_tokens or self.prompt_tokens_estimate

    @property
    def request_id(self) -> str:
        """The `x-request-id` that the deployment receives. The deployment's usage record has the same id."""
        return self.call_id if self.attempt == 1 else f"{self.call_id}-{self.attempt}"


class UnbilledWork(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="unbilled"):
    """Row for an attempt that is never billed (`gateway.billing.unbilled`). Its fields have the meaning of a receipt's.

    If `exact` is false, the token counts are an estimate of what the vendor bills. `cost` is by the list price.
    """

    event_id: str
    call_id: str
    attempt: int
    tenant: str
    key_id: str
    model_asked: str
    deployment: str
    started: str  # when the call arrived
    finished: str  # when the row was written
    exact: bool
    input_uncached: int
    cache_read: int
    cache_write: int
    output: int
    reasoning: int
    trace_id: str
    outcome: str | None = None  # of the attempt; None: unknown, because the gateway died
    cost: str | None = None  # decimal; None: no price is known
    currency: str | None = None


class CarriedCalls(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="carried"):
    """First row of a segment: all attempts that are open when the segment begins."""

    event_id: str
    opened: tuple[OpenCall, ...]


class Correction(Receipt, frozen=True, kw_only=True, tag_field="kind", tag="correction"):
    """Row that corrects a receipt by the difference between the right values and the receipt's.

    The row repeats the receipt's other fields, so that sums grouped by any of them include it. Token counts and `cost`
    must be added to the receipt's; they may be negative. The prices replace the receipt's. `finished` is when the call
    ended. `corrected` is when this row was written.
    """

    corrects: str  # the receipt's event id
    reason: str
    corrected: str  # RFC 3339, as `finished`


class OwedLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a tenant owes for a model in a month. `period` is the closed month that a carried amount corrects."""

    tenant: str
    model: str
    currency: str
    amount: str  # decimal
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    period: str = ""


class Closing(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="closing"):
    """Row that closes a month: what is owed for it, and what it bills for earlier months (`gateway.billing.books`)."""

    event_id: str
    period: str  # as in 2026-11
    closed: str
    author: str
    owed: tuple[OwedLine, ...]
    carried: tuple[OwedLine, ...]
    heads: dict[str, str]  # of all chains, when the month was closed


class Adjustment(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="adjustment"):
    """Row of a credit (a negative amount) or an adjustment of a tenant's bill for an open month."""

    event_id: str
    tenant: str
    period: str
    type: str  # credit or adjustment
    amount: str
    currency: str
    reason: str
    author: str
    dated: str


class Act(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="act"):
    """Row of the audit log: an administrative act begins. It is durable before anything is changed."""

    event_id: str
    at: str
    actor: str
    role: str
    act: str  # as in `POST /admin/tenants` or `warmpath tenants create`
    target: str | None = None  # the tenant or key, if the act names one
    organisation: str | None = None  # to which the actor's key is restricted
    details: dict[str, Any] | None = None  # the request's fields; no secrets


class ActResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="act_result"):
    """Row of the audit log: how an act ended. `status` is that of HTTP, or 0 if it failed without an answer."""

    event_id: str
    act_id: str
    at: str
    status: int


Row = OpenCall | Receipt | UnbilledWork | CarriedCalls | Correction | Closing | Adjustment | Act | ActResult
AppendedRow = Receipt | UnbilledWork | Correction | Closing | Adjustment | Act | ActResult

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Row).decode
"""Decode the row of a line. Ignores the fields of the hash chain. Raises `msgspec.MsgspecError`."""


USUAL_VALUES: Mapping[str, Any] = MappingProxyType(
    {
        "operation": Operation.CHAT.value,
        "latency_class": REALTIME,
        "outcome": Outcome.COMPLETE.value,
        "end_user": None,
        "service_tier": None,
        "exact": True,
        "cache_write": 0,
        "reasoning": 0,
    }
)
"""The values that a receipt or correction has for the fields of all receipts that its row omits.

They do not apply to unbilled work, whose `outcome` may be unknown. `source` is never omitted: it says on whose count
the bill rests.
"""

_USUAL_ATTEMPT = {"predicted_cached_tokens": 0, "outcome": "ok", "status": 200}


def complete_receipt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a receipt's JSON object with the fields that its row omits, also in its attempts.

    The attempts have `started` and `ended` (RFC 3339), as in rows of earlier releases.
    """
    return {**USUAL_VALUES, **row, "attempts": [_complete_attempt(row, attempt) for attempt in row["attempts"]]}


def _complete_attempt(receipt: Mapping[str, Any], attempt: Mapping[str, Any]) -> dict[str, Any]:
    complete = {"deployment": receipt["deployment"], **_USUAL_ATTEMPT, **attempt}
    if "after" not in attempt or "seconds" not in attempt:
        return complete
    try:
        started_ns = rfc3339_to_ns(receipt["started"]) + _to_ns(attempt["after"])
        absolute = {"started": rfc3339(started_ns), "ended": rfc3339(started_ns + _to_ns(attempt["seconds"]))}
    except (TypeError, ValueError, OverflowError, OSError):  # a damaged row, which must not hide the others
        return complete
    del complete["after"], complete["seconds"]
    return {**complete, **absolute}


def _to_ns(seconds: float) -> int:
    """Convert seconds that are a multiple of a microsecond, exactly."""
    return round(seconds * 1_000_000) * 1000


class RowHead(msgspec.Struct):
    """The fields of a row of any kind that identify the attempts that the row closes."""

    kind: str
    event_id: str
    call_id: str | None = None
    attempt: int = 1
    deployment: str | None = None


decode_head = msgspec.json.Decoder(RowHead).decode


def add_attempt(opened: list[OpenCall], row: OpenCall) -> None:
    """Add an attempt to a call's open ones, or replace it if it is one of them."""
    for index, each in enumerate(opened):
        if each.attempt == row.attempt:
            opened[index] = row
            return
    opened.append(row)


def attempts_left_open(opened: list[OpenCall], *, by: str, attempt: int, deployment: str | None) -> list[OpenCall]:
    """Return those of a call's open attempts that a row of the kind `by` does not close.

    A receipt without a deployment bills none of them, so all stay open until their work is recorded as unbilled. If the
    row is a receipt, the attempts that stay open are marked `in_vain`.
    """
    if by == "unbilled":
        return [each for each in opened if each.attempt != attempt]
    if len(opened) == 1 and deployment is not None:
        return []
    last = max((each.attempt for each in opened if each.deployment == deployment), default=None)
    return [msgspec.structs.replace(each, in_vain=True) for each in opened if each.attempt != last]
