"""The parts of a chat request that providers of other APIs translate: messages, tools and output formats."""

from __future__ import annotations

import base64
import mimetypes
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from gateway.providers.translation import NOTHING, Fields, UnsupportedField, field_decoder, is_given, read_field

NO_URLS = (
    "must be in the request: this model's server takes no URLs, and the gateway fetches none unless "
    "media_fetch.hosts of its policy allows the host"
)
SYSTEM_ROLES = ("system", "developer")
NO_SCHEMA = msgspec.Raw(b'{"type":"object","properties":{}}')
# Media types of files that are text.
TEXT_TYPES = ("text/", "application/json", "application/xml", "application/x-yaml")
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")  # without a media type, which the file's name then tells
_DATA_URL = re.compile(r"data:([\w.+/-]+);base64,(.*)", re.DOTALL)


class MediaURL(msgspec.Struct):
    """An image, a video or sound, by URL or as a data URL."""

    url: str


class InputAudio(msgspec.Struct):
    """Sound in base64. `format` is the end of a file name, as in wav."""

    data: str
    format: str


class File(msgspec.Struct):
    """A file as a data URL, or by `file_url`, which only the other endpoints' requests have."""

    file_data: str | None = None
    filename: str | None = None
    file_url: str | None = None
    file_id: str | None = None


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: MediaURL | None = None
    video_url: MediaURL | None = None
    audio_url: MediaURL | None = None
    input_audio: msgspec.Raw = NOTHING  # an `InputAudio`
    file: File | None = None
    cache_control: msgspec.Raw = NOTHING
    prompt_cache_breakpoint: msgspec.Raw = NOTHING


class CalledFunction(msgspec.Struct):
    """A function's name, and its arguments as JSON in a string."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """A tool call of an earlier answer. `extra_content` is Google's, with the signature of the thought before it."""

    id: str
    type: str = "function"
    function: CalledFunction | None = None
    cache_control: msgspec.Raw = NOTHING
    extra_content: dict[str, Any] | None = None


class ThinkingBlock(msgspec.Struct):
    """Anthropic's signed thinking."""

    type: str
    thinking: str = ""
    signature: str = ""
    data: str = ""


class ChatMessage(msgspec.Struct):
    """A message of a chat request, with the fields that are translated or rejected."""

    role: str
    content: str | list[Part] | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    thinking_blocks: list[ThinkingBlock] | None = None
    reasoning_content: str | None = None
    function_call: msgspec.Raw = NOTHING
    audio: msgspec.Raw = NOTHING
    cache_control: msgspec.Raw = NOTHING


class Function(msgspec.Struct):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = NOTHING
    strict: bool | None = None
    cache_control: msgspec.Raw = NOTHING

    @property
    def schema(self) -> msgspec.Raw:
        """The parameters' JSON schema; that of no parameters if there is none."""
        return self.parameters if is_given(self.parameters) else NO_SCHEMA


class Tool(msgspec.Struct):
    """A tool of a request. Only functions are translated."""

    type: str
    function: Function | None = None
    cache_control: msgspec.Raw = NOTHING


class _JSONSchema(msgspec.Struct):
    schema: msgspec.Raw = NOTHING


class ResponseFormat(msgspec.Struct):
    """The format of the output."""

    type: str
    json_schema: _JSONSchema | None = None

    @property
    def schema(self) -> msgspec.Raw:
        """The JSON schema of `json_schema`. Raises `UnsupportedField` if it is missing."""
        if self.json_schema is None or not is_given(self.json_schema.schema):
            raise UnsupportedField("is required", "response_format.json_schema.schema")
        return self.json_schema.schema


class _NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    """The choice of one tool."""

    type: str
    function: _NamedFunction | None = None


_messages = field_decoder(list[ChatMessage])
_tools = field_decoder(list[Tool])
_choice = field_decoder(str | NamedTool)
_format = field_decoder(ResponseFormat)
_stop = field_decoder(str | list[str])
_integer = field_decoder(int)
_audio = msgspec.json.Decoder(InputAudio).decode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def read_messages(fields: Fields) -> list[ChatMessage]:
    """Return the messages. Raises `UnsupportedField`."""
    messages: list[ChatMessage] = read_field(fields, "messages", _messages) or []
    for number, message in enumerate(messages):
        for name, value in (("function_call", message.function_call), ("audio", message.audio)):
            if message.role == "assistant" and is_given(value):
                raise UnsupportedField("is not supported by this model's server", f"messages[{number}].{name}")
    return messages


def read_functions(fields: Fields) -> list[Function]:
    """Return the tools, which must be functions. Raises `UnsupportedField`."""
    functions = []
    for number, tool in enumerate(read_field(fields, "tools", _tools) or []):
        if tool.type != "function" or tool.function is None:
            message = f"tools of type {tool.type!r} are not supported; functions are"
            raise UnsupportedField(message, f"tools[{number}].type")
        if is_given(tool.cache_control):
            tool.function.cache_control = tool.cache_control
        functions.append(tool.function)
    return functions


def read_tool_choice(fields: Fields) -> tuple[str, str | None]:
    """Return the tool choice, and the function's name if the choice is `function`. ("", None) if there is none."""
    given = read_field(fields, "tool_choice", _choice)
    if not isinstance(given, NamedTool):
        return given or "", None
    if given.type != "function" or given.function is None:
        raise UnsupportedField(f"a choice of type {given.type!r} is not supported", "tool_choice.type")
    return "function", given.function.name


def read_stop(fields: Fields) -> list[str]:
    """Return the stop strings."""
    stop = read_field(fields, "stop", _stop) or []
    return [stop] if isinstance(stop, str) else stop


def read_max_tokens(fields: Fields) -> int | None:
    """Return the limit of output tokens, by its newer or its older name."""
    given: int | None = read_field(fields, "max_completion_tokens", _integer)
    return given or read_field(fields, "max_tokens", _integer)


def read_sampling(fields: Fields, names: Mapping[str, str], *, max_tokens: str, stop: str) -> dict[str, Any]:
    """Return a chat's sampling parameters, the limit of output tokens and the stop strings, under a provider's names.

    `names` maps the names in a chat to those of the provider.
    """
    sampling: dict[str, Any] = {
        theirs: value for name, theirs in names.items() if is_given(value := fields.get(name, NOTHING))
    }
    if (limit := read_max_tokens(fields)) is not None:
        sampling[max_tokens] = limit
    if strings := read_stop(fields):
        sampling[stop] = strings
    return sampling


def read_json_format(fields: Fields) -> ResponseFormat | None:
    """Return the response format if it is JSON. None if it is text. Raises `UnsupportedField` for other formats."""
    form: ResponseFormat | None = read_field(fields, "response_format", _format)
    if form is None or form.type == "text":
        return None
    if form.type not in ("json_object", "json_schema"):
        message = "this model's server supports only text, json_object and json_schema"
        raise UnsupportedField(message, "response_format.type")
    return form


def read_audio(part: Part, where: str) -> InputAudio:
    """Return the sound of a part. Raises `UnsupportedField`."""
    try:
        return _audio(part.input_audio)
    except msgspec.MsgspecError:
        raise UnsupportedField("must have data and format", f"{where}.input_audio") from None


class Media(NamedTuple):
    """A file in a message: its base64 data, or its URL if it is not in the message."""

    media_type: str | None
    data: str | None
    url: str | None


def read_media(url: str, where: str) -> Media:
    """Read a data URL or an http(s) URL. Raises `UnsupportedField`."""
    if found := _DATA_URL.fullmatch(url):
        return Media(found[1], found[2], None)
    if url.startswith(("https://", "http://")):
        return Media(None, None, url)
    raise UnsupportedField("must be an http(s) URL or a base64 data URL", where)


def read_file(part: Part, where: str) -> Media:
    """Return the content of a file's part. Raises `UnsupportedField` if it is not in the message and has no URL."""
    file = part.file or File()
    if file.file_data is not None:
        guessed = mimetypes.guess_type(file.filename or "")[0]
        if guessed is not None and _BASE64.fullmatch(file.file_data):
            return Media(guessed, file.file_data, None)
        return read_media(file.file_data, f"{where}.file.file_data")
    if file.file_url is not None:
        return read_media(file.file_url, f"{where}.file.file_url")
    if file.file_id is not None:
        message = "names a file in the account of the gateway's key; send the file itself as `file_data`"
        raise UnsupportedField(message, f"{where}.file.file_id")
    raise UnsupportedField("is required", f"{where}.file.file_data")


def text_of(media: Media, where: str) -> str | None:
    """Return the text of a text file that is in the message, else None. Raises `UnsupportedField`."""
    if media.data is None or not (media.media_type or "").startswith(TEXT_TYPES):
        return None
    try:
        return base64.b64decode(media.data, validate=True).decode()
    except ValueError:
        raise UnsupportedField("must be text in UTF-8, encoded in base64", where) from None


def named_text(part: Part, text: str) -> str:
    """Return the text of a file with the file's name before it, if it has one."""
    name = part.file.filename if part.file is not None else None
    return f"{name}\n\n{text}" if name else text


def read_arguments(function: CalledFunction, where: str) -> msgspec.Raw:
    """Return a call's arguments as a JSON object with unchanged bytes, because a change would miss the prefix cache."""
    arguments = function.arguments or "{}"
    try:
        _object(arguments)
    except (msgspec.MsgspecError, RecursionError):
        raise UnsupportedField("must be a JSON object", f"{where}.function.arguments") from None
    return msgspec.Raw(arguments.encode())


def called_function(call: ToolCall, where: str) -> CalledFunction:
    """Return the function of a tool call. Raises `UnsupportedField` for other tools."""
    if call.type != "function" or call.function is None:
        message = f"tool calls of type {call.type!r} are not supported by this model's server"
        raise UnsupportedField(message, f"{where}.type")
    return call.function
