"""Events that only add text take a shorter way through the gateway: with the same bytes, receipts and open calls."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gateway.in_process import Load, MemoryLoop, gateway
from benchmarks.gateway.mock_server import STREAM_HEAD
from gateway.providers.text_events import DirectText, TextEvents
from gateway.settlement import NOTED_BYTES

END = b"0\r\n\r\n"
USAGE = {"prompt_tokens": 32, "completion_tokens": 8, "total_tokens": 40}


def event(text: str | None, **more: Any) -> bytes:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}, "finish_reason": None}]
    return b"data: " + json.dumps({"id": "x", "choices": choices, **more}, ensure_ascii=False).encode() + b"\n\n"


def coded(*frames: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(frame), frame) for frame in frames)


DONE = coded(b"data: [DONE]\n\n") + END
LONG = [coded(event(f" token {number}")) for number in range(3 * NOTED_BYTES // len(event(" token 100")))]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryLoop]:
    monkeypatch.setenv("WARMPATH_LOG_LEVEL", "warning")  # which `gateway` sets, too
    thresholds, loop = gc.get_threshold(), MemoryLoop()
    asyncio.set_event_loop(loop)
    yield loop
    asyncio.set_event_loop(None)
    loop.close()
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def relay(loop: MemoryLoop, folder: Path, reads: list[bytes]) -> tuple[bytes, list[dict[str, Any]]]:
    """The body that the client gets of a stream that arrives in these reads, and the rows of the ledger.

    Each read must contain something for the client, because the next one is sent when the client has got it.
    """
    folder.mkdir()
    load = Load((STREAM_HEAD + reads[0], *reads[1:]), END, stream=True)

    async def main() -> bytes:
        async with gateway(loop, folder) as ask:
            return await ask(load)

    _, _, body = loop.run_until_complete(main()).partition(b"\r\n\r\n")
    segments = (folder / "data").glob("ledger/*/*.jsonl")
    rows = [json.loads(line) for segment in segments for line in segment.read_text().splitlines()]
    return _payload(body), [row for row in rows if row["kind"] in ("opened", "receipt")]


def _payload(body: bytes) -> bytes:
    """The body without its transfer coding."""
    payload = b""
    while size := re.match(rb"([0-9a-f]+)\r\n", body):
        start, length = size.end(), int(size[1], 16)
        payload += body[start : start + length]
        body = body[start + length + 2 :]
    return payload


@pytest.mark.parametrize(
    "reads",
    [
        [
            coded(event("a")),
            coded(event("b")),
            coded(event("c"), event("d")),
            coded(event("e")),
            coded(event("f")),
            coded(event(None, usage=USAGE)) + DONE,
        ],
        [coded(event("a")), coded(event("é")), coded(event("\n")), coded(event("[DONE]")), DONE],
        [*LONG, DONE],
    ],
    ids=["usage", "texts", "long"],
)
def test_the_short_way_changes_nothing(
    loop: MemoryLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[bytes]
) -> None:
    counted = directly = 0
    count, take = TextEvents.count, DirectText.take

    def counting(texts: TextEvents, frames: bytes) -> int:
        nonlocal counted
        found = count(texts, frames)
        counted += found
        return found

    def taking(direct: DirectText, data: bytes) -> bool:
        nonlocal directly
        taken = take(direct, data)
        directly += taken
        return taken

    monkeypatch.setattr(TextEvents, "count", counting)
    monkeypatch.setattr(DirectText, "take", taking)
    body, rows = relay(loop, tmp_path / "short", reads)
    assert directly, "no event took the shortest way"
    assert counted or all(read.count(b"data: ") == 1 for read in reads), "no events took the short way together"
    monkeypatch.setattr(TextEvents, "count", lambda texts, frames: 0)
    monkeypatch.setattr(DirectText, "take", lambda direct, data: False)
    same_body, same_rows = relay(loop, tmp_path / "long", reads)
    assert body == same_body
    assert body.startswith(event("a") if len(reads) < 10 else event(" token 0"))
    told = ("kind", "output", "input_uncached", "exact", "source", "outcome", "output_tokens_received")
    assert [[row.get(name) for name in told] for row in rows] == [[row.get(name) for name in told] for row in same_rows]
    assert any(row.get("output_tokens_received") for row in rows) == (len(reads) > 10)
