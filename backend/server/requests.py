"""Request types of all POST endpoints, with the type and bounds of every accepted field.

`decode_body` in `request_body.py` creates them from JSON. Their `check` methods test rules that types cannot express.
A field is None if the request omits it. Then the model's or OpenAI's default applies.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from backend.server.errors import InvalidRequest
from backend.server.messages import AssistantMessage, Message, NamedToolChoice, check_tools

MAX_STOP_SEQUENCES = 4
MAX_CHOICES = 128
MAX_CHOICES_TOTAL = 1024  # prompts times choices
MAX_TOP_LOGPROBS = 20
MAX_POOLING_INPUTS = 2048  # of an embedding request, or documents of a rerank, or pairs to score
MAX_ENUMERATED = 4096  # alternatives of `choice`
MAX_BAD_WORDS = 128

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
PositiveInt = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopSequence = Annotated[str, Meta(min_length=1)]
BadWord = Annotated[str, Meta(min_length=1)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]
StopSequences = StopSequence | Annotated[list[StopSequence], Meta(max_length=MAX_STOP_SEQUENCES)]


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # accepted: padding against traffic analysis, which this server never sends


JsonSchema = dict[str, Any]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_ENUMERATED)]


class NamedSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """Value of `json_schema` in a response format."""

    name: str
    schema: JsonSchema | None = None  # None: any object
    description: str | None = None
    strict: bool | None = None  # accepted: the output always follows the schema


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    pass


class JsonSchemaFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """Value of vLLM's `structured_outputs`: exactly one constraint, and options."""

    json: JsonSchema | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: None = None
    disable_any_whitespace: bool | None = None  # accepted: JSON never has whitespace, except after commas and colons
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # accepted: there is no fallback
    whitespace_pattern: None = None


class KvTransferParams(Struct, frozen=True):
    """Value of vLLM's `kv_transfer_params`. Its other members are for vLLM's connectors: blocks are found by hash."""

    do_remote_decode: bool | None = None  # another engine will load the prompt's blocks from this one
    do_remote_prefill: bool | None = None  # this engine is to load the prompt's blocks from the remote one
    remote_host: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    remote_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    remote_tokens_kept: Annotated[int, Meta(ge=0)] | None = None  # the remote engine drops the prompt's other blocks


class TruncationFields(Struct, frozen=True, kw_only=True):
    """Fields that truncate a prompt that is too long."""

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # -1: as many as fit
    # The end at which tokens are removed. None: left for prompts, right for embedding inputs.
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None  # None: yes for a text, no for a chat, whose template adds them


class GenerationRequest(TruncationFields, frozen=True, kw_only=True):
    """Fields that chats and completions share. None means the model's default, from its generation_config.json."""

    model: str | None = None  # None: the served model
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
    cache_salt: CacheSalt | None = None
    kv_transfer_params: KvTransferParams | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # name tokens in log-probabilities as `token_id:17`
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name of it
    separate_reasoning: bool | None = None  # SGLang's field; False: a chat's reasoning stays in the content
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None  # vLLM's older names of the fields of `structured_outputs`
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    service_tier: str | None = None  # there is one tier; the response has `default` if the request names a tier

    @property
    def stop_sequences(self) -> list[str]:
        """The stop strings of the field `stop`, as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def shows_stop(self) -> bool:
        """Whether the output includes the stop string or token that ended it."""
        return bool(self.include_stop_str_in_output or self.no_stop_trim)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream has a usage object."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Checks combinations of fields. Raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("`stream_options` requires `stream` to be true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("`prompt_logprobs` cannot be streamed.", param="prompt_logprobs")
        if self.structured_outputs is not None and self.structured_outputs.disable_additional_properties:
            field = "structured_outputs.disable_additional_properties"
            raise InvalidRequest(f"`{field}` is not supported by this engine; set it in the schema.", param=field)


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    # Each tool is a `ToolDefinition`. It is stored as the client wrote it, because chat templates print it.
    tools: list[dict[str, Any]] | None = None
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
        """The requested maximum of output tokens, from `max_completion_tokens` or `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("`top_logprobs` requires `logprobs` to be true.", param="top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidRequest(
                "`max_tokens` and `max_completion_tokens` are the same limit; give only one.",
                param="max_tokens",
            )
        check_tools(self.tools)
        self._check_tool_choice()
        if "chat_template" in (self.chat_template_kwargs or ()):
            raise InvalidRequest(
                "`chat_template_kwargs` cannot contain a `chat_template`.", param="chat_template_kwargs.chat_template"
            )
        check_final_message(self.continue_final_message, self.add_generation_prompt)
        for i, message in enumerate(self.messages):
            if isinstance(message, AssistantMessage) and message.content is None and not message.tool_calls:
                raise InvalidRequest(
                    "An assistant message requires `content` or `tool_calls`.", param=f"messages[{i}].content"
                )

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return
        if not self.tools:
            raise InvalidRequest("`tool_choice` requires a call, but `tools` is empty.", param="tool_choice")
        names = [tool["function"]["name"] for tool in self.tools]
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise InvalidRequest(
                f"`tool_choice` names `{choice.function.name}`, which is not in `tools`.",
                param="tool_choice.function.name",
            )


def check_final_message(continue_final_message: bool | None, add_generation_prompt: bool | None) -> None:
    """Raises InvalidRequest if the final message is both continued and followed by a generation prompt."""
    if continue_final_message and add_generation_prompt is not False:
        raise InvalidRequest(
            "`continue_final_message` requires `add_generation_prompt` to be false.", param="continue_final_message"
        )


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | list[TokenId] | TokenId]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None

    @property
    def num_choices(self) -> int:
        """The number of choices generated per prompt. The response contains the best `n` of them."""
        return max(self.n or 1, self.best_of or 1)

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise InvalidRequest("`best_of` must be at least `n`.", param="best_of")
        if self.stream and self.num_choices > (self.n or 1):
            raise InvalidRequest("`best_of` greater than `n` cannot be streamed.", param="best_of")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest("`max_tokens` can be 0 only with `echo` or `prompt_logprobs`.", param="max_tokens")


class EmbeddingRequest(TruncationFields, frozen=True, kw_only=True):
    """Body of /v1/embeddings."""

    model: str | None = None
    input: str | list[str | list[TokenId] | TokenId]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveInt | None = None
    priority: Int | None = None
    cache_salt: CacheSalt | None = None


class PairFields(Struct, frozen=True, kw_only=True):
    """Fields of requests that score pairs of a query and a document."""

    model: str | None = None
    priority: Int | None = None
    cache_salt: CacheSalt | None = None
    instruction: str | None = None  # what is relevant, for models whose prompt says it
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # of a pair; its document is cut. -1: as fits
    max_tokens_per_doc: PositiveInt | None = None
    encoding_format: Literal["float"] | None = None  # accepted: vLLM's examples send it, and scores are numbers


PairTexts = Annotated[list[str], Meta(min_length=1, max_length=MAX_POOLING_INPUTS)]


class ScoreRequest(PairFields, frozen=True, kw_only=True):
    """Body of /score, in vLLM's form: one text and several others, or as many as the others, pair by pair.

    `queries` and `documents` are vLLM's newer names.
    """

    text_1: str | PairTexts | None = None
    text_2: str | PairTexts | None = None
    queries: str | PairTexts | None = None
    documents: str | PairTexts | None = None

    def texts(self) -> tuple[list[str], list[str]]:
        """Returns the first and the second texts. Raises InvalidRequest unless their numbers fit."""
        names = ("queries", "documents") if self.text_1 is None and self.queries is not None else ("text_1", "text_2")
        others = {"text_1", "text_2", "queries", "documents"} - {*names}
        for name in names:
            if getattr(self, name) is None:
                raise InvalidRequest(f"Missing required field `{name}`.", param=name)
        for name in sorted(others):
            if getattr(self, name) is not None:
                raise InvalidRequest(f"`{name}` excludes `{names[0]}` and `{names[1]}`.", param=name)
        firsts, seconds = ([text] if isinstance(text, str) else text for text in (getattr(self, n) for n in names))
        if len(firsts) not in (1, len(seconds)):
            raise InvalidRequest(
                f"`{names[0]}` must have one text, or as many as `{names[1]}` ({len(seconds)}), not {len(firsts)}.",
                param=names[0],
            )
        return firsts, seconds


class RerankDocument(Struct, frozen=True):
    """A document in the form of Cohere's and Jina's API. Its other members are not scored."""

    text: str


class RerankRequest(PairFields, frozen=True, kw_only=True):
    """Body of /v1/rerank and /v2/rerank, in the forms of Jina's, Cohere's and vLLM's API."""

    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=MAX_POOLING_INPUTS)]
    top_n: Annotated[int, Meta(ge=0)] | None = None  # None and 0: all documents
    return_documents: bool | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """Body of /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    cache_salt: CacheSalt | None = None  # tenants take turns by it


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
    cache_salt: CacheSalt | None = None
