"""KV events of TensorRT-LLM: order, gaps, restarts, malformed responses and polling."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.prefix.events.base import BlocksRemoved, BlocksStored, EventCounts
from gateway.prefix.events.trtllm import TensorRTEventSource
from tests.gateway.prefix.events.conftest import Recorder

CREATED = {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [101230, 0]}, "window_size": 256}
STORED = {
    "event_id": 1,
    "data": {
        "type": "stored",
        "parent_hash": None,
        "blocks": [
            {
                "type": "stored_block",
                "block_hash": 4203099703668305365,
                "tokens": [{"type": "unique_token", "token_id": i, "token_extra_id": 0} for i in range(4)],
                "cache_level": 0,
                "priority": 35,
            },
            {"type": "stored_block", "block_hash": 7, "tokens": [{"token_id": 1}], "cache_level": 0, "priority": 35},
        ],
    },
}
UPDATED = {"event_id": 2, "data": {"type": "updated", "block_hash": 7, "cache_level": {"old_value": 0, "new_value": 1}}}
REMOVED = {"event_id": 3, "data": {"type": "removed", "block_hashes": [7]}}
READ = ["cleared", BlocksStored((4203099703668305365, 7), None, 4), BlocksRemoved((7,))]


class Server:
    """Returns each of its responses once, and then none."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def post(self) -> bytes | None:
        self.asked += 1
        return self.answers.pop(0) if self.answers else b"[]"


def body(*events: object) -> bytes:
    return json.dumps(events).encode()


def source(recorder: Recorder, engine: Server | None = None, counts: EventCounts | None = None) -> TensorRTEventSource:
    return TensorRTEventSource((engine or Server()).post, recorder, counts or EventCounts())


def test_events_are_applied_in_order(recorder: Recorder) -> None:
    assert source(recorder).take(body(CREATED, STORED, UPDATED, REMOVED))
    assert recorder.received == READ


def test_gaps_and_restarts_are_reported(recorder: Recorder) -> None:
    counts = EventCounts()
    following = source(recorder, counts=counts)
    following.take(body(STORED))
    following.take(body(REMOVED))
    following.take(body(CREATED))
    assert recorder.received == [READ[1], "lost", READ[2], "cleared", "cleared"]
    assert counts.gaps == 1


@pytest.mark.parametrize("answer", [b"{}", b"nothing", b'[{"event_id": "x"}]'])
def test_malformed_responses_are_counted(recorder: Recorder, answer: bytes) -> None:
    counts = EventCounts()
    assert not source(recorder, counts=counts).take(answer)
    assert counts.malformed == 1


async def test_polling_continues_and_backs_off_while_the_server_does_not_answer(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 5:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    engine = Server(body(CREATED, STORED), None, b"no", body(UPDATED, REMOVED))
    with pytest.raises(asyncio.CancelledError):
        await source(recorder, engine).run()
    assert recorder.received == READ
    assert pauses == [0.5, 1.0, 2.0, 0.5, 0.5]
