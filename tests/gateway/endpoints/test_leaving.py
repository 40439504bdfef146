"""A translated stream may end at any event: the call is billed for what was generated, and nothing leaks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.gateway.endpoints.test_streams import BODIES, choice, tool_call
from tests.gateway.harness import PATIENCE_SECONDS, Client, a_rig, cut, delta, in_time, settle, usage_frame


def frame(event: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(event).encode()


FRAMES = [
    frame(choice({"role": "assistant", "content": ""})),
    b": keep-alive\n\n",
    frame(choice({"reasoning_content": "hm"})),
    delta("one"),
    frame(choice(tool_call(0, "c0", "look", '{"a":'))),
    frame(choice(tool_call(0, None, None, "1}"))),
    frame(choice({}, "tool_calls")),
    usage_frame(10, 7),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("leaves", [True, False], ids=["the client disconnects", "the deployment cuts the stream"])
async def test_a_stream_may_end_after_any_event(tmp_path: Path, path: str, leaves: bool) -> None:
    """The rig checks at its end that no slot, lease or memory is still held."""
    async with a_rig(tmp_path) as rig:
        for count in range(3, len(FRAMES) + 1):  # before the first output, another deployment would be tried
            client = Client(json.dumps(BODIES[path]).encode(), path=f"/v1/{path}")
            serving = rig.begin(client)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(rig.replies) < count - 2:
                    await settle()
            reply = max(rig.replies, key=lambda each: each.number)
            for event in FRAMES[:count]:
                reply.say(event)
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
                assert billed == (10, 7) and receipt["exact"], "as the deployment counted it"
            else:
                said = ["hm", "one", 'look{"a":', "1}", ""][: count - 2]
                assert billed[1] == -(-len("".join(said)) // 4) and not receipt["exact"], "by the bytes of the text"
            assert reply.closed == 1
            assert b"message_stop" not in client.content and b"response.completed" not in client.content
            if not leaves:
                assert client.whole and (b"event: error" in client.content or b"response.failed" in client.content)
