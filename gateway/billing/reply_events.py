"""What metering reads of a reply: one event of a stream, or a complete answer, in the formats of all servers.

`decode_event` accepts counts that a server writes as `12.0` or `"12"`. Counts that are no token counts become
`MalformedCounts`, so that the rest of the event is read nevertheless.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.providers.usage import RawUsage
from gateway.providers.usage.base import TokenCount

TIER_CHARACTERS = 64  # of a service tier, which the receipt repeats


class ReplyChoice(msgspec.Struct):
    """One choice of a chat chunk (`delta`), a chat answer (`message`) or a text completion (`text`)."""

    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    text: str | None = None
    usage: msgspec.Raw = msgspec.Raw()  # Moonshot's, in the last chunk of a stream


class _Wrapped(msgspec.Struct):
    """An object inside an event that contains the usage: OpenAI's `response`, or Anthropic's `message`."""

    usage: RawUsage | None = None
    service_tier: str | None = None


class _Timings(msgspec.Struct):
    """llama.cpp's counts beside its usage, which older versions do not split into cached tokens and others."""

    cache_n: TokenCount | None = None


class ReplyEvent(msgspec.Struct):
    """The fields that metering reads of a stream's chunk or of a complete, non-streaming answer."""

    object: str | None = None
    choices: list[ReplyChoice] | None = None
    usage: RawUsage | None = None
    service_tier: str | None = None
    error: Any = None
    response: _Wrapped | str | None = None  # a string in Ollama's answers, and in some engines' errors
    message: _Wrapped | str | None = None
    prompt_eval_count: TokenCount | None = None
    eval_count: TokenCount | None = None
    warmpath: _Wrapped | None = None  # set by the gateway's own provider adapters if they know the usage before the end
    x_groq: _Wrapped | None = None  # where Groq puts its usage
    timings: _Timings | None = None

    @property
    def counts(self) -> RawUsage | None:
        """The engine's token counts, from the field of the event that contains them. None if no field does."""
        if self.usage is not None:
            timings, usage = self.timings, self.usage
            if timings is not None and timings.cache_n and usage.prompt_tokens and not usage.prompt_tokens_details:
                return msgspec.structs.replace(usage, cached_tokens=min(timings.cache_n, usage.prompt_tokens))
            return usage
        if self.prompt_eval_count is not None or self.eval_count is not None:
            return RawUsage(prompt_eval_count=self.prompt_eval_count, eval_count=self.eval_count)
        wrapped = self.response or self.message or self.warmpath or self.x_groq
        if isinstance(wrapped, _Wrapped) and wrapped.usage is not None:
            return wrapped.usage
        return next(filter(None, map(_counts_of_choice, self.choices or ())), None)

    @property
    def tier(self) -> str | None:
        """The service tier that the event names, if any. Longer names than `TIER_CHARACTERS` are ignored."""
        wrapped, tier = self.response or self.message, self.service_tier
        if isinstance(wrapped, _Wrapped) and wrapped.service_tier:
            tier = wrapped.service_tier
        elif tier is None and self.usage is not None:
            tier = self.usage.service_tier
        return tier if tier is not None and len(tier) <= TIER_CHARACTERS else None


def _counts_of_choice(choice: ReplyChoice) -> RawUsage | None:
    if bytes(choice.usage) in (b"", b"null"):
        return None
    try:
        return decode_counts(choice.usage)
    except (msgspec.MsgspecError, RecursionError):
        return None


class _EventWithoutCounts(msgspec.Struct):
    """The other fields of an event whose counts are malformed."""

    object: str | None = None
    choices: list[ReplyChoice] | None = None
    error: Any = None


class MalformedCounts(ReplyEvent):
    """An event whose counts are malformed. `words` has them as the server sent them."""

    words: bytes = b""


_decode_strictly = msgspec.json.Decoder(ReplyEvent).decode
_decode_leniently = msgspec.json.Decoder(ReplyEvent, strict=False).decode
_decode_uncounted = msgspec.json.Decoder(_EventWithoutCounts).decode
decode_counts = msgspec.json.Decoder(RawUsage, strict=False).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_ABSENT = msgspec.Raw(b"null")
_WRAPPERS = ("response", "message", "warmpath", "x_groq")  # whose `usage` has the counts
_TOP_LEVEL = ("prompt_eval_count", "eval_count")


def decode_event(data: bytes) -> ReplyEvent:
    """Decode an event. Counts may be written as `12.0` or `"12"`. Other malformed counts become `MalformedCounts`.

    Raises `msgspec.MsgspecError` if the data is not an event.
    """
    try:
        return _decode_strictly(data)
    except msgspec.ValidationError:
        pass
    try:
        return _decode_leniently(data)
    except msgspec.ValidationError:
        rest, words = _decode_uncounted(data), counts_in(data)
    try:
        counts = decode_counts(words) if words else None  # another field may be the malformed one
    except (msgspec.MsgspecError, RecursionError):
        return MalformedCounts(rest.object, rest.choices, error=rest.error, words=words)
    return ReplyEvent(rest.object, rest.choices, counts, error=rest.error)


class _EventChoices(msgspec.Struct):
    choices: list[ReplyChoice] | None = None


_decode_each = msgspec.json.Decoder(list[tuple[_EventChoices]]).decode


def decode_choices(arrays: bytes) -> list[ReplyChoice]:
    """The choices of all events, joined by `join_objects`. Raises `msgspec.MsgspecError` if one cannot be read."""
    return [choice for (event,) in _decode_each(arrays) if event.choices for choice in event.choices]


def counts_in(data: bytes) -> bytes:
    """Return the part of an event that should be its counts, as the server sent it. Empty if there is none.

    Works on data that is no valid JSON, too: some servers write NaN.
    """
    try:
        fields = _fields(data)
        for name in _WRAPPERS:
            if b'"usage"' in bytes(value := fields.get(name, _ABSENT)):
                fields = _fields(value)
        if fields.get("usage", _ABSENT) != _ABSENT:
            return bytes(fields["usage"])
        return msgspec.json.encode({name: fields[name] for name in _TOP_LEVEL if name in fields} or msgspec.Raw())
    except (msgspec.MsgspecError, RecursionError):
        return data[at:] if (at := data.rfind(b'"usage"')) >= 0 else b""


def without_usage(data: bytes) -> bytes:
    """Return the frame of an event without its `usage`. All other fields keep their bytes."""
    fields = _fields(data)
    fields.pop("usage", None)
    return b"data: %b\n\n" % msgspec.json.encode(fields)


def has_text(choice: ReplyChoice) -> bool:
    """Whether a choice of a stream has output: content, reasoning, a refusal, tool calls, anything except the role."""
    return bool(choice.text) or any(value for name, value in (choice.delta or {}).items() if name != "role")


def generated_text(choice: ReplyChoice) -> list[str]:
    """The text of a choice that the model generated: content, reasoning, refusals, names and arguments of calls.

    Ids, indexes and signatures are the server's. Fields that repeat the text in another form are ignored.
    """
    texts = [choice.text] if choice.text else []
    fields = choice.message or choice.delta or {}
    for name, value in fields.items():
        if isinstance(value, str):
            if name != "role" and not (name == "reasoning" and "reasoning_content" in fields):
                texts.append(value)
        elif name == "content" and isinstance(value, list):  # parts, as Mistral's thinking
            texts += _strings(value, _CONTENT_KEYS)
        elif name in ("tool_calls", "function_call") and value:
            texts += _strings(value, _CALL_KEYS)
        elif name == "audio" and isinstance(value, dict) and isinstance(value.get("transcript"), str):
            texts.append(value["transcript"])
    return texts


_CONTENT_KEYS = frozenset({"text", "thinking", "content"})
_CALL_KEYS = frozenset({"name", "arguments", "input"})


def _strings(value: Any, keys: frozenset[str]) -> Iterator[str]:
    """Yield the strings under `keys` in nested objects and lists."""
    nested: list[Any] = value if isinstance(value, list) else [value]
    for each in nested:
        for name, inner in each.items() if isinstance(each, dict) else ():
            if isinstance(inner, str):
                if name in keys:
                    yield inner
            elif isinstance(inner, dict | list):
                yield from _strings(inner, keys)


def text_bytes(choice: ReplyChoice) -> int:
    """The bytes of a choice's output: its text, or all fields of its message or delta except the role."""
    message = choice.message or choice.delta or {}
    parts = [choice.text, *(value for name, value in message.items() if name != "role")]
    return sum(map(_bytes_of, filter(None, parts)))


def _bytes_of(part: Any) -> int:
    try:
        return len(part.encode() if isinstance(part, str) else msgspec.json.encode(part))
    except OverflowError:  # a number above 64 bits
        return len(repr(part))
