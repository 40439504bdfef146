"""An OpenAI-compatible server with realistic service times and no inference: the upstream of `benchmarks.overload`.

    python -m benchmarks.timed_server --slots 16 --prefill-ms 80         # prints "listening on PORT"

It processes `--slots` calls at a time. More calls wait in its own queue, first come, first served. The first token of a
stream comes after a prefill of 0.5 to 1.5 times `--prefill-ms`, at random. The other tokens come at the pace that the
request sets, in the format of `benchmarks.gateway.mock_server`. If a client disconnects, its slot is released at once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import deque

import uvloop

from benchmarks.gateway.mock_server import MockServer


class Slots:
    """The slots, and the queue of calls without one."""

    def __init__(self, slots: int, prefill_seconds: float) -> None:
        self.prefill_seconds = prefill_seconds
        self.chance = random.Random(1)
        self._free = slots
        self._waiting: deque[TimedServer] = deque()

    def enter(self, call: TimedServer) -> None:
        self._waiting.append(call)
        self._serve()

    def leave(self) -> None:
        self._free += 1
        self._serve()

    def remove(self, call: TimedServer) -> None:
        self._waiting.remove(call)

    def _serve(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            self._waiting.popleft().work()


class TimedServer(MockServer):
    """One connection, with at most one call at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slots: Slots) -> None:
        super().__init__(loop)
        self._slots = slots
        self._call: tuple[bytes, bytes] | None = None  # queued or in flight
        self._in_flight = False

    def _answer(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST /v1/chat"):
            super()._answer(head, body)
            return
        self._call = (head, body)
        self._slots.enter(self)

    def work(self) -> None:
        assert self._call is not None
        self._in_flight = True
        prefill = self._slots.prefill_seconds * self._slots.chance.uniform(0.5, 1.5)
        self._loop.call_later(prefill, self._begin_answer, *self._call)

    def _begin_answer(self, head: bytes, body: bytes) -> None:
        if not self._transport.is_closing():
            super()._answer(head, body)

    def _paced(self, events: list[bytes], index: int, start: float, interval_seconds: float) -> None:
        super()._paced(events, index, start, interval_seconds)
        if index + 1 == len(events):
            self._end_call()

    def _end_call(self) -> None:
        call, self._call = self._call, None
        in_flight, self._in_flight = self._in_flight, False
        if in_flight:
            self._slots.leave()
        elif call is not None:
            self._slots.remove(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._end_call()


async def serve(options: argparse.Namespace) -> None:
    loop, slots = asyncio.get_running_loop(), Slots(options.slots, options.prefill_ms / 1000)
    server = await loop.create_server(lambda: TimedServer(loop, slots), "127.0.0.1", 0, backlog=1024)
    print(f"listening on {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prefill-ms", type=float, default=80.0)
    uvloop.run(serve(parser.parse_args()))
