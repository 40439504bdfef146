"""Translates answers of Gemini's API to chat completions: complete answers, streams and errors.

A stream has no end marker, and older models set `finishReason` in every event. So a stream ends with its body, and the
end of the chat is sent then. Thoughts become `reasoning_content`. A function call arrives in one event, with the
signature of the thought before it, which becomes `extra_content.google.thought_signature` of the tool call.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gateway.providers.sse import DONE, UNREADABLE, event_data, is_utf8
from gateway.providers.translation import MalformedAnswer, error_body
from gateway.providers.usage.base import TokenCount

_FINISH = {
    "MAX_TOKENS": "length", "SAFETY": "content_filter", "RECITATION": "content_filter", "BLOCKLIST": "content_filter",
    "PROHIBITED_CONTENT": "content_filter", "SPII": "content_filter", "IMAGE_SAFETY": "content_filter",
    "IMAGE_PROHIBITED_CONTENT": "content_filter", "IMAGE_RECITATION": "content_filter", "MODEL_ARMOR": "content_filter",
}  # fmt: skip
_TYPES = {
    "INVALID_ARGUMENT": "invalid_request_error", "FAILED_PRECONDITION": "invalid_request_error",
    "NOT_FOUND": "not_found_error", "RESOURCE_EXHAUSTED": "rate_limit_error",
}  # fmt: skip
_encode = msgspec.json.encode


class _FunctionCall(msgspec.Struct):
    name: str
    id: str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Blob(msgspec.Struct, rename="camel"):
    data: str
    mime_type: str = "application/octet-stream"


class _Part(msgspec.Struct, rename="camel"):
    text: str = ""
    thought: bool = False
    thought_signature: str | None = None
    function_call: _FunctionCall | None = None
    inline_data: _Blob | None = None


class _Content(msgspec.Struct):
    parts: list[_Part] | None = None


class _Candidate(msgspec.Struct, rename="camel"):
    content: _Content | None = None
    finish_reason: str | None = None
    index: int = 0

    @property
    def parts(self) -> list[_Part]:
        return (self.content.parts if self.content else None) or []


class _ModalityCount(msgspec.Struct, rename="camel"):
    modality: str = ""
    token_count: TokenCount = 0


class _Usage(msgspec.Struct, rename="camel"):
    prompt_token_count: TokenCount | None = None
    cached_content_token_count: TokenCount | None = None
    candidates_token_count: TokenCount | None = None
    thoughts_token_count: TokenCount | None = None
    tool_use_prompt_token_count: TokenCount | None = None
    total_token_count: TokenCount | None = None
    prompt_tokens_details: list[_ModalityCount] | None = None
    candidates_tokens_details: list[_ModalityCount] | None = None


class _Feedback(msgspec.Struct, rename="camel"):
    block_reason: str | None = None


class _Answer(msgspec.Struct, rename="camel"):
    candidates: list[_Candidate] | None = None
    usage_metadata: msgspec.Raw = msgspec.Raw(b"null")
    prompt_feedback: _Feedback | None = None
    model_version: str = ""
    response_id: str = ""
    error: Any = None


class _Error(msgspec.Struct):
    message: str = ""
    status: str = ""


class _ErrorResponse(msgspec.Struct):
    error: _Error


_answer = msgspec.json.Decoder(_Answer).decode
_usage = msgspec.json.Decoder(_Usage | None).decode
_error_response = msgspec.json.Decoder(_ErrorResponse).decode


def chat_usage(counts: msgspec.Raw) -> dict[str, Any] | msgspec.Raw | None:
    """Return a chat's `usage`; None if there are no counts. Malformed counts stay, so that metering reports them.

    The prompt's count includes cached tokens. The candidates' excludes thoughts, and a chat's output includes them.
    """
    try:
        usage = _usage(counts)
    except UNREADABLE:
        return counts
    if usage is None:
        return None
    prompt = (usage.prompt_token_count or 0) + (usage.tool_use_prompt_token_count or 0)
    thoughts = usage.thoughts_token_count or 0
    output = (usage.candidates_token_count or 0) + thoughts
    details = {"cached_tokens": usage.cached_content_token_count or 0}
    if audio := _tokens_of(usage.prompt_tokens_details, "AUDIO"):
        details["audio_tokens"] = audio
    fields: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output if usage.total_token_count is None else usage.total_token_count,
        "prompt_tokens_details": details,
    }
    spoken = _tokens_of(usage.candidates_tokens_details, "AUDIO")
    if thoughts or spoken:
        fields["completion_tokens_details"] = {"reasoning_tokens": thoughts, "audio_tokens": spoken}
    return fields


def _tokens_of(details: list[_ModalityCount] | None, modality: str) -> int:
    return sum(each.token_count for each in details or () if each.modality == modality)


def chat_completion(body: bytes) -> bytes:
    """Translate a complete answer. Raises `MalformedAnswer`."""
    try:
        source = _answer(body)
    except UNREADABLE as problem:
        raise MalformedAnswer(f"the response is not Gemini's: {problem}") from None
    candidates = source.candidates or _blocked(source)
    if not candidates:
        raise MalformedAnswer("the response has no candidates")
    choices = [_choice(candidate, source.response_id) for candidate in candidates]
    usage = chat_usage(source.usage_metadata)
    return _encode({**_head(source, "chat.completion"), "choices": choices, **({"usage": usage} if usage else {})})


def _blocked(source: _Answer) -> list[_Candidate]:
    """The candidate for a prompt that the server did not accept."""
    feedback = source.prompt_feedback
    blocked = feedback is not None and feedback.block_reason
    return [_Candidate(finish_reason="PROHIBITED_CONTENT")] if blocked else []


def _head(source: _Answer, kind: str) -> dict[str, Any]:
    return {"id": source.response_id, "object": kind, "created": int(time.time()), "model": source.model_version}


def _choice(candidate: _Candidate, response_id: str) -> dict[str, Any]:
    parts = candidate.parts
    text = "".join(part.text for part in parts if not part.thought)
    reasoning = "".join(part.text for part in parts if part.thought)
    called = [(part, part.function_call) for part in parts if part.function_call is not None]
    calls = [_tool_call(*each, number, candidate.index, response_id) for number, each in enumerate(called)]
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    message |= _media(parts)
    finish = _finish(candidate.finish_reason, bool(calls))
    return {"index": candidate.index, "message": message, "logprobs": None, "finish_reason": finish}


def _media(parts: list[_Part]) -> dict[str, Any]:
    """Generated images as OpenRouter and others put them into a message."""
    urls = [f"data:{part.inline_data.mime_type};base64,{part.inline_data.data}" for part in parts if part.inline_data]
    return {"images": [{"type": "image_url", "image_url": {"url": url}} for url in urls]} if urls else {}


def _tool_call(part: _Part, function: _FunctionCall, number: int, candidate: int, response_id: str) -> dict[str, Any]:
    arguments = bytes(function.args).decode()
    call: dict[str, Any] = {
        "id": function.id or f"call_{response_id or 'gemini'}_{candidate}_{number}",
        "type": "function",
        "function": {"name": function.name, "arguments": "{}" if arguments == "null" else arguments},
    }
    if part.thought_signature:
        call["extra_content"] = {"google": {"thought_signature": part.thought_signature}}
    return call


def _finish(reason: str | None, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason in (None, "STOP") else _FINISH.get(reason or "", "stop")


def openai_error(body: bytes) -> bytes:
    """Translate the body of an error response. A body of another format is returned unchanged."""
    try:
        error = _error_response(body).error
    except UNREADABLE:
        return body
    if not error.status:  # not Google's
        return body
    code = "context_length_exceeded" if "token count" in error.message and "exceeds" in error.message else None
    return error_body(error.message, kind=_TYPES.get(error.status, "api_error"), code=code)


class GeminiStreamTranslator:
    """Translates the events of one stream. See `StreamTranslator`."""

    end_marker = "finishReason"

    def __init__(self) -> None:
        self.ended = False
        self.failure: Any = None
        self._head = b""  # the fields that all chunks have in common, as JSON without its closing brace
        self._response_id = ""
        self._usage = msgspec.Raw(b"null")
        self._finished: dict[int, str] = {}  # the last reason of each candidate
        self._calls: dict[int, int] = {}  # how many function calls each candidate has made

    def feed(self, frames: bytes) -> bytes:
        """Translate complete frames to chunks."""
        if not is_utf8(frames):
            raise MalformedAnswer("an event of the stream is not UTF-8")
        chunks = []
        for data in filter(None, event_data(frames)):
            try:
                event = _answer(data)
            except UNREADABLE as problem:
                raise MalformedAnswer(f"an event of the stream is not Gemini's: {problem}") from None
            if event.error:
                self.failure = event.error
                break
            chunks.append(self._translate(event))
        return b"".join(chunks)

    def finish(self) -> bytes:
        """End the chat, if the candidates have finished."""
        if not self._finished or self.failure is not None:
            return b""
        self.ended = True
        ends = b"".join(
            self._chunk(index, {}, _finish(reason, bool(self._calls.get(index))))
            for index, reason in sorted(self._finished.items())
        )
        usage = chat_usage(self._usage)
        counts = b"" if usage is None else b'data: %b,"choices":[],"usage":%b}\n\n' % (self._head, _encode(usage))
        return ends + counts + DONE

    def _translate(self, event: _Answer) -> bytes:
        if bytes(event.usage_metadata) != b"null":
            self._usage = event.usage_metadata  # cumulative
        candidates = event.candidates or (_blocked(event) if not self._head else [])
        chunks = []
        if not self._head:
            if not candidates and bytes(event.usage_metadata) == b"null":
                raise MalformedAnswer("an event of the stream has neither candidates nor counts")
            self._response_id = event.response_id
            self._head = _encode(_head(event, "chat.completion.chunk"))[:-1]
            chunks = [self._chunk(each.index, {"role": "assistant", "content": ""}) for each in candidates]
        for candidate in candidates:
            chunks += [self._part(part, candidate.index) for part in candidate.parts]
            if candidate.finish_reason:
                self._finished[candidate.index] = candidate.finish_reason
        return b"".join(chunks)

    def _part(self, part: _Part, index: int) -> bytes:
        if part.function_call is not None:
            number = self._calls.get(index, 0)
            self._calls[index] = number + 1
            call = _tool_call(part, part.function_call, number, index, self._response_id)
            return self._chunk(index, {"tool_calls": [{"index": number, **call}]})
        if part.inline_data is not None:
            return self._chunk(index, _media([part]))
        if not part.text:
            return b""
        return self._chunk(index, {"reasoning_content" if part.thought else "content": part.text})

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return b'data: %b,"choices":[%b]}\n\n' % (self._head, _encode(choice))
