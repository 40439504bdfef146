"""Decodes the chat answers of deployments, for the endpoints that translate them to another API format.

`read_answer` decodes a complete JSON answer or the data of one stream event. Both become a `ChatAnswer`. The types have
only the fields that translation needs, and cover the variants of different engines: reasoning under two names, signed
thinking blocks, and content that is a list of parts. An answer that cannot be decoded raises `UpstreamCut`.
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
    """The function of a tool call. In a stream event, `arguments` has only the next piece of the arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    """A complete tool call, or one piece of a tool call in a stream."""

    index: int | None = None  # index of the call that this piece extends; None in a complete answer
    id: str | None = None
    function: FunctionCall | None = None


class ChatThinkingBlock(msgspec.Struct):
    """Anthropic's signed thinking, which the `anthropic` provider adds to a chat answer.

    `reasoning_content` repeats the text of the thinking.
    """

    index: int | None = None
    type: str | None = None  # in a stream, only the first piece of a block has a type
    thinking: str = ""
    signature: str = ""
    data: str = ""  # set only for redacted thinking

    def pieces(self) -> Iterator[tuple[str, str]]:
        """Yield the (name, value) of each field that is not empty."""
        for name in ("type", "thinking", "signature", "data"):
            if piece := getattr(self, name):
                yield name, piece


class AssistantMessage(msgspec.Struct):
    """A complete message of the assistant, or the delta of one stream event."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # the newer name; some engines put an object of their own here
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    thinking_blocks: list[ChatThinkingBlock] | None = None  # the text of `reasoning_content`, with signatures

    @property
    def reasoning_text(self) -> str:
        """Return the reasoning text. Engines send it as `reasoning_content` or as `reasoning`."""
        if self.reasoning_content:
            return self.reasoning_content
        return self.reasoning if isinstance(self.reasoning, str) else ""

    @property
    def has_reasoning(self) -> bool:
        """Whether the message has reasoning, as text or in signed blocks."""
        return bool(self.reasoning_text or self.thinking_blocks)

    @property
    def characters(self) -> int:
        """Return the number of characters in all texts. Callers use it to bound the memory of an answer."""
        calls = [call.function.arguments or "" for call in self.tool_calls or () if call.function is not None]
        signed = [piece for block in self.thinking_blocks or () for _, piece in block.pieces()]
        return sum(map(len, (self.content or "", self.reasoning_text, self.refusal or "", *calls, *signed)))


class TopLogprob(msgspec.Struct):
    """A token and its log-probability. `bytes` are the token's UTF-8 bytes, if the engine sends them."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """A generated token and the most likely tokens at the same position."""

    top_logprobs: list[TopLogprob] | None = None


class ChoiceLogprobs(msgspec.Struct):
    """The log-probabilities of a choice's tokens."""

    content: list[TokenLogprob] | None = None


class ChatChoice(msgspec.Struct):
    """One choice of an answer. A complete answer has `message`, and a stream event has `delta`."""

    index: int = 0
    message: AssistantMessage | None = None
    delta: AssistantMessage | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop text or token that matched; sent by vLLM and the bundled engine
    logprobs: ChoiceLogprobs | None = None


class EarlyUsage(msgspec.Struct):
    """The `warmpath` field of a stream event. A provider uses it to send the prompt's length before the final usage."""

    usage: msgspec.Raw = _ABSENT


class ChatAnswer(msgspec.Struct):
    """A complete answer, or one event of a stream."""

    model: str | None = None
    choices: list[ChatChoice] | None = None
    usage: msgspec.Raw = _ABSENT
    service_tier: str | None = None
    warmpath: EarlyUsage | None = None

    @property
    def message(self) -> tuple[ChatChoice, AssistantMessage]:
        """Return the first choice of a complete answer and its message. Raises `UpstreamCut` if there is no message."""
        for choice in self.choices or ():
            if choice.index == 0 and choice.message is not None:
                return choice, choice.message
        raise UpstreamCut("the deployment's answer has no message")

    @property
    def counts(self) -> RawUsage | None:
        """Return the token usage, or None if the deployment sent no usage or values that are not numbers."""
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
    """Decode a complete answer, or the data of one stream event. Raises `UpstreamCut` if it cannot be decoded."""
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError:
        # Content as a list of parts is rare, so it is tried only if the usual form does not fit.
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            return _with_parts(data)
    except (msgspec.MsgspecError, RecursionError):
        pass
    raise UpstreamCut("the deployment's answer is not a valid chat completion, so this endpoint cannot translate it")


def _with_parts(data: bytes) -> ChatAnswer:
    """Decode an answer whose content is a list of text and thinking parts. Mistral's reasoning models send this form.

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
