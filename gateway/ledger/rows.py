"""The kinds of rows. Each is one JSON object; `kind` says which it is, and each has an `event_id` of its own.

  opened       a server is about to be asked: written before the request leaves, one per attempt, closed by the receipt
               of its `call_id`. One without a receipt belongs to a call that runs, or to a gateway that was killed.
  receipt      the call is over, and this is what it is billed for: `gateway.types.Receipt`
  carried      begins a segment: what was open at that moment, so that no earlier segment has to be read for it
  correction   what a receipt should have said, as a difference to it: add up both

Whoever bills adds up `receipt` and `correction`, and passes over the rest. No row is ever changed.
"""

from __future__ import annotations

import msgspec

from gateway.types import Receipt


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="opened"):
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


class Carried(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="carried"):
    event_id: str
    opened: tuple[Opened, ...]


class Correction(Receipt, frozen=True, kw_only=True, tag_field="kind", tag="correction"):
    """A receipt's own fields again, so that sums by any of them include it; but of the token counts and of `cost` only
    what is to be added to them, which may be negative, and the prices that hold instead. `finished` stays the call's:
    `corrected` is when this was written.
    """

    corrects: str  # the receipt's event id
    reason: str
    corrected: str  # RFC 3339, as `finished`


Row = Opened | Receipt | Carried | Correction

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Row).decode
"""One line's row, its place in the chain left out. Raises `msgspec.MsgspecError`."""


class Head(msgspec.Struct):
    """What every row has, whatever its kind."""

    kind: str
    event_id: str
    call_id: str | None = None


decode_head = msgspec.json.Decoder(Head).decode
