"""A scripted vendor: answers in every API that the gateway speaks, and keeps its own bill of what it has done.

    python -m benchmarks.billing.vendor        # prints "listening on PORT"

The first part of a path names the vendor, as in /anthropic/v1/messages. What a vendor bills when its client disconnects
is in `VENDORS`. Prompts are counted as one token for `PROMPT_BYTES` bytes of text, and `OVERHEAD` tokens for the
template. An answer has as many tokens as the request asks for, each one word. Requests that only count tokens are free.
`GET /bill` returns one line per request.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

PROMPT_BYTES = 3.7
OVERHEAD = 6
TOKEN_SECONDS = 0.004
RECORDED_SECONDS = 2.5
WORDS = ("one ", "two ", "river ", "of ", "stone ", "and ", "light ", "a ")
MAX_HEAD_BYTES = 64 * 1024
COUNTING = ("tokenize", "messages/count_tokens")  # paths that count tokens, which no vendor bills


class Vendor(NamedTuple):
    """How a vendor bills. `reads_on`: it does not notice a disconnect. `records`: it says what each request used.

    Every second answer begins late, after `late_seconds`.
    """

    reads_on: bool = False
    records: bool = False
    late_seconds: float = 0.0


VENDORS = {
    "openai": Vendor(),
    "reads": Vendor(reads_on=True),
    "vllm": Vendor(),
    "recorded": Vendor(records=True),
    "anthropic": Vendor(),
    "gemini": Vendor(reads_on=True),
    "ollama": Vendor(),
    "media": Vendor(),
    "late": Vendor(late_seconds=0.6),
    "late_reads": Vendor(reads_on=True, late_seconds=0.6),
    "spare": Vendor(),
}


@dataclass
class Line:
    """One request of the bill."""

    vendor: str
    request_id: str
    input: int = 0
    output: int = 0
    units: dict[str, float] = field(default_factory=dict)
    ended: bool = False


def prompt_tokens(body: Any) -> int:
    """Count the text of a prompt, wherever an API puts it."""
    return OVERHEAD + math.ceil(_text_bytes(body) / PROMPT_BYTES)


def _text_bytes(value: Any, key: str = "") -> int:
    if isinstance(value, str):
        return len(value.encode()) if key in ("content", "text", "system", "prompt", "input") else 0
    if isinstance(value, list):
        return sum(_text_bytes(each, key) for each in value)
    if isinstance(value, dict):
        return sum(_text_bytes(each, name) for name, each in value.items())
    return 0


def _output_tokens(body: dict[str, Any]) -> int:
    options = {**body, **body.get("generationConfig", {}), **body.get("options", {})}
    names = ("max_tokens", "max_completion_tokens", "maxOutputTokens", "num_predict")
    return next((int(options[name]) for name in names if options.get(name)), 16)


class Answer(NamedTuple):
    """The parts of an answer in one API: `begin`, one part for each word, and `end`. `whole` is the JSON form."""

    media_type: str
    begin: list[bytes]
    end: list[bytes]
    whole: Any


def _event(value: Any, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value)}\n\n".encode()


def _word(vendor: str, word: str) -> bytes:
    if vendor == "anthropic":
        delta = {"type": "text_delta", "text": word}
        return _event({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")
    if vendor == "gemini":
        return _event({"candidates": [{"content": {"role": "model", "parts": [{"text": word}]}, "index": 0}]})
    if vendor == "ollama":
        message = {"role": "assistant", "content": word}
        return (
            json.dumps({"model": "m", "created_at": "2026-11-20T00:00:00Z", "message": message, "done": False}).encode()
            + b"\n"
        )
    choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
    return _event({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


def _answer(vendor: str, body: dict[str, Any], line: Line, text: str) -> Answer:
    used = {"prompt_tokens": line.input, "completion_tokens": line.output}
    if vendor == "anthropic":
        counts = {"input_tokens": line.input, "output_tokens": line.output}
        message = {"id": "msg", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
        begin: dict[str, Any] = {
            **message,
            "content": [],
            "stop_reason": None,
            "usage": {"input_tokens": line.input, "output_tokens": 1},
        }
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        delta = {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": counts}
        return Answer(
            "text/event-stream",
            [
                _event({"type": "message_start", "message": begin}, "message_start"),
                _event(block, "content_block_start"),
            ],
            [
                _event({"type": "content_block_stop", "index": 0}, "content_block_stop"),
                _event(delta, "message_delta"),
                _event({"type": "message_stop"}, "message_stop"),
            ],
            {**message, "content": [{"type": "text", "text": text}], "stop_reason": "end_turn", "usage": counts},
        )
    if vendor == "gemini":
        whole_count = line.input + line.output
        counts = {
            "promptTokenCount": line.input,
            "candidatesTokenCount": line.output,
            "totalTokenCount": whole_count,
        }
        part = {"content": {"role": "model", "parts": [{"text": ""}]}, "finishReason": "STOP", "index": 0}
        whole = {
            "candidates": [{**part, "content": {"role": "model", "parts": [{"text": text}]}}],
            "usageMetadata": counts,
        }
        return Answer("text/event-stream", [], [_event({"candidates": [part], "usageMetadata": counts})], whole)
    if vendor == "ollama":
        end = {"model": "m", "created_at": "2026-11-20T00:00:00Z", "done": True, "done_reason": "stop",
               "prompt_eval_count": line.input, "eval_count": line.output}  # fmt: skip
        last = json.dumps({**end, "message": {"role": "assistant", "content": ""}}).encode() + b"\n"
        return Answer("application/x-ndjson", [], [last], {**end, "message": {"role": "assistant", "content": text}})
    counts = {**used, "total_tokens": line.input + line.output}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    return Answer(
        "text/event-stream",
        [
            _event({**chunk, "choices": [first]}),
        ],
        [
            _event({**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
            _event({**chunk, "choices": [], "usage": counts}),
            b"data: [DONE]\n\n",
        ],
        {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": counts},
    )


class Server:
    """All vendors on one port."""

    def __init__(self) -> None:
        self.bill: list[Line] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while request := await _read_request(reader):
                if not await self._respond(*request, reader, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _respond(
        self,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        vendor, _, rest = path.lstrip("/").partition("/")
        if vendor == "bill":
            return await _send_json(writer, [asdict(line) for line in self.bill])
        if rest.startswith("requests/"):
            found = next((each for each in self.bill if each.request_id == rest[9:] and each.vendor == vendor), None)
            return await _send_json(writer, _record(found), status=200 if found is not None and found.ended else 404)
        if vendor not in VENDORS or not body:
            return await _send_json(writer, {"object": "list", "data": []})
        fields = {} if body.startswith(b"--") else json.loads(body)
        if rest.endswith(COUNTING):
            return await _send_json(writer, _counted(fields))
        line = Line(vendor, headers.get("x-request-id", ""), input=prompt_tokens(fields))
        self.bill.append(line)
        if vendor == "media":
            line.ended = True
            return await _send_json(writer, _media(rest, fields, line))
        return await self._generate(vendor, rest, fields, line, reader, writer)

    async def _generate(
        self, vendor: str, path: str, fields: dict[str, Any], line: Line, reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:  # fmt: skip
        """Generate an answer word by word, and bill each word when it is generated."""
        if len(self.bill) % 2:
            await asyncio.sleep(VENDORS[vendor].late_seconds)
        count = _output_tokens(fields)
        streams = bool(fields.get("stream")) or "streamGenerateContent" in path
        gone = asyncio.ensure_future(reader.read(1))  # ends when the client disconnects
        text: list[str] = []
        try:
            if streams:
                begin = _answer(vendor, fields, line, "")
                _send(
                    writer,
                    b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"
                    % begin.media_type.encode(),
                )
                for part in begin.begin:
                    _send(writer, _coded(part))
            async for word in _words(count):
                if gone.done() and not VENDORS[vendor].reads_on:
                    return False
                line.output += 1
                text.append(word)
                if streams:
                    _send(writer, _coded(_word(vendor, word)))
            answer = _answer(vendor, fields, line, "".join(text))
            if not streams:
                return await _send_json(writer, answer.whole)
            for part in answer.end:
                _send(writer, _coded(part))
            _send(writer, b"0\r\n\r\n")
            return True
        finally:
            line.ended = True
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)


def _counted(fields: dict[str, Any]) -> Any:
    """Count tokens without billing them: those of a prompt, or of a text that the vendor has generated."""
    is_text = "messages" not in fields and not fields.get("add_special_tokens", True)
    count = len(fields["prompt"].split()) if is_text else prompt_tokens(fields)
    return {"count": count, "input_tokens": count, "max_model_len": 32_768, "tokens": []}


def _record(line: Line | None) -> Any:
    if line is None or not line.ended:
        return {"error": {"message": "no record"}}
    counts = {"prompt_tokens": line.input, "completion_tokens": line.output, "total_tokens": line.input + line.output}
    return {"id": line.request_id, "object": "request", "usage": counts}


def _media(path: str, fields: dict[str, Any], line: Line) -> Any:
    if path.endswith("images/generations"):
        line.input, line.units = 0, {"image": float(fields.get("n", 1))}
        return {"created": 1, "data": [{"b64_json": "aGVsbG8="}] * int(fields.get("n", 1))}
    if path.endswith("rerank"):
        line.input, line.units = 0, {"search": 1.0}
        ranked = [{"index": number, "relevance_score": 0.5} for number in range(len(fields["documents"]))]
        return {"id": "r", "results": ranked, "meta": {"billed_units": {"search_units": 1}}}
    if path.endswith("audio/transcriptions"):
        line.input, line.units = 0, {"second": RECORDED_SECONDS}
        return {"text": "a river", "usage": {"type": "duration", "seconds": RECORDED_SECONDS}}
    usage = {"prompt_tokens": line.input, "total_tokens": line.input}
    data = [{"object": "embedding", "index": 0, "embedding": [0.1, 0.2]}]
    return {"object": "list", "model": "m", "data": data, "usage": usage}


async def _words(count: int) -> AsyncIterator[str]:
    for number in range(count):
        await asyncio.sleep(TOKEN_SECONDS)
        yield WORDS[number % len(WORDS)]


def _coded(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)


async def _send_json(writer: asyncio.StreamWriter, value: Any, *, status: int = 200) -> bool:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    _send(writer, head.encode() + body)
    await writer.drain()
    return True


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes] | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return urlsplit(first.split(" ")[1]).path, headers, body


async def main() -> None:
    """Serve until the process is ended."""
    server = await asyncio.start_server(Server().serve, "127.0.0.1", 0, limit=MAX_HEAD_BYTES, backlog=4096)
    print(f"listening on {server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
