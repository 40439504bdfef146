"""Input items as messages of a chat.

A turn of the model's is several items (reasoning, a message, function calls) and one message of a chat, so that its
items are put together again: a prompt is then the same by both doors.

The developer's messages become the system's, and those at the beginning one: many templates know no developer and leave
him out without a word, and some know a system only as the first message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, Literal

import msgspec

from gateway.endpoints.responses.reading import read, type_of, unsupported
from gateway.endpoints.responses.reasoning import Thought, unsealed
from gateway.endpoints.responses.tools import name_in_chat

Json = dict[str, Any]
Content = str | list[msgspec.Raw]


class MessageItem(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    type: str | None = None
    id: Any = None  # of an answer that comes back, as the next ones
    status: Any = None
    phase: Any = None


class FunctionCallItem(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: Any = None
    status: Any = None
    parsed_arguments: Any = None  # by OpenAI's SDK, from `arguments`


class FunctionOutputItem(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    call_id: str
    output: Content
    id: Any = None
    name: Any = None  # as in the call, and so the next one
    namespace: Any = None
    status: Any = None


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    summary: list[msgspec.Raw] | None = None
    content: list[msgspec.Raw] | None = None
    encrypted_content: str | None = None
    id: Any = None
    status: Any = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """`input_text`, `reasoning_text` and `summary_text`, and of an answer that comes back `output_text`."""

    type: str
    text: str
    prompt_cache_breakpoint: Any = None
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None  # by OpenAI's SDK, from `text`


class RefusalPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    refusal: str


class ImagePart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    image_url: str | None = None
    detail: str | None = None
    prompt_cache_breakpoint: Any = None


class FilePart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    file_data: str | None = None
    filename: str | None = None
    prompt_cache_breakpoint: Any = None


def messages_of(items: Sequence[msgspec.Raw], history: Sequence[msgspec.Raw] = ()) -> list[Json]:
    """Of all items, those of the history first. Raises `BadRequest` for an item that is no part of a chat."""
    chat = _Chat()
    for number, item in enumerate(chain(history, items), start=-len(history)):
        path = f"input[{number}]"  # of the history all was read before, and nothing is wrong with it
        kind = type_of(item, path, default="message")
        add = _ITEMS.get(kind)
        if add is None:
            raise unsupported(
                f"{path}.type", _REFUSED.get(kind, f"items of the type {kind[:100]!r} are not known here")
            )
        add(chat, item, path)
    return chat.messages


def with_one_system(messages: list[Json]) -> list[Json]:
    """The same, what the system says at the beginning being one message."""
    system = [*takewhile(lambda message: message["role"] == "system", messages)]
    if len(system) < 2:
        return messages
    contents = [message["content"] for message in system]
    if all(isinstance(content, str) for content in contents):
        said: Any = "\n\n".join(contents)
    else:
        said = [part for content in contents for part in _parts(content)]
    return [{"role": "system", "content": said}, *messages[len(system) :]]


def _parts(content: str | list[Json]) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Chat:
    """The messages so far, and whether the last one may go on."""

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def add_message(self, item: msgspec.Raw, path: str) -> None:
        message = read(MessageItem, item, path)
        content = _content(message.content, f"{path}.content", of_model=message.role == "assistant")
        turn = self._turn() if message.role == "assistant" else None
        if turn is not None and not turn["content"]:
            turn["content"] = content
        else:
            role = "system" if message.role == "developer" else message.role
            self.messages.append({"role": role, "content": content})

    def add_reasoning(self, item: msgspec.Raw, path: str) -> None:
        thought = _thought(read(ReasoningItem, item, path), path)
        if thought == Thought():
            return
        turn = self._turn()
        if turn is None or (turn["content"] and "tool_calls" not in turn):
            turn = self._begin_turn()
        if thought.text:
            earlier = turn.get("reasoning_content")
            turn["reasoning_content"] = f"{earlier}\n{thought.text}" if earlier else thought.text
        if thought.blocks:
            turn.setdefault("thinking_blocks", []).extend(thought.blocks)

    def add_call(self, item: msgspec.Raw, path: str) -> None:
        call = read(FunctionCallItem, item, path)
        turn = self._turn() or self._begin_turn()
        turn["content"] = turn["content"] or None
        function = {"name": name_in_chat(call.name, call.namespace), "arguments": call.arguments}
        turn.setdefault("tool_calls", []).append({"id": call.call_id, "type": "function", "function": function})

    def add_output(self, item: msgspec.Raw, path: str) -> None:
        output = read(FunctionOutputItem, item, path)
        content = _content(output.output, f"{path}.output", of_model=False)
        self.messages.append({"role": "tool", "tool_call_id": output.call_id, "content": content})

    def _turn(self) -> Json | None:
        """The model's, where it was the last to speak."""
        return self.messages[-1] if self.messages and self.messages[-1]["role"] == "assistant" else None

    def _begin_turn(self) -> Json:
        turn: Json = {"role": "assistant", "content": ""}
        self.messages.append(turn)
        return turn


_ITEMS: Mapping[str, Callable[[_Chat, msgspec.Raw, str], None]] = {
    "message": _Chat.add_message,
    "reasoning": _Chat.add_reasoning,
    "function_call": _Chat.add_call,
    "function_call_output": _Chat.add_output,
}
_REFUSED = {
    "item_reference": "nothing is kept here to be referred to; send the item itself, as clients do with `store: false`",
    "custom_tool_call": "custom tools are not offered here; offer the tool as a function",
    "custom_tool_call_output": "custom tools are not offered here; offer the tool as a function",
}


def _thought(item: ReasoningItem, path: str) -> Thought:
    """What a client knows of it: its text, else what it was given in its place, else a summary."""
    kept = None if item.encrypted_content is None else unsealed(item.encrypted_content)
    if text := _text(item.content, f"{path}.content"):
        return Thought(text, kept.blocks if kept is not None else ())
    if kept is not None:
        return kept
    if item.encrypted_content is not None:
        raise unsupported(f"{path}.encrypted_content", "it was not made here, and can not be read; leave the item out")
    return Thought(_text(item.summary, f"{path}.summary"))


def _text(parts: Sequence[msgspec.Raw] | None, path: str) -> str:
    return "\n".join(read(TextPart, part, f"{path}[{number}]").text for number, part in enumerate(parts or ()))


def _content(content: Content, path: str, *, of_model: bool) -> str | list[Json]:
    """In a chat's words; as plain text where it is one."""
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
        return _marked({"type": "text", "text": text.text}, text.prompt_cache_breakpoint)
    if kind == "refusal" and of_model:
        return {"type": "text", "text": read(RefusalPart, part, path).refusal}
    if kind == "input_image":
        image = read(ImagePart, part, path)
        if image.image_url is None:
            raise unsupported(f"{path}.image_url", "an image must be given here")
        shown = {"url": image.image_url, **({} if image.detail is None else {"detail": image.detail})}
        return _marked({"type": "image_url", "image_url": shown}, image.prompt_cache_breakpoint)
    if kind == "input_file":
        file = read(FilePart, part, path)
        if file.file_data is None:
            raise unsupported(f"{path}.file_data", "a file must be given here")
        named = {} if file.filename is None else {"filename": file.filename}
        return _marked({"type": "file", "file": {**named, "file_data": file.file_data}}, file.prompt_cache_breakpoint)
    speaker = "the model's" if of_model else "this"
    raise unsupported(f"{path}.type", f"{kind[:100]!r} is no part of {speaker} content that is known here")


def _marked(part: Json, breakpoint: Any) -> Json:
    return part if breakpoint is None else {**part, "prompt_cache_breakpoint": breakpoint}
