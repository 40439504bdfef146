"""The kinds of rows. Each is one JSON object; `kind` says which it is, and each has an `event_id` of its own.

  opened       a server is about to be asked: written before the request leaves, one per attempt. One that is not closed
               belongs to a call that runs, or to a gateway that was killed.
  receipt      the call is over, and this is what it is billed for: `gateway.types.Receipt`. Closes the call's only
               attempt, or the last one at its `deployment`
  unbilled     closes any other attempt: what a server did in vain, for a failover or a hedge, and nobody pays for
  carried      begins a segment: what was open at that moment, so that no earlier segment has to be read for it
  correction   what a receipt should have said, as a difference to it: add up both

Whoever bills adds up `receipt` and `correction`; whoever asks what the servers have done, `receipt` and `unbilled`. No
row is ever changed.
"""

from __future__ import annotations

import msgspec

from gateway.types import Receipt


class OpenCall(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="opened"):
    """What is known of a call before a server is asked; fields as in `Receipt`."""

    event_id: str
    call_id: str
    tenant: str
    key_id: str
    end_user: str | None
    operation: str
    model_asked: str
    deployment: str  # that is about to be asked
    latency_class: str
    service_tier: str | None
    started: str
    prompt_tokens_estimate: int
    policy_hash: str
    trace_id: str
    attempt: int = 1
    in_vain: bool = False  # the call's receipt is written, and is another attempt's
    held: bool = False  # its receipt comes with the result of a batch's line, or never: then it was in vain

    @property
    def request_id(self) -> str:
        """The `x-request-id` that the server gets, by which it keeps its record."""
        return self.call_id if self.attempt == 1 else f"{self.call_id}-{self.attempt}"


class UnbilledWork(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="unbilled"):
    """Fields as in `Receipt`. By an estimate (`exact` false) it says nothing: zeros."""

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
    event_id: str
    opened: tuple[OpenCall, ...]


class Correction(Receipt, frozen=True, kw_only=True, tag_field="kind", tag="correction"):
    """A receipt's own fields again, so that sums by any of them include it; but of the token counts and of `cost` only
    what is to be added to them, which may be negative, and the prices that hold instead. `finished` stays the call's:
    `corrected` is when this was written.
    """

    corrects: str  # the receipt's event id
    reason: str
    corrected: str  # RFC 3339, as `finished`


Row = OpenCall | Receipt | UnbilledWork | CarriedCalls | Correction

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Row).decode
"""One line's row, its place in the chain left out. Raises `msgspec.MsgspecError`."""


class RowHead(msgspec.Struct):
    """What every row has, whatever its kind."""

    kind: str
    event_id: str
    call_id: str | None = None
    attempt: int = 1
    deployment: str | None = None


decode_head = msgspec.json.Decoder(RowHead).decode


def attempts_left_open(opened: list[OpenCall], *, by: str, attempt: int, deployment: str | None) -> list[OpenCall]:
    """A call's attempts, those that a row of the kind `by` does not close."""
    if by == "unbilled":
        return [each for each in opened if each.attempt != attempt]
    if len(opened) == 1:
        return []
    last = max((each.attempt for each in opened if each.deployment == deployment), default=None)
    return [msgspec.structs.replace(each, in_vain=True) for each in opened if each.attempt != last]
