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
    "prediction": "a hint for speed; the text does not depend on it",
    "request_id": "vLLM's field; x-request-id is what names a request here",
}

_NOTHING: tuple[object, ...] = ([], {})
ONLY: dict[str, tuple[object, ...]] = {
    "store": (False,),
    "modalities": (["text"],),
    "functions": _NOTHING,
    "function_call": ("none",),
    "suffix": ("",),
    "verbosity": ("medium",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "logits_processors": _NOTHING,
    "bad_words": _NOTHING,
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "guided_decoding_backend": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "allowed_token_ids": (),
    "logprob_token_ids": (),
    "thinking_token_budget": (),
    "echo": (False,),
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


JsonSchema = dict[str, Any]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]


class NamedSchema(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    schema: JsonSchema | None = None  # None: any object
    description: str | None = None
    strict: bool | None = None  # an answer follows its schema in either case


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    pass


class JsonSchemaFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's: exactly one of these."""

    json: JsonSchema | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


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
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None  # None: to a text, but not to a chat, whose template has written them
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None  # vLLM's older names for what `structured_outputs` holds
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
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
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("`prompt_logprobs` are not part of a stream.", param="prompt_logprobs")


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


class NamedFunction(Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: NamedFunction


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None  # as `Tool`, but kept as the client wrote them: templates print them
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidRequest(
                "`max_tokens` and `max_completion_tokens` are two names of one limit; give one of them.",
                param="max_tokens",
            )
        check_tools(self.tools)
        self._check_tool_choice()
        check_final_message(self.continue_final_message, self.add_generation_prompt)
        for i, message in enumerate(self.messages):
            if isinstance(message, AssistantMessage) and message.content is None and not message.tool_calls:
                raise InvalidRequest(
                    "An assistant message needs `content` or `tool_calls`.", param=f"messages[{i}].content"
                )

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return
        if not self.tools:
            raise InvalidRequest("`tool_choice` asks for a call, but there are no `tools`.", param="tool_choice")
        names = [tool["function"]["name"] for tool in self.tools]
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise InvalidRequest(
                f"`tool_choice` names `{choice.function.name}`, and no tool does.", param="tool_choice.function.name"
            )


def check_final_message(continue_final_message: bool | None, add_generation_prompt: bool | None) -> None:
    if continue_final_message and add_generation_prompt is not False:
        raise InvalidRequest(
            "`continue_final_message` needs `add_generation_prompt` to be false.", param="continue_final_message"
        )


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | list[str | list[TokenId] | TokenId]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None

    @property
    def num_choices(self) -> int:
        """How many are made of each prompt; the best `n` of them are the answer."""
        return max(self.n or 1, self.best_of or 1)

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise InvalidRequest("`best_of` must be at least `n`.", param="best_of")
        if self.stream and self.num_choices > (self.n or 1):
            raise InvalidRequest("The best of several can not be streamed.", param="best_of")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest("`max_tokens` may be 0 only together with `echo`.", param="max_tokens")


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
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]
