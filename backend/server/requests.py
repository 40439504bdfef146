"""The requests that the engine answers, one type for each endpoint: what may be asked, and within which bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from backend.server.errors import InvalidRequest
from backend.server.messages import AssistantMessage, Message, NamedToolChoice, check_tools

MAX_STOP_SEQUENCES = 4
MAX_CHOICES = 128
MAX_ANSWERS = 1024  # prompts times choices
MAX_TOP_LOGPROBS = 20
MAX_EMBEDDING_INPUTS = 2048
MAX_ENUMERATED = 4096  # texts among which an answer must be one
MAX_BAD_WORDS = 128

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
PositiveInt = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopSequence = Annotated[str, Meta(min_length=1)]
BadWord = Annotated[str, Meta(min_length=1)]
StopSequences = StopSequence | Annotated[list[StopSequence], Meta(max_length=MAX_STOP_SEQUENCES)]


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; we send none


JsonSchema = dict[str, Any]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_ENUMERATED)]


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
    structural_tag: None = None
    disable_any_whitespace: bool | None = None  # there is none in either case, but behind commas and colons
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # there is nothing to fall back to
    whitespace_pattern: None = None


class TruncationFields(Struct, frozen=True, kw_only=True):
    """What becomes of a prompt that is too long."""

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # -1: as many as there is room for
    truncation_side: Literal["left", "right"] | None = None  # the end that goes; None: the left, of an input the right
    add_special_tokens: bool | None = None  # None: to a text, but not to a chat, whose template has written them


class GenerationRequest(TruncationFields, frozen=True, kw_only=True):
    """What chat and completions have in common. None: the model's default, from its generation_config.json."""

    model: str | None = None  # None: the one that is served
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
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    priority: Int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities, as `token_id:17`
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
        if self.structured_outputs is not None and self.structured_outputs.disable_additional_properties:
            field = "structured_outputs.disable_additional_properties"
            raise InvalidRequest(f"`{field}` is not supported by this engine; say so in the schema.", param=field)


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
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

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
        if "chat_template" in (self.chat_template_kwargs or ()):
            raise InvalidRequest(
                "`chat_template_kwargs` can not bring a `chat_template`.", param="chat_template_kwargs.chat_template"
            )
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
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
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


class EmbeddingRequest(TruncationFields, frozen=True, kw_only=True):
    model: str | None = None
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
