"""A client of a translated stream leaves at whichever event: it is billed for what came, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.gateway.endpoints.test_streams import BODIES, called, choice
from tests.gateway.harness import PATIENCE_SECONDS, Client, a_rig, cut, delta, in_time, settle, usage_frame


def frame(said: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(said).encode()


FRAMES = [
    frame(choice({"role": "assistant", "content": ""})),
    b": keep-alive\n\n",
    frame(choice({"reasoning_content": "hm"})),
    delta("one"),
    frame(choice(called(0, "c0", "look", '{"a":'))),
    frame(choice(called(0, None, None, "1}"))),
    frame(choice({}, "tool_calls")),
    usage_frame(10, 7),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("leaves", [True, False], ids=["the client leaves", "the server breaks off"])
async def test_a_stream_may_end_behind_every_event(tmp_path: Path, path: str, leaves: bool) -> None:
    """The rig looks at its end whether anything is held by anybody any more."""
    async with a_rig(tmp_path) as rig:
        for count in range(3, len(FRAMES) + 1):  # before the first output another server would be asked
            client = Client(json.dumps(BODIES[path]).encode(), path=f"/v1/{path}")
            serving = rig.begin(client)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(rig.replies) < count - 2:
                    await settle()
            reply = max(rig.replies, key=lambda each: each.number)
            for said in FRAMES[:count]:
                reply.say(said)
                await settle()
            if leaves:
                client.leave()
            else:
                reply.say(cut())
            await in_time(serving)
            receipt = next(each for each in rig.receipts() if each["call_id"] == client.headers["x-request-id"])
            assert receipt["outcome"] == ("client_gone" if leaves else "upstream_cut")
            billed = receipt["input_uncached"] + receipt["cache_read"], receipt["output"]
            if count == len(FRAMES):
                assert billed == (10, 7) and receipt["exact"], "as the server has counted it"
            else:
                assert billed[1] == min(count - 2, 5) and not receipt["exact"], (
                    "one for each frame since the first text"
                )
            assert reply.closed == 1
            assert b"message_stop" not in client.content and b"response.completed" not in client.content
            if not leaves:
                assert client.whole and (b"event: error" in client.content or b"response.failed" in client.content)
