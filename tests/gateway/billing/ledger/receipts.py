"""Makes receipts and corrections, and writes chains of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from gateway.billing.ledger.chain import GENESIS, encode_row
from gateway.billing.ledger.reader import TOKENS
from gateway.billing.ledger.rows import Correction, Row
from gateway.core.ids import new_event_id
from gateway.types import AttemptRow, Receipt

_TYPICAL = Receipt(
    event_id="",
    call_id="req_1",
    tenant="acme",
    key_id="key_1",
    end_user=None,
    model_asked="gpt-4o",
    model_served="qwen3-32b",
    deployment="h200-a",
    service_tier=None,
    started="2026-11-20T10:00:00.000001Z",
    finished="2026-11-20T10:00:01.000001Z",
    ttft_seconds=0.25,
    source="engine",
    exact=True,
    input_uncached=36,
    cache_read=64,
    cache_write=0,
    output=3,
    reasoning=2,
    price_version="1",
    price_input="0.10",
    price_cached_input="0.01",
    price_output="0.40",
    cost="0.00000544",
    currency="USD",
    attempts=(AttemptRow("0" * 16, 0.000123, 0.999876, 64),),
    policy_hash="0123456789abcdef",
    trace_id="0" * 32,
)


def a_receipt(**changes: Any) -> Receipt:
    return msgspec.structs.replace(_TYPICAL, **{"event_id": new_event_id(), **changes})


def a_correction(receipt: Receipt, **changes: Any) -> Correction:
    """A correction that only changes what `changes` says."""
    fields = msgspec.structs.asdict(receipt)
    nothing = dict.fromkeys(TOKENS, 0)
    about = {"corrects": receipt.event_id, "reason": "test", "corrected": "2026-11-21T00:00:00.000000Z"}
    return Correction(**{**fields, **nothing, "cost": "0", **about, "event_id": new_event_id(), **changes})


def write_chain(chain: Path, rows: Sequence[Row], *, rows_per_segment: int = 2) -> None:
    chain.mkdir(parents=True)
    head = GENESIS
    for start in range(0, len(rows), rows_per_segment):
        with (chain / f"{start // rows_per_segment + 1:010d}.jsonl").open("wb") as segment:
            for row in rows[start : start + rows_per_segment]:
                line, head = encode_row(row, head)
                segment.write(line)
