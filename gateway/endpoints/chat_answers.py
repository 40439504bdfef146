"""A chat's answer as deployments send it, decoded for the endpoints that translate it to another wire.

`read_answer` decodes a whole JSON answer or the data of one stream event; both become a `ChatAnswer`. The types have
only the fields that translation needs, with the variants of different engines: reasoning under two names, signed
thinking blocks, and content that is a list of parts. What cannot be decoded is an `UpstreamCut`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.core.errors import UpstreamCut
from gateway.providers.usage import RawUsage

_ABSENT = msgspec.Raw(b"null")


class FunctionCall(msgspec.Struct):
    """The function of a tool call. In a stream, `arguments` is the next piece of them."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    """A tool call, whole or one piece of it."""

    index: int | None = None  # which call this is a piece of; None in a whole answer, whose list is in order
    id: str | None = None
    function: FunctionCall | None = None


class ChatThinkingBlock(msgspec.Struct):
    """Anthropic's signed thinking, which its provider adds to chat. Its text is also in `reasoning_content`."""

    index: int | None = None
    type: str | None = None  # in a stream, only in a block's first piece
    thinking: str = ""
    signature: str = ""
    data: str = ""  # only of redacted thinking

    def pieces(self) -> Iterator[tuple[str, str]]:
        """Yield the fields that are not empty, by name."""
        for name in ("type", "thinking", "signature", "data"):
            if piece := getattr(self, name):
                yield name, piece


class AssistantMessage(msgspec.Struct):
    """A message of the assistant: a whole one, or the delta of a stream event."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # the newer name; some engines put an object of their own here
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    thinking_blocks: list[ChatThinkingBlock] | None = None  # the text of `reasoning_content`, with signatures

    @property
    def reasoning_text(self) -> str:
        """The reasoning, under whichever name the engine sent it."""
        if self.reasoning_content:
            return self.reasoning_content
        return self.reasoning if isinstance(self.reasoning, str) else ""

    @property
    def has_reasoning(self) -> bool:
        """Whether it has reasoning, as text or in signed blocks."""
        return bool(self.reasoning_text or self.thinking_blocks)

    @property
    def characters(self) -> int:
        """Number of characters of all texts, to bound the memory of an answer."""
        calls = [call.function.arguments or "" for call in self.tool_calls or () if call.function is not None]
        signed = [piece for block in self.thinking_blocks or () for _, piece in block.pieces()]
        return sum(map(len, (self.content or "", self.reasoning_text, self.refusal or "", *calls, *signed)))


class TopLogprob(msgspec.Struct):
    """A token and its log-probability. `bytes` are the token's UTF-8 bytes, if the engine sends them."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """A generated token, and the most likely tokens at its position."""

    top_logprobs: list[TopLogprob] | None = None


class ChoiceLogprobs(msgspec.Struct):
    """The log-probabilities of a choice's tokens."""

    content: list[TokenLogprob] | None = None


class ChatChoice(msgspec.Struct):
    """One choice of an answer: with a `message` if whole, with a `delta` in a stream."""

    index: int = 0
    message: AssistantMessage | None = None
    delta: AssistantMessage | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # sent by vLLM and the bundled engine: the stop text or token that matched
    logprobs: ChoiceLogprobs | None = None


class EarlyUsage(msgspec.Struct):
    """The `warmpath` field, in which a provider sends the prompt's length earlier than chat's own usage would."""

    usage: msgspec.Raw = _ABSENT


class ChatAnswer(msgspec.Struct):
    """A whole answer, or one event of a stream."""

    model: str | None = None
    choices: list[ChatChoice] | None = None
    usage: msgspec.Raw = _ABSENT
    service_tier: str | None = None
    warmpath: EarlyUsage | None = None

    @property
    def message(self) -> tuple[ChatChoice, AssistantMessage]:
        """The first choice of a whole answer, with its message. Raises `UpstreamCut` if there is none."""
        for choice in self.choices or ():
            if choice.index == 0 and choice.message is not None:
                return choice, choice.message
        raise UpstreamCut("the deployment's answer has no message")

    @property
    def counts(self) -> RawUsage | None:
        """The usage, or None if the deployment sent none, or not as numbers."""
        usage = self.warmpath.usage if self.warmpath is not None and self.usage is _ABSENT else self.usage
        try:
            return _counts.decode(usage)
        except (msgspec.MsgspecError, RecursionError):
            return None


class _ContentPart(msgspec.Struct):
    type: str
    text: str = ""
    thinking: list[_ContentPart] = []


class _MessageWithParts(msgspec.Struct):
    content: str | list[_ContentPart] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class _ChoiceWithParts(msgspec.Struct):
    index: int = 0
    message: _MessageWithParts | None = None
    delta: _MessageWithParts | None = None
    finish_reason: str | None = None


class _AnswerWithParts(msgspec.Struct):
    model: str | None = None
    choices: list[_ChoiceWithParts] | None = None
    usage: msgspec.Raw = _ABSENT
    service_tier: str | None = None


_decoder_with_parts = msgspec.json.Decoder(_AnswerWithParts)
_decoder = msgspec.json.Decoder(ChatAnswer)
_counts: msgspec.json.Decoder[RawUsage | None] = msgspec.json.Decoder(RawUsage | None, strict=False)


def read_answer(data: bytes) -> ChatAnswer:
    """Decode a whole answer, or the data of one stream event. Raises `UpstreamCut`."""
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError:
        # Rare, so this form is tried only if the usual one does not fit.
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            return _with_parts(data)
    except (msgspec.MsgspecError, RecursionError):
        pass
    raise UpstreamCut("the deployment's answer is not a valid chat completion, so this endpoint cannot translate it")


def _with_parts(data: bytes) -> ChatAnswer:
    """Decode an answer whose content is a list of text and thinking parts, as Mistral's reasoning models send it.

    Parts of other types, such as references to sources, are dropped.
    """
    answer = _decoder_with_parts.decode(data)
    return ChatAnswer(
        model=answer.model,
        choices=[
            ChatChoice(choice.index, _flattened(choice.message), _flattened(choice.delta), choice.finish_reason)
            for choice in answer.choices or ()
        ],
        usage=answer.usage,
        service_tier=answer.service_tier,
    )


def _flattened(message: _MessageWithParts | None) -> AssistantMessage | None:
    if message is None:
        return None
    content = message.content
    parts = content if isinstance(content, list) else [_ContentPart(type="text", text=content or "")]
    return AssistantMessage(
        content="".join(part.text for part in parts if part.type == "text"),
        reasoning_content="".join(inner.text for part in parts for inner in part.thinking) or message.reasoning_content,
        refusal=message.refusal,
        tool_calls=message.tool_calls,
    )
