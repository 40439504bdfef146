"""Translates answers of Ollama's API: complete chats, embeddings, streams of JSON lines, and errors.

A line of a stream is a JSON object. The last one has `done: true` and the counts. A tool call arrives in one line. If
the prompt's count is missing, the counts keep Ollama's names, so that metering knows that the prompt was not counted.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gateway.providers.sse import DONE, UNREADABLE, FrameTooLong, is_utf8
from gateway.providers.translation import MalformedAnswer, error_body

_encode = msgspec.json.encode
_FINISH = {"length": "length"}


class _Function(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Answer(msgspec.Struct):
    model: str = ""
    message: _Message | None = None
    done: bool = False
    done_reason: str | None = None
    prompt_eval_count: Any = None
    eval_count: Any = None
    logprobs: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None


class _Embeddings(msgspec.Struct):
    embeddings: list[msgspec.Raw]
    model: str = ""
    prompt_eval_count: Any = None


class _ErrorResponse(msgspec.Struct):
    error: str


_answer = msgspec.json.Decoder(_Answer).decode
_embeddings = msgspec.json.Decoder(_Embeddings).decode
_error_response = msgspec.json.Decoder(_ErrorResponse).decode


class LineSplitter:
    """Splits a stream of JSON lines into complete lines, as `FrameSplitter` splits a stream of events."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Add received bytes. Returns the lines that are now complete, or b"". Raises `FrameTooLong`."""
        if not self._held and data.endswith(b"\n"):
            return data
        searched = len(self._held)
        self._held += data
        end = self._held.rfind(b"\n", searched) + 1
        if len(self._held) - end > self._max_line_bytes:
            raise FrameTooLong(f"a line is longer than {self._max_line_bytes} bytes")
        lines = bytes(self._held[:end])
        del self._held[:end]
        return lines

    @property
    def rest(self) -> bytes:
        """Return the buffered bytes: at the end of a stream, a line that was cut or lacks its line end."""
        return bytes(self._held)


def chat_usage(source: _Answer) -> dict[str, Any]:
    """Return a chat's `usage`. Without the prompt's count, the counts have Ollama's names."""
    prompt, output = source.prompt_eval_count, source.eval_count
    if not (isinstance(prompt, int) and isinstance(output, int)):
        return {"prompt_eval_count": prompt, "eval_count": output}
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def chat_completion(body: bytes, call_id: str) -> bytes:
    """Translate a complete answer. `call_id` names the answer, which has no id. Raises `MalformedAnswer`."""
    source = _read(body)
    if source.message is None or not source.done:
        raise MalformedAnswer("the response is not a complete chat")
    text, calls = source.message.content or "", _tool_calls(source.message, call_id, 0)
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if source.message.thinking:
        message["reasoning_content"] = source.message.thinking
    if calls:
        message["tool_calls"] = calls
    finish = _finish(source, bool(calls))
    choice = {"index": 0, "message": message, "logprobs": _logprobs(source), "finish_reason": finish}
    return _encode({**_head(source, call_id, "chat.completion"), "choices": [choice], "usage": chat_usage(source)})


def embedding_list(body: bytes) -> bytes:
    """Translate embeddings. Raises `MalformedAnswer`."""
    try:
        source = _embeddings(body)
    except UNREADABLE as problem:
        raise MalformedAnswer(f"the response is not Ollama's: {problem}") from None
    data = [{"object": "embedding", "index": n, "embedding": each} for n, each in enumerate(source.embeddings)]
    count = source.prompt_eval_count
    usage = {"prompt_tokens": count, "total_tokens": count} if isinstance(count, int) else {}
    return _encode({"object": "list", "data": data, "model": source.model, "usage": usage})


def _read(data: bytes) -> _Answer:
    try:
        return _answer(data)
    except UNREADABLE as problem:
        raise MalformedAnswer(f"the response is not Ollama's: {problem}") from None


def _head(source: _Answer, call_id: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{call_id}", "object": kind, "created": int(time.time()), "model": source.model}


def _tool_calls(message: _Message, call_id: str, first: int) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id or f"call_{call_id}_{number}",
            "type": "function",
            "function": {"name": call.function.name, "arguments": bytes(call.function.arguments).decode()},
        }
        for number, call in enumerate(message.tool_calls or (), start=first)
    ]


def _finish(source: _Answer, has_calls: bool) -> str:
    return _FINISH.get(source.done_reason or "", "tool_calls" if has_calls else "stop")


def _logprobs(source: _Answer) -> dict[str, Any] | None:
    return None if bytes(source.logprobs) == b"null" else {"content": source.logprobs}


def openai_error(body: bytes) -> bytes:
    """Translate the body of an error response. A body of another format is returned unchanged."""
    try:
        message = _error_response(body).error
    except UNREADABLE:
        return body
    return error_body(message, code=None)


class OllamaStreamTranslator:
    """Translates the lines of one stream. See `StreamTranslator`."""

    end_marker = "done"

    def __init__(self, call_id: str) -> None:
        self.ended = False
        self.failure: Any = None
        self._call_id = call_id
        self._head = b""  # the fields that all chunks have in common, as JSON without its closing brace
        self._calls = 0

    def feed(self, frames: bytes) -> bytes:
        """Translate complete lines to chunks."""
        if not is_utf8(frames):
            raise MalformedAnswer("a line of the stream is not UTF-8")
        chunks = []
        for line in filter(None, frames.splitlines()):
            source = _read(line)
            if source.error:
                self.failure = source.error
                break
            if source.message is None and not source.done:
                raise MalformedAnswer("a line of the stream has no message")
            chunks.append(self._translate(source))
            if self.ended:
                break
        return b"".join(chunks)

    def finish(self) -> bytes:
        """Return nothing: only `done` ends a stream."""
        return b""

    def _translate(self, source: _Answer) -> bytes:
        chunks = []
        if not self._head:
            self._head = _encode(_head(source, self._call_id, "chat.completion.chunk"))[:-1]
            chunks.append(self._chunk({"role": "assistant", "content": ""}))
        if (message := source.message) is not None:
            if message.thinking:
                chunks.append(self._chunk({"reasoning_content": message.thinking}))
            if message.content:
                chunks.append(self._chunk({"content": message.content}, logprobs=_logprobs(source)))
            for number, call in enumerate(_tool_calls(message, self._call_id, self._calls), start=self._calls):
                self._calls = number + 1
                chunks.append(self._chunk({"tool_calls": [{"index": number, **call}]}))
        if source.done:
            self.ended = True
            chunks.append(self._chunk({}, finish=_finish(source, bool(self._calls))))
            chunks.append(b'data: %b,"choices":[],"usage":%b}\n\n' % (self._head, _encode(chat_usage(source))))
            chunks.append(DONE)
        return b"".join(chunks)

    def _chunk(self, delta: dict[str, Any], *, finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return b'data: %b,"choices":[%b]}\n\n' % (self._head, _encode(choice))
