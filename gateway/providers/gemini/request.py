"""Translates a chat call to the body of Gemini's `generateContent` (https://ai.google.dev/api/generate-content).

Images, sound, video and files are sent as `inlineData`, or by URL as `fileData`, which the server fetches. A function's
result is named by the function, so the name is taken from the call with the same id.

Gemini 3 requires the signature of the thought before a function call. Answers have it in the call's `extra_content`, as
Google's own OpenAI-compatible API. If a client does not send it back, the call has the value that switches the check
off.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gateway.providers.chat_request import (
    SYSTEM_ROLES,
    ChatMessage,
    Function,
    Media,
    MediaURL,
    Part,
    ToolCall,
    called_function,
    read_arguments,
    read_audio,
    read_file,
    read_functions,
    read_json_format,
    read_media,
    read_messages,
    read_sampling,
    read_tool_choice,
)
from gateway.providers.translation import (
    NOTHING,
    Fields,
    FieldTable,
    UnsupportedField,
    field_decoder,
    is_given,
    one_of,
    read_field,
)

API = "Google's Gemini API"
FIELDS = FieldTable(
    API,
    translated=frozenset(
        {"model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stream", "stop", "n",
         "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "reasoning_effort",
         "response_format", "safety_settings"}
    ),
    ignored=frozenset(
        {"metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
         "stream_options", "user", "safety_identifier", "service_tier"}
    ),
    neutral={
        "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "modalities": (["text"],), "store": (False,),
        "verbosity": ("medium",), "functions": ([],), "function_call": ("none", "auto"), "parallel_tool_calls": (True,),
    },
)  # fmt: skip

UNCHECKED_SIGNATURE = "skip_thought_signature_validator"  # Google's value for calls without a signature
_UNCHANGED = {
    "temperature": "temperature", "top_p": "topP", "top_k": "topK", "n": "candidateCount", "seed": "seed",
    "presence_penalty": "presencePenalty", "frequency_penalty": "frequencyPenalty",
}  # fmt: skip
_MODES = {"auto": "AUTO", "none": "NONE", "required": "ANY", "function": "ANY"}
_LEVELS = {"minimal": "MINIMAL", "low": "LOW", "medium": "MEDIUM", "high": "HIGH", "xhigh": "XHIGH", "max": "XHIGH"}
# Gemini 2.5 has budgets in tokens instead of levels. Google's own OpenAI-compatible API uses these.
_BUDGETS = {"minimal": 1_024, "low": 1_024, "medium": 8_192, "high": 24_576, "xhigh": 24_576, "max": 24_576}
_FILES_HOST = "generativelanguage.googleapis.com"
_AUDIO_TYPES = {"mp3": "audio/mp3", "wav": "audio/wav"}

_text = field_decoder(str)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.encode


def generate_request(fields: Fields, model: str) -> dict[str, Any]:
    """Translate a chat's top-level fields. Raises `UnsupportedField`."""
    FIELDS.check(fields)
    system, contents = _conversation(read_messages(fields), has_signatures=not _is_older(model))
    request: dict[str, Any] = {"contents": contents}
    if system:
        request["systemInstruction"] = {"parts": system}
    if functions := read_functions(fields):
        request["tools"] = [{"functionDeclarations": [_declaration(function) for function in functions]}]
        choice, name = read_tool_choice(fields)
        if choice:
            config: dict[str, Any] = {"mode": one_of(_MODES, choice, "tool_choice")}
            if name is not None:
                config["allowedFunctionNames"] = [name]
            request["toolConfig"] = {"functionCallingConfig": config}
    if config := _generation_config(fields, model):
        request["generationConfig"] = config
    if is_given(settings := fields.get("safety_settings", NOTHING)):
        request["safetySettings"] = settings
    return request


def _is_older(model: str) -> bool:
    """Whether a model has thinking budgets, and no signatures that it requires."""
    return "gemini-2" in model or "gemini-1" in model


def _declaration(function: Function) -> dict[str, Any]:
    declaration: dict[str, Any] = {"name": function.name}
    if function.description:
        declaration["description"] = function.description
    if is_given(function.parameters):
        declaration["parametersJsonSchema"] = function.parameters
    return declaration


def _generation_config(fields: Fields, model: str) -> dict[str, Any]:
    config = read_sampling(fields, _UNCHANGED, max_tokens="maxOutputTokens", stop="stopSequences")
    if (form := read_json_format(fields)) is not None:
        config["responseMimeType"] = "application/json"
        if form.type == "json_schema":
            config["responseJsonSchema"] = form.schema
    if effort := read_field(fields, "reasoning_effort", _text):
        config["thinkingConfig"] = _thinking(effort, model)
    return config


def _thinking(effort: str, model: str) -> dict[str, Any]:
    if _is_older(model):
        budget = 0 if effort == "none" else _budget(effort)
        return {"thinkingBudget": budget, "includeThoughts": budget > 0}
    if effort == "none":
        return {"thinkingLevel": "MINIMAL"}  # these models always think
    return {"thinkingLevel": one_of(_LEVELS, effort, "reasoning_effort"), "includeThoughts": True}


def _budget(effort: str) -> int:
    if effort not in _BUDGETS:
        raise UnsupportedField(f"{effort!r} is not one of none, {', '.join(_BUDGETS)}", "reasoning_effort")
    return _BUDGETS[effort]


# Messages


Block = dict[str, Any]


def _conversation(messages: list[ChatMessage], *, has_signatures: bool) -> tuple[list[Block], list[Block]]:
    """Return the parts of the system prompt, and the contents. Adjacent messages of one role are joined.

    System messages after the beginning become messages of the user, at their place: a system prompt elsewhere does not
    exist, and moving it would change the prefix of all messages after it.
    """
    system: list[Block] = []
    contents: list[Block] = []
    names: dict[str, str] = {}  # of the functions that were called, by the call's id
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role, parts = _role_and_parts(message, where, names, has_signatures=has_signatures)
        if not parts:
            continue
        if message.role in SYSTEM_ROLES and not contents:
            system += parts
        elif contents and contents[-1]["role"] == role:
            contents[-1]["parts"] += parts
        else:
            contents.append({"role": role, "parts": parts})
    return system, contents


def _role_and_parts(
    message: ChatMessage, where: str, names: dict[str, str], *, has_signatures: bool
) -> tuple[str, list[Block]]:
    if message.role == "tool":
        return "user", [_function_response(message, where, names)]
    if message.role == "assistant":
        parts = _content(message, where)
        if message.refusal:
            parts.append({"text": message.refusal})
        for number, call in enumerate(message.tool_calls or ()):
            part = _function_call(call, f"{where}.tool_calls[{number}]", names)
            if has_signatures and number == 0:
                part.setdefault("thoughtSignature", UNCHECKED_SIGNATURE)
            parts.append(part)
        return "model", parts
    if message.role not in ("user", *SYSTEM_ROLES):
        raise UnsupportedField(f"the role {message.role!r} is not supported", f"{where}.role")
    return "user", _content(message, where)


def _function_call(call: ToolCall, where: str, names: dict[str, str]) -> Block:
    function = called_function(call, where)
    names[call.id] = function.name
    part: Block = {"functionCall": {"id": call.id, "name": function.name, "args": read_arguments(function, where)}}
    google = (call.extra_content or {}).get("google")
    if isinstance(google, dict) and isinstance(signature := google.get("thought_signature"), str):
        part["thoughtSignature"] = signature
    return part


def _function_response(message: ChatMessage, where: str, names: Mapping[str, str]) -> Block:
    """Return a function's result, which must be an object. Media in it follow in parts of the result."""
    name = names.get(message.tool_call_id or "")
    if name is None:
        raise UnsupportedField("must be the id of an earlier tool call", f"{where}.tool_call_id")
    parts = _content(message, where)
    text = "".join(part["text"] for part in parts if "text" in part)
    response: Block = {"id": message.tool_call_id, "name": name, "response": _result(text)}
    if media := [part for part in parts if "text" not in part]:
        response["parts"] = media
    return {"functionResponse": response}


def _result(text: str) -> Any:
    try:
        _object(text)
    except (msgspec.MsgspecError, RecursionError):
        return {"output": text}
    return msgspec.Raw(text.encode())


def _content(message: ChatMessage, where: str) -> list[Block]:
    if not message.content:
        return []
    if isinstance(message.content, str):
        return [{"text": message.content}]
    blocks = []
    for number, part in enumerate(message.content):
        path = f"{where}.content[{number}]"
        if part.type not in _PARTS:
            raise UnsupportedField(f"parts of type {part.type!r} are not supported by this model's server", path)
        if (block := _PARTS[part.type](part, path)) is not None:
            blocks.append(block)
    return blocks


def _text_part(part: Part, where: str) -> Block | None:
    text = part.text or part.refusal
    return {"text": text} if text else None


def _image_part(part: Part, where: str) -> Block:
    return _media(part.image_url, f"{where}.image_url")


def _video_part(part: Part, where: str) -> Block:
    return _media(part.video_url, f"{where}.video_url")


def _media(given: MediaURL | None, where: str) -> Block:
    if given is None:
        raise UnsupportedField("is required", where)
    return _data(given.url, f"{where}.url")


def _audio_url_part(part: Part, where: str) -> Block:
    return _media(part.audio_url, f"{where}.audio_url")


def _data(url: str, where: str) -> Block:
    return _block_of(read_media(url, where), where)


def _block_of(media: Media, where: str) -> Block:
    if media.data is not None:
        return {"inlineData": {"mimeType": media.media_type, "data": media.data}}
    if urlsplit(media.url or "").hostname == _FILES_HOST:
        raise UnsupportedField("must not name a file in the account of the gateway's key", where)
    guessed = mimetypes.guess_type((media.url or "").partition("?")[0])[0]
    return {"fileData": {"fileUri": media.url, **({"mimeType": guessed} if guessed else {})}}


def _audio_part(part: Part, where: str) -> Block:
    audio = read_audio(part, where)
    media_type = _AUDIO_TYPES.get(audio.format, f"audio/{audio.format}")
    return {"inlineData": {"mimeType": media_type, "data": audio.data}}


def _file_part(part: Part, where: str) -> Block:
    return _block_of(read_file(part, where), f"{where}.file")


_PARTS: Mapping[str, Callable[[Part, str], Block | None]] = {
    "text": _text_part, "refusal": _text_part, "image_url": _image_part, "video_url": _video_part,
    "input_audio": _audio_part, "audio_url": _audio_url_part, "file": _file_part,
}  # fmt: skip
