"""Translates chats and embeddings to the bodies of Ollama's `/api/chat` and `/api/embed`.

Sampling parameters are `options`. Ollama takes images as base64 only, so an image by URL is rejected unless the
gateway has fetched it. A tool's result is named by the tool, so the name is taken from the call with the same id.
"""

from __future__ import annotations

from typing import Any

from gateway.providers.chat_request import (
    NO_URLS,
    SYSTEM_ROLES,
    ChatMessage,
    Part,
    called_function,
    named_text,
    read_arguments,
    read_file,
    read_functions,
    read_json_format,
    read_media,
    read_messages,
    read_sampling,
    read_tool_choice,
    text_of,
)
from gateway.providers.translation import (
    NOTHING,
    Fields,
    FieldTable,
    UnsupportedField,
    field_decoder,
    is_given,
    read_field,
)

API = "Ollama's API"
_OPTIONS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repeat_penalty", "num_ctx": "num_ctx",
}  # fmt: skip
FIELDS = FieldTable(
    API,
    translated=frozenset(
        {"model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stream", "stop",
         "reasoning_effort", "response_format", "keep_alive", "logprobs", "top_logprobs", "input", *_OPTIONS}
    ),
    ignored=frozenset(
        {"metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
         "stream_options", "user", "safety_identifier", "service_tier", "add_generation_prompt"}
    ),
    neutral={
        "n": (1,), "logit_bias": ({},), "modalities": (["text"],), "store": (False,), "verbosity": ("medium",),
        "functions": ([],), "function_call": ("none", "auto"), "parallel_tool_calls": (True,),
        "encoding_format": ("float",),
    },
)  # fmt: skip

_THINK = {
    "none": False, "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"
}  # fmt: skip
_text = field_decoder(str)
_input = field_decoder(str | list[str])


def chat_request(fields: Fields, model: str, *, stream: bool) -> dict[str, Any]:
    """Translate a chat's top-level fields. Raises `UnsupportedField`."""
    FIELDS.check(fields)
    request: dict[str, Any] = {"model": model, "messages": _messages(read_messages(fields)), "stream": stream}
    choice, _ = read_tool_choice(fields)
    if choice not in ("", "auto", "none"):
        raise UnsupportedField("this model's server chooses tools itself: auto and none are supported", "tool_choice")
    functions = read_functions(fields)
    if functions and choice != "none":
        request["tools"] = [
            {
                "type": "function",
                "function": {"name": each.name, "description": each.description or "", "parameters": each.schema},
            }
            for each in functions
        ]
    if options := read_sampling(fields, _OPTIONS, max_tokens="num_predict", stop="stop"):
        request["options"] = options
    if (form := read_json_format(fields)) is not None:
        request["format"] = "json" if form.type == "json_object" else form.schema
    if effort := read_field(fields, "reasoning_effort", _text):
        if effort not in _THINK:
            raise UnsupportedField(f"{effort!r} is not one of {', '.join(_THINK)}", "reasoning_effort")
        request["think"] = _THINK[effort]
    for name in ("keep_alive", "logprobs", "top_logprobs"):
        if is_given(value := fields.get(name, NOTHING)):
            request[name] = value
    return request


def embed_request(fields: Fields, model: str) -> dict[str, Any]:
    """Translate an embedding's fields. Raises `UnsupportedField`, for example if the input is token ids."""
    FIELDS.check(fields)
    return {"model": model, "input": read_field(fields, "input", _input) or ""}


def _messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    names: dict[str, str] = {}  # of the functions that were called, by the call's id
    return [_message(message, f"messages[{number}]", names) for number, message in enumerate(messages)]


def _message(message: ChatMessage, where: str, names: dict[str, str]) -> dict[str, Any]:
    if message.role not in ("user", "assistant", "tool", *SYSTEM_ROLES):
        raise UnsupportedField(f"the role {message.role!r} is not supported", f"{where}.role")
    text, images = _content(message, where)
    role = "system" if message.role in SYSTEM_ROLES else message.role
    found: dict[str, Any] = {"role": role, "content": text or message.refusal or ""}
    if images:
        found["images"] = images
    if message.reasoning_content:
        found["thinking"] = message.reasoning_content
    if message.tool_calls:
        calls = []
        for number, call in enumerate(message.tool_calls):
            path = f"{where}.tool_calls[{number}]"
            function = called_function(call, path)
            names[call.id] = function.name
            arguments = read_arguments(function, path)
            calls.append({"id": call.id, "function": {"name": function.name, "arguments": arguments}})
        found["tool_calls"] = calls
    if message.role == "tool":
        name = names.get(message.tool_call_id or "")
        if name is None:
            raise UnsupportedField("must be the id of an earlier tool call", f"{where}.tool_call_id")
        found |= {"tool_name": name, "tool_call_id": message.tool_call_id}
    return found


def _content(message: ChatMessage, where: str) -> tuple[str, list[str]]:
    """Return the text of a message, and its images in base64."""
    if message.content is None or isinstance(message.content, str):
        return message.content or "", []
    texts, images = [], []
    for number, part in enumerate(message.content):
        path = f"{where}.content[{number}]"
        if part.type in ("text", "refusal"):
            texts.append(part.text or part.refusal or "")
        elif part.type == "image_url":
            images.append(_image(part, path))
        elif part.type == "file":
            media = read_file(part, path)
            if media.data is None:
                raise UnsupportedField(NO_URLS, f"{path}.file")
            if (media.media_type or "").startswith("image/"):
                images.append(media.data)
            elif (file_text := text_of(media, f"{path}.file.file_data")) is not None:
                texts.append(f"{named_text(part, file_text)}\n\n")
            else:
                message_text = f"must be an image or text, not {media.media_type}: this model's server takes no others"
                raise UnsupportedField(message_text, f"{path}.file.file_data")
        else:
            message_text = f"parts of type {part.type!r} are not supported by this model's server"
            raise UnsupportedField(message_text, f"{path}.type")
    return "".join(texts), images


def _image(part: Part, where: str) -> str:
    if part.image_url is None:
        raise UnsupportedField("is required", f"{where}.image_url")
    data = read_media(part.image_url.url, f"{where}.image_url.url").data
    if data is None:
        raise UnsupportedField(NO_URLS, f"{where}.image_url.url")
    return data
