"""The billing benchmark's vendor bills what it generated, and its comparison finds work that the ledger bills as 0."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from benchmarks.billing.__main__ import compare
from benchmarks.billing.vendor import OVERHEAD, Server


async def _post(server: Server, path: str, body: dict[str, Any]) -> Any:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listener:
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        data = json.dumps(body).encode()
        writer.write(b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(data), data))
        head = await reader.readuntil(b"\r\n\r\n")
        answer = await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        writer.close()
    return json.loads(answer)


async def test_counting_tokens_is_free_and_agrees_with_the_bill() -> None:
    """The gateway counts the prompt of a client that left. Such a request is no generation, so no vendor bills it."""
    server, prompt = Server(), {"messages": [{"role": "user", "content": "x" * 37}]}
    assert (await _post(server, "/vllm/tokenize", prompt))["count"] == OVERHEAD + 10
    assert (await _post(server, "/anthropic/v1/messages/count_tokens", prompt))["input_tokens"] == OVERHEAD + 10
    text = {"prompt": "one two river ", "add_special_tokens": False}
    assert (await _post(server, "/vllm/tokenize", text))["count"] == 3
    assert server.bill == []
    await _post(server, "/vllm/v1/chat/completions", {**prompt, "max_tokens": 2})
    assert [(line.input, line.output) for line in server.bill] == [(OVERHEAD + 10, 2)]


def test_work_without_a_receipt_or_with_an_empty_one_is_found() -> None:
    line = {"vendor": "vllm", "input": 5, "output": 2, "units": {}}
    counts = {"kind": "receipt", "deployment": "vllm", "exact": True, "cache_read": 0, "cache_write": 0}
    rows = [
        {**counts, "call_id": "a", "input_uncached": 5, "output": 2},
        {**counts, "call_id": "b", "input_uncached": 0, "output": 0, "exact": False},
        {**counts, "call_id": "d", "input_uncached": 5, "output": 3},
    ]
    found = compare([{**line, "request_id": name} for name in ("a", "b", "c", "d")], rows)["vllm"]
    assert (found["billed_as_zero"], found["wrong_exact_receipts"]) == (2, 1)
