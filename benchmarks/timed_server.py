"""An OpenAI-compatible server with the times of a real one, and no inference: the upstream of `benchmarks.overload`.

    python -m benchmarks.timed_server --slots 16 --prefill-ms 80         # prints "listening on PORT"

It works on `--slots` calls at a time; the others wait in its own queue, first come, first served. A stream's first
token comes after a prefill of half to one and a half times `--prefill-ms`, the others at the pace that the request asks
for, as `benchmarks.gateway.mock_server` reads it. A call whose client leaves gives its slot back at once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import deque

import uvloop

from benchmarks.gateway.mock_server import MockServer


class Engine:
    """The slots, and who waits for one."""

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

    def give_up(self, call: TimedServer) -> None:
        self._waiting.remove(call)

    def _serve(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            self._waiting.popleft().work()


class TimedServer(MockServer):
    """One connection, and the one call on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        super().__init__(loop)
        self._engine = engine
        self._call: tuple[bytes, bytes] | None = None  # that waits or is worked on
        self._works = False

    def _answer(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST /v1/chat"):
            super()._answer(head, body)
            return
        self._call = (head, body)
        self._engine.enter(self)

    def work(self) -> None:
        assert self._call is not None
        self._works = True
        prefill = self._engine.prefill_seconds * self._engine.chance.uniform(0.5, 1.5)
        self._loop.call_later(prefill, self._first, *self._call)

    def _first(self, head: bytes, body: bytes) -> None:
        if not self._transport.is_closing():
            super()._answer(head, body)

    def _paced(self, events: list[bytes], index: int, start: float, interval_seconds: float) -> None:
        super()._paced(events, index, start, interval_seconds)
        if index + 1 == len(events):
            self._leave()

    def _leave(self) -> None:
        call, self._call = self._call, None
        works, self._works = self._works, False
        if works:
            self._engine.leave()
        elif call is not None:
            self._engine.give_up(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._leave()


async def serve(options: argparse.Namespace) -> None:
    loop, engine = asyncio.get_running_loop(), Engine(options.slots, options.prefill_ms / 1000)
    server = await loop.create_server(lambda: TimedServer(loop, engine), "127.0.0.1", 0, backlog=1024)
    print(f"listening on {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prefill-ms", type=float, default=80.0)
    uvloop.run(serve(parser.parse_args()))
