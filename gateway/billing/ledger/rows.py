"""The kinds of ledger rows. Each row is one JSON object with a `kind` and a unique `event_id`.

  opened       an attempt is about to be made: written before its request is sent. If no row closes it, its call is in
               flight, or its gateway has died.
  receipt      the call has ended, and this is billed: `gateway.types.Receipt`. Closes the call's only attempt, or the
               newest one at the receipt's `deployment`
  unbilled     closes any other attempt: what a deployment did for a failover or a hedge, which is never billed
  carried      the first row of a segment: the attempts open at that moment, so that no older segment must be read
  correction   the difference between a receipt and what it should have said

Bills are sums over `receipt` and `correction`. The deployments' work is the sum over `receipt` and `unbilled`. No row
is ever changed.
"""

from __future__ import annotations

import msgspec

from gateway.types import Receipt


class OpenCall(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="opened"):
    """An attempt of a call, before its request is sent. Fields as in `Receipt`."""

    event_id: str
    call_id: str
    tenant: str
    key_id: str
    end_user: str | None
    operation: str
    model_asked: str
    deployment: str  # to which the request is about to be sent
    latency_class: str
    service_tier: str | None
    started: str
    prompt_tokens_estimate: int
    policy_hash: str
    trace_id: str
    attempt: int = 1
    in_vain: bool = False  # the call is billed by another attempt: an `unbilled` row will close this one
    held: bool = False  # its receipt waits for a batch line's result; without one, the attempt is unbilled

    @property
    def request_id(self) -> str:
        """The `x-request-id` that the deployment receives, and under which it keeps its usage record."""
        return self.call_id if self.attempt == 1 else f"{self.call_id}-{self.attempt}"


class UnbilledWork(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="unbilled"):
    """Work of an attempt that is never billed. Fields as in `Receipt`. Zeros if `exact` is false: it is unknown."""

    event_id: str
    call_id: str
    attempt: int
    tenant: str
    key_id: str
    model_asked: str
    deployment: str
    started: str  # of the call
    finished: str  # when this was written
    exact: bool
    input_uncached: int
    cache_read: int
    cache_write: int
    output: int
    reasoning: int
    trace_id: str


class CarriedCalls(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="carried"):
    """All attempts that are open when a segment begins."""

    event_id: str
    opened: tuple[OpenCall, ...]


class Correction(Receipt, frozen=True, kw_only=True, tag_field="kind", tag="correction"):
    """The difference between a receipt and what it should have said.

    Repeats the receipt's fields, so that sums grouped by any of them include it. Token counts and `cost` are what must
    be added to the receipt's, and may be negative. Prices are those that apply instead. `finished` is the call's end;
    `corrected` is when this row was written.
    """

    corrects: str  # the receipt's event id
    reason: str
    corrected: str  # RFC 3339, as `finished`


Row = OpenCall | Receipt | UnbilledWork | CarriedCalls | Correction

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Row).decode
"""Decode a line's row, without its fields of the chain. Raises `msgspec.MsgspecError`."""


class RowHead(msgspec.Struct):
    """The fields of a row that say what it closes, for rows of every kind."""

    kind: str
    event_id: str
    call_id: str | None = None
    attempt: int = 1
    deployment: str | None = None


decode_head = msgspec.json.Decoder(RowHead).decode


def attempts_left_open(opened: list[OpenCall], *, by: str, attempt: int, deployment: str | None) -> list[OpenCall]:
    """Those of a call's open attempts that a row of the kind `by` does not close.

    A receipt leaves the other attempts open as `in_vain`.
    """
    if by == "unbilled":
        return [each for each in opened if each.attempt != attempt]
    if len(opened) == 1:
        return []
    last = max((each.attempt for each in opened if each.deployment == deployment), default=None)
    return [msgspec.structs.replace(each, in_vain=True) for each in opened if each.attempt != last]
