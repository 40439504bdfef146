"""Translates the input items of a Responses API request to chat messages.

In the Responses API, one answer of the model is several items (reasoning, a message, function calls). In chat, it is
one message. The items are therefore joined, and the prompt is the same as if the client had used the chat endpoint.

Messages with the role `developer` become system messages, because many chat templates drop that role without an error.
The system messages at the beginning are joined into one, because some chat templates accept only one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, Literal

import msgspec

from gateway.endpoints.responses.custom_tools import CustomCallItem, arguments_of
from gateway.endpoints.responses.loaded_tools import (
    TOOL_SEARCH,
    ToolSearchCallItem,
    ToolSearchOutputItem,
    result_text,
)
from gateway.endpoints.responses.reasoning import ReasoningContent, decode_reasoning
from gateway.endpoints.responses.strict_json import read, type_of, unsupported
from gateway.endpoints.responses.summaries import INTRODUCTION, CompactionItem, decode_summary
from gateway.endpoints.responses.tools import name_in_chat

Json = dict[str, Any]
Content = str | list[msgspec.Raw]

_FOREIGN = "was not made by this gateway and cannot be read; omit the item"
OPENAI_ENCRYPTED = "gAAAAA"  # the beginning of every text that OpenAI's servers have encrypted


class MessageItem(msgspec.Struct, forbid_unknown_fields=True):
    """A message. Fields typed `Any` are ignored; clients send them because earlier answers contained them."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    type: str | None = None
    id: Any = None
    status: Any = None
    phase: Any = None


class FunctionCallItem(msgspec.Struct, forbid_unknown_fields=True):
    """A function call of an earlier answer."""

    type: str
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: Any = None
    status: Any = None
    parsed_arguments: Any = None  # OpenAI's SDK adds the decoded `arguments`


class FunctionOutputItem(msgspec.Struct, forbid_unknown_fields=True):
    """The result of a function call."""

    type: str
    call_id: str
    output: Content
    id: Any = None
    name: Any = None  # name and namespace repeat the fields of the call
    namespace: Any = None
    status: Any = None


class AgentMessageItem(msgspec.Struct, forbid_unknown_fields=True):
    """A message that one agent of the client has sent to another."""

    type: str
    author: str
    recipient: str
    content: list[msgspec.Raw]
    id: Any = None
    agent: Any = None


class EncryptedPart(msgspec.Struct, forbid_unknown_fields=True):
    """A text between agents. OpenAI encrypts it; here it is what the model wrote, because nothing is encrypted."""

    type: str
    encrypted_content: str


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True):
    """Reasoning of an earlier answer: as text, encoded, or both."""

    type: str
    summary: list[msgspec.Raw] | None = None
    content: list[msgspec.Raw] | None = None
    encrypted_content: str | None = None
    id: Any = None
    status: Any = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A text: `input_text`, `reasoning_text`, `summary_text`, or `output_text` of an earlier answer."""

    type: str
    text: str
    prompt_cache_breakpoint: Any = None
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None  # OpenAI's SDK adds the decoded `text`


class RefusalPart(msgspec.Struct, forbid_unknown_fields=True):
    """A refusal in an earlier answer."""

    type: str
    refusal: str


class ImagePart(msgspec.Struct, forbid_unknown_fields=True):
    """An image, given as a URL or as a data URL."""

    type: str
    image_url: str | None = None
    detail: str | None = None
    prompt_cache_breakpoint: Any = None


class FilePart(msgspec.Struct, forbid_unknown_fields=True):
    """A file, such as a PDF, given as a data URL or as a URL."""

    type: str
    file_data: str | None = None
    file_url: str | None = None
    detail: Any = None  # of a PDF's images; chat has no such field
    filename: str | None = None
    prompt_cache_breakpoint: Any = None


class AudioPart(msgspec.Struct, forbid_unknown_fields=True):
    """A sound, as base64 with its format. The object is the same in chat."""

    type: str
    input_audio: msgspec.Raw


def messages_of(items: Sequence[msgspec.Raw], history: Sequence[msgspec.Raw] = ()) -> list[Json]:
    """Translate the items of a history and of a request to chat messages. Raises `BadRequest`."""
    chat = _ChatBuilder()
    for number, item in enumerate(chain(history, items), start=-len(history)):
        path = f"input[{number}]"  # a history item has a negative number, but it was valid in its own request
        kind = type_of(item, path, default="message")
        add = _ITEMS.get(kind)
        if add is None:
            raise unsupported(
                f"{path}.type", _REJECTED.get(kind, f"items of the type {kind[:100]!r} are not supported")
            )
        add(chat, item, path)
    return chat.messages


def with_one_system(messages: list[Json]) -> list[Json]:
    """Join the system messages at the beginning of a chat into one."""
    system = [*takewhile(lambda message: message["role"] == "system", messages)]
    if len(system) < 2:
        return messages
    contents = [message["content"] for message in system]
    if all(isinstance(content, str) for content in contents):
        joined: Any = "\n\n".join(contents)
    else:
        joined = [part for content in contents for part in _parts(content)]
    return [{"role": "system", "content": joined}, *messages[len(system) :]]


def _parts(content: str | list[Json]) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _ChatBuilder:
    """Builds chat messages item by item. An item of the model extends the last message if that is the model's."""

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def add_message(self, item: msgspec.Raw, path: str) -> None:
        message = read(MessageItem, item, path)
        content = _content(message.content, f"{path}.content", of_model=message.role == "assistant")
        turn = self._turn() if message.role == "assistant" else None
        # A second text of the model begins a new message, because a chat message has only one text.
        if turn is not None and not turn["content"]:
            turn["content"] = content
        else:
            role = "system" if message.role == "developer" else message.role
            self.messages.append({"role": role, "content": content})

    def add_reasoning(self, item: msgspec.Raw, path: str) -> None:
        reasoning = _reasoning(read(ReasoningItem, item, path), path)
        if reasoning == ReasoningContent():
            return
        turn = self._turn()
        # Reasoning after a text begins a new message. Reasoning after tool calls extends the same message.
        if turn is None or (turn["content"] and "tool_calls" not in turn):
            turn = self._begin_turn()
        if reasoning.text:
            earlier = turn.get("reasoning_content")
            turn["reasoning_content"] = f"{earlier}\n{reasoning.text}" if earlier else reasoning.text
        if reasoning.blocks:
            turn.setdefault("thinking_blocks", []).extend(reasoning.blocks)

    def add_call(self, item: msgspec.Raw, path: str) -> None:
        self._append_call(read(FunctionCallItem, item, path))

    def _append_call(self, call: FunctionCallItem) -> None:
        turn = self._turn() or self._begin_turn()
        turn["content"] = turn["content"] or None  # in chat, a message that only calls tools has no content
        function = {"name": name_in_chat(call.name, call.namespace), "arguments": call.arguments}
        turn.setdefault("tool_calls", []).append({"id": call.call_id, "type": "function", "function": function})

    def add_custom_call(self, item: msgspec.Raw, path: str) -> None:
        call = read(CustomCallItem, item, path)
        arguments = arguments_of(call.input)
        self._append_call(FunctionCallItem("function_call", call.call_id, call.name, arguments, call.namespace))

    def add_compaction(self, item: msgspec.Raw, path: str) -> None:
        summary = decode_summary(read(CompactionItem, item, path).encrypted_content)
        if summary is None:
            raise unsupported(f"{path}.encrypted_content", _FOREIGN)
        self.messages.append({"role": "user", "content": f"{INTRODUCTION}{summary}"})

    def add_output(self, item: msgspec.Raw, path: str) -> None:
        output = read(FunctionOutputItem, item, path)
        content = _content(output.output, f"{path}.output", of_model=False)
        self.messages.append({"role": "tool", "tool_call_id": output.call_id, "content": content})

    def add_search(self, item: msgspec.Raw, path: str) -> None:
        call = read(ToolSearchCallItem, item, path)
        self._append_call(FunctionCallItem("function_call", call.call_id, TOOL_SEARCH, bytes(call.arguments).decode()))

    def add_found_tools(self, item: msgspec.Raw, path: str) -> None:
        output = read(ToolSearchOutputItem, item, path)
        self.messages.append({"role": "tool", "tool_call_id": output.call_id, "content": result_text(output, path)})

    def add_agent_message(self, item: msgspec.Raw, path: str) -> None:
        message = read(AgentMessageItem, item, path)
        head = {"type": "text", "text": f"Message from {message.author} to {message.recipient}:"}
        parts = [_agent_part(part, f"{path}.content[{number}]") for number, part in enumerate(message.content)]
        self.messages.append({"role": "user", "content": [head, *parts]})

    def pass_over(self, item: msgspec.Raw, path: str) -> None:
        """Add no message: the item's tools are in the list of tools."""

    def _turn(self) -> Json | None:
        """Return the last message if it is the model's, else None."""
        return self.messages[-1] if self.messages and self.messages[-1]["role"] == "assistant" else None

    def _begin_turn(self) -> Json:
        turn: Json = {"role": "assistant", "content": ""}
        self.messages.append(turn)
        return turn


_ITEMS: Mapping[str, Callable[[_ChatBuilder, msgspec.Raw, str], None]] = {
    "message": _ChatBuilder.add_message,
    "reasoning": _ChatBuilder.add_reasoning,
    "function_call": _ChatBuilder.add_call,
    "function_call_output": _ChatBuilder.add_output,
    "custom_tool_call": _ChatBuilder.add_custom_call,
    "custom_tool_call_output": _ChatBuilder.add_output,
    "compaction": _ChatBuilder.add_compaction,
    "tool_search_call": _ChatBuilder.add_search,
    "tool_search_output": _ChatBuilder.add_found_tools,
    "additional_tools": _ChatBuilder.pass_over,
    "agent_message": _ChatBuilder.add_agent_message,
}
TRANSLATED_TYPES = frozenset(_ITEMS)
_REJECTED = {
    "item_reference": "responses are not stored here; send the item itself, as clients do with `store: false`",
}


def _reasoning(item: ReasoningItem, path: str) -> ReasoningContent:
    """Return an item's reasoning: its text if there is one, else the decoded `encrypted_content`, else its summary."""
    decoded = None if item.encrypted_content is None else decode_reasoning(item.encrypted_content)
    if text := _text(item.content, f"{path}.content"):
        return ReasoningContent(text, decoded.blocks if decoded is not None else ())
    if decoded is not None:
        return decoded
    if item.encrypted_content is not None:
        raise unsupported(f"{path}.encrypted_content", _FOREIGN)
    return ReasoningContent(_text(item.summary, f"{path}.summary"))


def _text(parts: Sequence[msgspec.Raw] | None, path: str) -> str:
    return "\n".join(read(TextPart, part, f"{path}[{number}]").text for number, part in enumerate(parts or ()))


def _content(content: Content, path: str, *, of_model: bool) -> str | list[Json]:
    """Translate a message's content to chat. A single text without a cache breakpoint becomes a string."""
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{path}[{number}]", of_model) for number, part in enumerate(content)]
    if not parts:
        return ""
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        return str(parts[0]["text"])
    return parts


def _part(part: msgspec.Raw, path: str, of_model: bool) -> Json:
    kind = type_of(part, path)
    if kind == "input_text" or (kind == "output_text" and of_model):
        text = read(TextPart, part, path)
        return _with_breakpoint({"type": "text", "text": text.text}, text.prompt_cache_breakpoint)
    if kind == "refusal" and of_model:
        return {"type": "text", "text": read(RefusalPart, part, path).refusal}
    if kind == "input_image":
        image = read(ImagePart, part, path)
        if image.image_url is None:
            raise unsupported(f"{path}.image_url", "is missing; other ways to give an image are not supported")
        url = {"url": image.image_url, **({} if image.detail is None else {"detail": image.detail})}
        return _with_breakpoint({"type": "image_url", "image_url": url}, image.prompt_cache_breakpoint)
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": read(AudioPart, part, path).input_audio}
    if kind == "input_file":
        file = read(FilePart, part, path)
        given = {"filename": file.filename, "file_data": file.file_data, "file_url": file.file_url}
        if file.file_data is None and file.file_url is None:
            raise unsupported(f"{path}.file_data", "is missing; send the file itself, or its URL as `file_url`")
        fields = {name: value for name, value in given.items() if value is not None}
        return _with_breakpoint({"type": "file", "file": fields}, file.prompt_cache_breakpoint)
    role = "the assistant" if of_model else "this role"
    raise unsupported(f"{path}.type", f"the part {kind[:100]!r} is not supported in messages of {role}")


def _agent_part(part: msgspec.Raw, path: str) -> Json:
    if type_of(part, path) != "encrypted_content":
        return _part(part, path, of_model=True)
    text = read(EncryptedPart, part, path).encrypted_content
    if text.startswith(OPENAI_ENCRYPTED):
        raise unsupported(f"{path}.encrypted_content", "was encrypted by OpenAI and cannot be read; omit the item")
    return {"type": "text", "text": text}


def _with_breakpoint(part: Json, breakpoint: Any) -> Json:
    return part if breakpoint is None else {**part, "prompt_cache_breakpoint": breakpoint}
