"""A chat's answer as servers give it, whole or in pieces: what the doors of other wires put into their own words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.core.errors import UpstreamCut
from gateway.providers.usage import RawUsage

_ABSENT = msgspec.Raw(b"null")


class Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    index: int | None = None  # which one it is a piece of; in a whole answer its place says so
    id: str | None = None
    function: Function | None = None


class ThinkingBlock(msgspec.Struct):
    """As the provider of Anthropic's servers has it: its text comes as `reasoning_content`, too."""

    index: int | None = None
    type: str | None = None  # in a stream, of a block's beginning
    thinking: str = ""
    signature: str = ""
    data: str = ""  # of redacted thinking

    def pieces(self) -> Iterator[tuple[str, str]]:
        for name in ("type", "thinking", "signature", "data"):
            if piece := getattr(self, name):
                yield name, piece


class Said(msgspec.Struct):
    """A piece of a message, or a whole one."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # the newer name; some servers have objects of their own there
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    thinking_blocks: list[ThinkingBlock] | None = None  # what `reasoning_content` says, signed

    @property
    def thought(self) -> str:
        if self.reasoning_content:
            return self.reasoning_content
        return self.reasoning if isinstance(self.reasoning, str) else ""

    @property
    def thinks(self) -> bool:
        return bool(self.thought or self.thinking_blocks)

    @property
    def characters(self) -> int:
        calls = [call.function.arguments or "" for call in self.tool_calls or () if call.function is not None]
        signed = [piece for block in self.thinking_blocks or () for _, piece in block.pieces()]
        return sum(map(len, (self.content or "", self.thought, self.refusal or "", *calls, *signed)))


class Candidate(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(Candidate):
    top_logprobs: list[Candidate] | None = None


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class Choice(msgspec.Struct):
    index: int = 0
    message: Said | None = None
    delta: Said | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # by vLLM and the bundled engine, of `stop`: which text or token it was
    logprobs: Logprobs | None = None


class Known(msgspec.Struct):
    """What a provider of ours says before a server of chats would: how long the prompt is."""

    usage: msgspec.Raw = _ABSENT


class Answer(msgspec.Struct):
    """A whole answer, or an event of one."""

    model: str | None = None
    choices: list[Choice] | None = None
    usage: msgspec.Raw = _ABSENT
    service_tier: str | None = None
    warmpath: Known | None = None

    @property
    def message(self) -> tuple[Choice, Said]:
        """Of a whole answer. Raises `UpstreamCut` where there is none."""
        for choice in self.choices or ():
            if choice.index == 0 and choice.message is not None:
                return choice, choice.message
        raise UpstreamCut("the server's answer has no message in it")

    @property
    def counts(self) -> RawUsage | None:
        """None where the server has not counted, or not in numbers."""
        usage = self.warmpath.usage if self.warmpath is not None and self.usage is _ABSENT else self.usage
        try:
            return _counts.decode(usage)
        except (msgspec.MsgspecError, RecursionError):
            return None


class _Part(msgspec.Struct):
    type: str
    text: str = ""
    thinking: list[_Part] = []


class _SaidInParts(msgspec.Struct):
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class _ChoiceInParts(msgspec.Struct):
    index: int = 0
    message: _SaidInParts | None = None
    delta: _SaidInParts | None = None
    finish_reason: str | None = None


class _InParts(msgspec.Struct):
    model: str | None = None
    choices: list[_ChoiceInParts] | None = None
    usage: msgspec.Raw = _ABSENT
    service_tier: str | None = None


_in_parts = msgspec.json.Decoder(_InParts)
_decoder = msgspec.json.Decoder(Answer)
_counts: msgspec.json.Decoder[RawUsage | None] = msgspec.json.Decoder(RawUsage | None, strict=False)


def read_answer(data: bytes) -> Answer:
    """Raises `UpstreamCut`."""
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError:
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            return _with_parts(data)
    except (msgspec.MsgspecError, RecursionError):
        pass
    raise UpstreamCut("the server's answer is none that this endpoint could pass on")


def _with_parts(data: bytes) -> Answer:
    """An answer whose content may come in parts, of text and of thinking, as Mistral's models that reason give theirs.
    Parts of other kinds, such as references to sources, say nothing."""
    answer = _in_parts.decode(data)
    return Answer(
        model=answer.model,
        choices=[
            Choice(choice.index, _joined(choice.message), _joined(choice.delta), choice.finish_reason)
            for choice in answer.choices or ()
        ],
        usage=answer.usage,
        service_tier=answer.service_tier,
    )


def _joined(said: _SaidInParts | None) -> Said | None:
    if said is None:
        return None
    parts = said.content if isinstance(said.content, list) else [_Part(type="text", text=said.content or "")]
    return Said(
        content="".join(part.text for part in parts if part.type == "text"),
        reasoning_content="".join(inner.text for part in parts for inner in part.thinking) or said.reasoning_content,
        refusal=said.refusal,
        tool_calls=said.tool_calls,
    )
