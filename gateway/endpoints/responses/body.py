"""The body of a request, and what a chat is asked for in its place.

Nothing is ignored in silence. A field is acted on, or it asks for nothing that could change the answer, or it is
refused by its name, with a word on what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import msgspec

from gateway.endpoints.responses.items import messages_of, with_one_system
from gateway.endpoints.responses.reading import ABSENT, check_names, is_given, read, type_of, unsupported
from gateway.endpoints.responses.stored import NO_HISTORY, History
from gateway.endpoints.responses.tools import Tools, read_tools
from gateway.prompts.reader import Fields, Name, TokenCount, decode

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
_INCLUDABLE = (LOGPROBS, SEALED_REASONING)

# What has the same name and meaning in a chat goes on as the bytes that the client sent: 0 and 0.0 are not equal calls.
_SAME = (
    "temperature", "top_p", "metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "service_tier",
)  # fmt: skip

_STATELESS = "no answers are kept here; send what was said before as items of `input`"
_STATELESS_BY_POLICY = "no answers are kept here, as they are by a policy with `responses: {keep: 30d}`; " + (
    "send what was said before as items of `input`"
)
_NOT_LATER = "no answers are kept here to be asked for later; leave it out, or say false"
# Where no answers are kept, and where they are.
_REFUSED_WITHOUT: Mapping[str, str] = {
    "previous_response_id": _STATELESS_BY_POLICY,
    "conversation": _STATELESS,
    "background": _NOT_LATER,
}
_REFUSED_WITH: Mapping[str, str] = {
    "conversation": "there are no conversations here; name the last response as `previous_response_id`",
    "background": "nothing is answered in the background here; leave it out, or say false",
}
_REFUSED: Mapping[str, str] = {
    "prompt": "no prompts are kept here; send their text as `instructions` and `input`",
    "truncation": "how long a prompt may be is known to the server alone; shorten `input`, or say disabled",
    "context_management": "nothing is compacted here; shorten `input`",
}


class Body(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[msgspec.Raw]
    instructions: str | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None  # of tools that are run on the way, of which there are none
    max_output_tokens: TokenCount | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None  # what coding agents say of themselves
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: msgspec.Raw = ABSENT
    service_tier: Name | None = None
    store: bool | None = None  # true is what nobody has chosen; the response says what has become of it
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: msgspec.Raw = ABSENT
    # Only their emptiest values are known.
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class Text(msgspec.Struct, forbid_unknown_fields=True):
    format: msgspec.Raw = ABSENT
    verbosity: str | None = None


class PlainFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str = "text"


class SchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    schema: msgspec.Raw
    type: str = "json_schema"
    description: str | None = None
    strict: bool | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: Literal["auto"] | None = None  # the older name


class ResponsesRequest(msgspec.Struct, frozen=True):
    """A body that can be fulfilled, its parts read."""

    fields: Fields
    body: Body
    tools: Tools
    text: Text
    reasoning: Reasoning
    obfuscates: bool  # deltas are padded
    history: History  # that it goes on from

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.body.top_logprobs) or LOGPROBS in (self.body.include or ())

    @property
    def seals_reasoning(self) -> bool:
        return SEALED_REASONING in (self.body.include or ())


_decoder = msgspec.json.Decoder(Body)


def read_body(fields: Fields, raw: bytes, history: History | None) -> ResponsesRequest:
    """`history` is what it goes on from; None where nothing is kept. Raises `BadRequest`."""
    for name, why in chain((_REFUSED_WITHOUT if history is None else _REFUSED_WITH).items(), _REFUSED.items()):
        if name in fields and is_given(fields[name]) and not _is_harmless(name, bytes(fields[name])):
            raise unsupported(name, why)
    check_names(Body, fields)
    body = decode(_decoder, raw)
    for included in body.include or ():
        if included not in _INCLUDABLE:
            raise unsupported("include", f"{included[:100]!r} is none of {' and '.join(_INCLUDABLE)}")
    reasoning = read(Reasoning, body.reasoning, "reasoning") if is_given(body.reasoning) else Reasoning()
    if reasoning.summary not in (None, "auto"):
        raise unsupported("reasoning.summary", "reasoning is given whole, in `content`; leave it out, or say auto")
    options = StreamOptions()
    if is_given(body.stream_options):
        options = read(StreamOptions, body.stream_options, "stream_options")
    return ResponsesRequest(
        fields=fields,
        body=body,
        tools=read_tools(body.tools or (), body.tool_choice),
        text=read(Text, body.text, "text") if is_given(body.text) else Text(),
        reasoning=reasoning,
        obfuscates=bool(options.include_obfuscation),
        history=history or NO_HISTORY,
    )


def _is_harmless(name: str, value: bytes) -> bool:
    return (name, value) in (("background", b"false"), ("truncation", b'"disabled"'))


def chat_fields(asked: ResponsesRequest) -> Json:
    """What a chat is asked for, in its own words. Raises `BadRequest`."""
    body = asked.body
    if isinstance(body.input, str) and not asked.history.items:
        messages = [{"role": "user", "content": body.input}]
    else:
        messages = messages_of(input_items(body), asked.history.items)
    if not messages:
        raise unsupported("input", "at least one item is needed")
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    messages = with_one_system(messages)
    fields: Json = {"model": body.model, "messages": messages, **asked.tools.chat_fields}
    if "tools" in fields and body.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    if asked.wants_logprobs:
        fields["logprobs"] = True
    if is_given(asked.text.format):
        fields |= _response_format(asked.text.format)
    fields |= {name: value for name in _SAME if is_given(value := asked.fields.get(name, ABSENT))}
    if body.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    renamed: Json = {
        "max_tokens": body.max_output_tokens,
        "top_logprobs": body.top_logprobs or None,
        "reasoning_effort": asked.reasoning.effort,
        "verbosity": asked.text.verbosity,
    }
    return fields | {name: value for name, value in renamed.items() if value is not None}


def input_items(body: Body) -> Sequence[msgspec.Raw]:
    """A text is what the user says."""
    if not isinstance(body.input, str):
        return body.input
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}
    return (msgspec.Raw(msgspec.json.encode(said)),)


def _response_format(format: msgspec.Raw) -> Json:
    kind = type_of(format, "text.format")
    if kind in ("text", "json_object"):
        read(PlainFormat, format, "text.format")
        return {"response_format": {"type": kind}} if kind == "json_object" else {}
    if kind != "json_schema":
        raise unsupported("text.format.type", f"{kind[:100]!r} is none of text, json_object and json_schema")
    wanted = read(SchemaFormat, format, "text.format")
    schema: Json = {"name": wanted.name, "schema": wanted.schema}
    if wanted.description is not None:
        schema["description"] = wanted.description
    if wanted.strict is not None:
        schema["strict"] = wanted.strict
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


# A chat's names in a server's refusal, and the client's own, the longer ones first.
_OWN_NAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
    ("tool_choice.function", "tool_choice"),
)


def own_name(param: str) -> str:
    """What the client calls that for which a server has refused a chat."""
    for theirs, own in _OWN_NAMES:
        if param == theirs or param.startswith(f"{theirs}."):
            return own + param.removeprefix(theirs)
    if param.startswith("tools["):
        return param.replace("].function", "]", 1)
    return "input" if param.startswith("messages") else param
