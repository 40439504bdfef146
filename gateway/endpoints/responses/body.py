"""Checks the body of a Responses API request, and translates it to the fields of a chat request.

No field is silently ignored. The gateway acts on a field, or accepts it because its value cannot change the answer, or
rejects it. The error names the field and says what to do instead. `read_body` checks and decodes a body, and
`chat_fields` translates it. `items.py` translates its messages and `tools.py` its tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import msgspec

from gateway.endpoints.responses.items import messages_of, with_one_system
from gateway.endpoints.responses.loaded_tools import loaded_tools
from gateway.endpoints.responses.stored import NO_HISTORY, ResponseHistory
from gateway.endpoints.responses.strict_json import ABSENT, check_names, is_given, read, type_of, unsupported
from gateway.endpoints.responses.tools import NO_HOSTED_TOOLS, ToolSet, read_tools
from gateway.policy.hosted_tools import HostedToolAction
from gateway.prompts.reader import Fields, Name, TokenCount, decode

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
# Parts of items that no answer has here, so that including them changes nothing.
_WITHOUT_EFFECT = ("web_search_call.results", "web_search_call.action.sources")
_INCLUDABLE = (LOGPROBS, ENCRYPTED_REASONING, *_WITHOUT_EFFECT)

# Fields with the same name and meaning in a chat request. Their bytes pass unchanged, because even 0 and 0.0 differ.
_SAME_IN_CHAT = (
    "temperature", "top_p", "metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "service_tier",
)  # fmt: skip

_STATELESS_BY_POLICY = "responses are not stored here, which needs `responses: {keep: 30d}` in the policy; " + (
    "send the conversation as items of `input`"
)
_NO_BACKGROUND = "responses are not stored here to be fetched later; omit it, or use false"
NO_BACKGROUND_HERE = "this request cannot run in the background; omit it, or use false"
_BACKGROUND_UNSTORED = "a response in the background must be stored; omit it, or use true"
# Why fields are rejected: if the policy stores no responses, if the policy stores responses, and in both cases.
_REJECTED_IF_STATELESS: Mapping[str, str] = {
    "previous_response_id": _STATELESS_BY_POLICY,
    "conversation": _STATELESS_BY_POLICY,
    "background": _NO_BACKGROUND,
}
_REJECTED_IF_STORED: Mapping[str, str] = {
    "background": NO_BACKGROUND_HERE,
}
_REJECTED: Mapping[str, str] = {
    "prompt": "stored prompts are not supported; send their text as `instructions` and `input`",
    "truncation": "the gateway does not know how long a prompt may be; shorten `input`, or use disabled",
    "context_management": "compaction is not supported; shorten `input`",
}


class ConversationParam(msgspec.Struct):
    """A conversation as an object, as responses contain it."""

    id: str


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The fields of a Responses API request. Nested objects stay undecoded until their type is known."""

    model: str
    input: str | list[msgspec.Raw]
    instructions: str | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None  # limits calls of built-in tools; has no effect, because there are none
    max_output_tokens: TokenCount | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None  # coding agents send information about themselves here
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: msgspec.Raw = ABSENT
    service_tier: Name | None = None
    store: bool | None = None  # clients send true by default; the response's `store` says whether it is stored
    previous_response_id: str | None = None
    conversation: str | ConversationParam | None = None
    stream: bool | None = None
    stream_options: msgspec.Raw = ABSENT
    background: bool | None = None
    # This field is accepted only with a value that has no effect.
    truncation: Literal["disabled"] | None = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The object `stream_options` of a request."""

    include_obfuscation: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The object `text` of a request: the format and verbosity of the answer's text."""

    format: msgspec.Raw = ABSENT
    verbosity: Literal["low", "medium", "high"] | None = None


class PlainFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The text format `text` or `json_object`, which has no parameters."""

    type: str = "text"


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The text format `json_schema`."""

    name: str
    schema: msgspec.Raw
    type: str = "json_schema"
    description: str | None = None
    strict: bool | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The object `reasoning` of a request."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    # Which earlier reasoning the model sees. Chat templates decide that, so the response has no effective mode.
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    generate_summary: Literal["auto"] | None = None  # the older name of `summary`


class ResponsesRequest(msgspec.Struct, frozen=True):
    """A checked request with decoded nested objects."""

    fields: Fields
    body: ResponsesBody
    tools: ToolSet
    text: TextOptions
    reasoning: ReasoningOptions
    wants_obfuscation: bool  # whether to pad the deltas of a stream
    history: ResponseHistory  # the conversation that the request continues

    @property
    def conversation(self) -> str | None:
        """The id of the conversation to which the response belongs."""
        return conversation_id(self.body.conversation)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client requested log-probabilities, by `include` or by `top_logprobs`."""
        return bool(self.body.top_logprobs) or LOGPROBS in (self.body.include or ())

    @property
    def wants_encrypted_reasoning(self) -> bool:
        """Whether reasoning items need `encrypted_content`."""
        return ENCRYPTED_REASONING in (self.body.include or ())


def conversation_id(given: str | ConversationParam | None) -> str | None:
    """Return the id in the field `conversation`."""
    return given.id if isinstance(given, ConversationParam) else given


_decoder = msgspec.json.Decoder(ResponsesBody)


def read_body(
    fields: Fields,
    raw: bytes,
    history: ResponseHistory | None,
    hosted_tools: Mapping[str, HostedToolAction] = NO_HOSTED_TOOLS,
    *,
    in_background: bool = False,
) -> ResponsesRequest:
    """Check and decode a body. Raises `BadRequest`.

    `history` is the conversation that the request continues, or None if the policy stores no responses.
    `hosted_tools` are the policy's. `in_background` says that the request runs in the background now.
    """
    for name, why in chain(
        (_REJECTED_IF_STATELESS if history is None else _REJECTED_IF_STORED).items(), _REJECTED.items()
    ):
        if name in fields and is_given(fields[name]) and not _has_no_effect(name, bytes(fields[name])):
            if in_background and name == "background":
                continue
            raise unsupported(name, why)
    check_names(ResponsesBody, fields)
    body = decode(_decoder, raw)
    if in_background and body.store is False:
        raise unsupported("store", _BACKGROUND_UNSTORED)
    for included in body.include or ():
        if included not in _INCLUDABLE:
            raise unsupported("include", f"must be {' or '.join(_INCLUDABLE[:2])}, not {included[:100]!r}")
    reasoning = read(ReasoningOptions, body.reasoning, "reasoning") if is_given(body.reasoning) else ReasoningOptions()
    if reasoning.summary not in (None, "auto"):
        raise unsupported(
            "reasoning.summary", "summaries are not supported, `content` has the whole reasoning; omit it, or use auto"
        )
    options = ResponsesStreamOptions()
    if is_given(body.stream_options):
        options = read(ResponsesStreamOptions, body.stream_options, "stream_options")
    history = history or NO_HISTORY
    loaded = [*loaded_tools(history.items, -len(history.items)), *loaded_tools(input_items(body))]
    return ResponsesRequest(
        fields=fields,
        body=body,
        tools=read_tools(body.tools or (), body.tool_choice, hosted_tools, loaded),
        text=read(TextOptions, body.text, "text") if is_given(body.text) else TextOptions(),
        reasoning=reasoning,
        wants_obfuscation=bool(options.include_obfuscation),
        history=history,
    )


def _has_no_effect(name: str, value: bytes) -> bool:
    return (name, value) in (("background", b"false"), ("truncation", b'"disabled"'))


def chat_fields(request: ResponsesRequest) -> Json:
    """Translate a request to the fields of a chat request. Raises `BadRequest`."""
    body = request.body
    if isinstance(body.input, str) and not request.history.items:
        messages = [{"role": "user", "content": body.input}]
    else:
        messages = messages_of(input_items(body), request.history.items)
    if not messages:
        raise unsupported("input", "must have at least one item")
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    # Joined after the instructions have been inserted, because system messages of the input follow the instructions.
    messages = with_one_system(messages)
    fields: Json = {"model": body.model, "messages": messages, **request.tools.chat_fields}
    if "tools" in fields and body.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    if request.wants_logprobs:
        fields["logprobs"] = True
    if is_given(request.text.format):
        fields |= _response_format(request.text.format)
    fields |= {name: value for name in _SAME_IN_CHAT if is_given(value := request.fields.get(name, ABSENT))}
    if body.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    renamed: Json = {
        "max_tokens": body.max_output_tokens,
        "top_logprobs": body.top_logprobs or None,
        "reasoning_effort": request.reasoning.effort,
        "verbosity": request.text.verbosity,
    }
    return fields | {name: value for name, value in renamed.items() if value is not None}


def input_items(body: ResponsesBody) -> Sequence[msgspec.Raw]:
    """Return the items of `input`. If `input` is a text, it is one message of the user."""
    if not isinstance(body.input, str):
        return body.input
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}
    return (msgspec.Raw(msgspec.json.encode(message)),)


def _response_format(format: msgspec.Raw) -> Json:
    kind = type_of(format, "text.format")
    if kind in ("text", "json_object"):
        read(PlainFormat, format, "text.format")
        return {"response_format": {"type": kind}} if kind == "json_object" else {}
    if kind != "json_schema":
        raise unsupported("text.format.type", f"must be text, json_object or json_schema, not {kind[:100]!r}")
    schema_format = read(JsonSchemaFormat, format, "text.format")
    schema: Json = {"name": schema_format.name, "schema": schema_format.schema}
    if schema_format.description is not None:
        schema["description"] = schema_format.description
    if schema_format.strict is not None:
        schema["strict"] = schema_format.strict
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


# Field names of a chat request, as engines' errors contain them, and the client's fields that they came from. Longer
# names come first.
_CLIENT_FIELDS = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
    ("tool_choice.function", "tool_choice"),
)


def client_field(param: str) -> str:
    """Return the name of the client's field that became the chat field `param`, which an engine rejected."""
    for chat_name, client_name in _CLIENT_FIELDS:
        if param == chat_name or param.startswith(f"{chat_name}."):
            return client_name + param.removeprefix(chat_name)
    if param.startswith("tools["):
        return param.replace("].function", "]", 1)
    return "input" if param.startswith("messages") else param
