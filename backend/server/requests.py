"""The wire in: a JSON body becomes a typed, checked request, or an InvalidRequest that names the field.

Nothing is ignored in silence. Every field of a body is one of
  * a field of the request types below: it is acted upon;
  * in HARMLESS: it does not ask for anything that would change the answer;
  * in ONLY: we do the listed values anyway, and refuse any other;
  * unknown or unsupported: refused by name.
A field that is null counts as absent, as at OpenAI, if its name is known.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from backend.server.errors import InvalidRequest

MAX_STOP_SEQUENCES = 4
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_EMBEDDING_INPUTS = 2048

HARMLESS = {
    "user": "who the end user is: for the caller's records",
    "safety_identifier": "the same under its newer name",
    "metadata": "labels for stored completions, and nothing is stored",
    "prompt_cache_key": "a routing hint; the prefix cache here needs none",
    "prompt_cache_retention": "a wish about the cache of a hosted service; here the least recently used goes first",
    "prompt_cache_options": "as prompt_cache_retention: prefixes are always cached, wherever they end",
    "parallel_tool_calls": "permission for several tool calls in one answer, which is not an order",
    "prediction": "a hint for speed; the text does not depend on it",
    "request_id": "vLLM's field; x-request-id is what names a request here",
}

_NOTHING: tuple[object, ...] = ([], {})
ONLY: dict[str, tuple[object, ...]] = {
    "store": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "functions": _NOTHING,
    "function_call": ("none",),
    "best_of": (1,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_token_ids": (False,),
    "logits_processors": _NOTHING,
    "bad_words": _NOTHING,
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "documents": (),
    "mm_processor_kwargs": (),
    "kv_transfer_params": (),
}

R = TypeVar("R", bound=Struct)


def decode(body: bytes, kind: type[R]) -> R:
    """The body as a `kind`, its fields checked one by one. Raises InvalidRequest."""
    try:
        fields = _OBJECT.decode(body)
        _check_names(fields, kind)
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error


def check_tools(tools: list[dict[str, Any]] | None) -> None:
    try:
        msgspec.convert(tools, list[Tool] | None)
    except msgspec.ValidationError as error:
        raise _refusal(error, prefix="tools") from error


def _check_names(fields: dict[str, msgspec.Raw], kind: type[Struct]) -> None:
    for name, raw in fields.items():
        if name in kind.__struct_fields__ or name in HARMLESS:
            continue
        if name not in ONLY:
            raise InvalidRequest(f"Unknown field `{name}`.", param=name)
        value = msgspec.json.decode(raw)
        if value is None or value in ONLY[name]:
            continue
        allowed = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in ONLY[name])
        supported = f"; supported: {allowed}" if allowed else ""
        raise InvalidRequest(f"This value of `{name}` is not supported by this engine{supported}.", param=name)


def _refusal(error: msgspec.ValidationError, prefix: str = "") -> InvalidRequest:
    """msgspec ends its message with the place: "Expected `int`, got `str` - at `$.messages[0].name`"."""
    message, _, place = str(error).partition(" - at ")
    path = (prefix + place.removeprefix("`key` in ").strip("`").removeprefix("$")).removeprefix(".")
    named = re.search(r"(?:unknown|required) field `([^`]+)`", message)
    if named:
        return InvalidRequest(f"{message} in {path or 'the body'}.", param=f"{path}.{named[1]}".removeprefix("."))
    where = f"`{path}`" if path else "The body"
    return InvalidRequest(f"{where}: {message[:1].lower()}{message[1:]}.", param=path or None)


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
PositiveInt = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopSequence = Annotated[str, Meta(min_length=1)]
StopSequences = StopSequence | Annotated[list[StopSequence], Meta(max_length=MAX_STOP_SEQUENCES)]


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; we send none


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """What chat and completions have in common. None: the model's default, from its generation_config.json."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # 0 and -1: off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Int | None = None
    stop: StopSequences | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop_token_ids: list[TokenId] | None = None
    priority: Int | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    service_tier: str | None = None  # there is one tier, and an answer to a request that names one says `default`

    @property
    def stop_sequences(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """What the types cannot say. Raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("`stream_options` needs `stream` to be true.", param="stream_options")


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str
    prompt_cache_breakpoint: Any = None  # marks where a hosted cache may cut; ours caches every block
    cache_control: Any = None  # the same in another vendor's words


Content = str | list[TextPart]


class FunctionCall(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    id: str
    function: FunctionCall
    index: int | None = None  # left in by clients that assembled the call from a stream


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", kw_only=True):
    name: str | None = None

    @property
    def role(self) -> str:
        return str(self.__struct_config__.tag)


class SystemMessage(_Message, frozen=True, tag="system"):
    content: Content


class DeveloperMessage(_Message, frozen=True, tag="developer"):
    content: Content


class UserMessage(_Message, frozen=True, tag="user"):
    content: Content


class AssistantMessage(_Message, frozen=True, tag="assistant", kw_only=True):
    """As an earlier answer came back, so the fields of an answer that say nothing are let in."""

    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(_Message, frozen=True, tag="tool", kw_only=True):
    content: Content
    tool_call_id: str


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionDefinition(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: FunctionDefinition


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None  # as `Tool`, but kept as the client wrote them: templates print them
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidRequest(
                "`max_tokens` and `max_completion_tokens` are two names of one limit; give one of them.",
                param="max_tokens",
            )
        check_tools(self.tools)
        for i, message in enumerate(self.messages):
            if isinstance(message, AssistantMessage) and message.content is None and not message.tool_calls:
                raise InvalidRequest(
                    "An assistant message needs `content` or `tool_calls`.", param=f"messages[{i}].content"
                )


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | list[str | list[TokenId] | TokenId]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("`logprobs` of an echoed prompt are not supported.", param="logprobs")


class EmbeddingRequest(Struct, frozen=True, kw_only=True):
    model: str
    input: str | list[str | list[TokenId] | TokenId]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveInt | None = None
    priority: Int | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]
