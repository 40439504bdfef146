"""A chat's answer as servers give it, whole or in pieces: what of it becomes part of a response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.counts import Counts, usage_of
from gateway.errors import UpstreamCut

Json = dict[str, Any]
_ABSENT = msgspec.Raw(b"null")


class Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    index: int | None = None  # which one it is a piece of; in a whole answer its place says so
    id: str | None = None
    function: Function | None = None


class ThinkingBlock(msgspec.Struct, omit_defaults=True):
    """A piece of what Anthropic's servers sign, or a whole one."""

    index: int | None = None
    type: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None

    def pieces(self) -> Iterator[tuple[str, str]]:
        for name in ("type", "thinking", "signature", "data"):
            if (piece := getattr(self, name)) is not None:
                yield name, piece


class Delta(msgspec.Struct):
    """A piece of a message, or a whole one."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # the newer name; some servers have objects of their own there
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    thinking_blocks: list[ThinkingBlock] | None = None  # what `reasoning_content` says, signed

    @property
    def thought(self) -> str:
        if self.reasoning_content is not None:
            return self.reasoning_content
        return self.reasoning if isinstance(self.reasoning, str) else ""

    @property
    def characters(self) -> int:
        calls = [call.function.arguments or "" for call in self.tool_calls or () if call.function is not None]
        signed = [piece for block in self.thinking_blocks or () for _, piece in block.pieces()]
        return sum(map(len, (self.content or "", self.thought, self.refusal or "", *calls, *signed)))

    @property
    def thinks(self) -> bool:
        return bool(self.thought or self.thinking_blocks)


class Candidate(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None

    def json(self, *, with_bytes: bool = False) -> Json:
        told: Json = {"token": self.token, "logprob": self.logprob}
        if with_bytes:
            told["bytes"] = [*self.token.encode("utf-8", "surrogatepass")] if self.bytes is None else self.bytes
        return told


class TokenLogprob(Candidate):
    top_logprobs: list[Candidate] | None = None

    def json(self, *, with_bytes: bool = False) -> Json:
        top = [candidate.json(with_bytes=with_bytes) for candidate in self.top_logprobs or ()]
        return {**super().json(with_bytes=with_bytes), "top_logprobs": top}


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class Choice(msgspec.Struct):
    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class Answer(msgspec.Struct):
    """A whole answer, or an event of one."""

    model: str | None = None
    choices: list[Choice] | None = None
    usage: msgspec.Raw = _ABSENT
    service_tier: str | None = None


_decoder = msgspec.json.Decoder(Answer)
_counts = msgspec.json.Decoder(Counts | None, strict=False)


def read_answer(data: bytes) -> Answer:
    """Raises `UpstreamCut`."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        raise UpstreamCut("the server's answer is not that of a chat") from None


def usage_in(answer: Answer) -> Json | None:
    """A response's `usage`; None where the server has not counted, or not in numbers."""
    try:
        counts = _counts.decode(answer.usage)
    except msgspec.MsgspecError:
        return None
    if counts is None:
        return None
    usage = usage_of(counts)
    if usage is None:
        return None
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cache_read, "cache_write_tokens": usage.cache_write},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.total,
    }


def text_logprobs(message: Delta, logprobs: list[TokenLogprob]) -> list[TokenLogprob]:
    """Those of a whole answer's text: its tokens may also be those of reasoning and calls, around it.

    None where the text does not begin and end with a token.
    """
    if not (message.thinks or message.tool_calls):
        return logprobs
    text = (message.content or "").encode("utf-8", "surrogatepass")
    tokens = [bytes(token.json(with_bytes=True)["bytes"]) for token in logprobs]
    begins = [0]
    for token in tokens:
        begins.append(begins[-1] + len(token))
    at = b"".join(tokens).rfind(text)
    if not text or at not in begins or at + len(text) not in begins:
        return []
    return logprobs[begins.index(at) : begins.index(at + len(text))]
