"""Builds the output items of a response, and the events that announce each change of an item.

A complete answer is one piece, and a stream has many pieces. Both go through `OutputItems.add`, so the events of a
stream always add up to the items of the answer. Each kind of item (reasoning, message, function call) is a subclass of
`_Item`. At most one reasoning item or message is open at a time. It ends when another kind of content begins. Several
function calls may be open at the same time, and end together at the end of the answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec

from gateway.core.errors import UpstreamCut
from gateway.endpoints.chat_answers import AssistantMessage, ChatThinkingBlock, TokenLogprob, ToolCall
from gateway.endpoints.responses.custom_tools import input_of
from gateway.endpoints.responses.logprobs import logprob_json
from gateway.endpoints.responses.reasoning import ReasoningContent, encode_reasoning
from gateway.endpoints.responses.tools import ToolKind, ToolSet

Json = dict[str, Any]
Events = list[Json]

MAX_ANSWER_PIECES = 2**24  # limit of the size of one answer; far above what any model generates


class _TextBuffer:
    """A text that grows piece by piece. Adding a piece does not copy the earlier pieces."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def __str__(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)


class _Item(ABC):
    """One output item. The methods that change it return the events to send."""

    prefix = ""

    def __init__(self, key: str, index: int) -> None:
        self.id = f"{self.prefix}_{key}{index:02x}"
        self.index = index
        self.status = "in_progress"

    @abstractmethod
    def json(self) -> Json:
        """Return the item as it is now."""

    def added_events(self) -> Events:
        """Return the event that announces the item."""
        return [{"type": "response.output_item.added", "output_index": self.index, "item": self.json()}]

    @abstractmethod
    def content_done_events(self) -> Events:
        """Return the events that end its content parts."""

    def end(self, status: str) -> Events:
        """End the item with a status. Does nothing if the item has already ended."""
        if self.status != "in_progress":
            return []
        events = self.content_done_events()
        self.status = status
        return [*events, {"type": "response.output_item.done", "output_index": self.index, "item": self.json()}]

    def _event(self, type: str, **fields: Any) -> Json:
        return {"type": f"response.{type}", "item_id": self.id, "output_index": self.index, **fields}


class _ReasoningItem(_Item):
    prefix = "rs"

    def __init__(self, key: str, index: int, *, is_encoded: bool, is_stored: bool) -> None:
        super().__init__(key, index)
        self._is_encoded = is_encoded
        self._needs_blocks = is_encoded or is_stored
        self._text = _TextBuffer()
        self._blocks: dict[int, dict[str, _TextBuffer]] = {}  # the fields of each signed thinking block, by block index

    def json(self) -> Json:
        content = [self._part()] if self._text else []
        item: Json = {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": self.status}
        if self._is_encoded and self.status != "in_progress":
            item["encrypted_content"] = self._encoded()
        return item

    def signed(self) -> str | None:
        """Return the encoded reasoning if it has signed blocks that the client does not receive, else None."""
        return self._encoded() if self._blocks and not self._is_encoded else None

    def _encoded(self) -> str:
        blocks = [{name: str(text) for name, text in block.items()} for block in self._blocks.values()]
        return encode_reasoning(ReasoningContent(str(self._text), tuple(blocks)))

    def add_blocks(self, blocks: Sequence[ChatThinkingBlock]) -> None:
        """Append pieces of signed blocks. Returns no events, because `add` also gets the text of the blocks."""
        for position, block in enumerate(blocks if self._needs_blocks else ()):
            fields = self._blocks.setdefault(position if block.index is None else block.index, {})
            for name, piece in block.pieces():
                fields.setdefault(name, _TextBuffer()).add(piece)

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": str(self._text)}

    def add(self, text: str) -> Events:
        if not text:
            return []
        events = [] if self._text else [self._event("content_part.added", content_index=0, part=self._part())]
        self._text.add(text)
        return [*events, self._event("reasoning_text.delta", content_index=0, delta=text)]

    def content_done_events(self) -> Events:
        if not self._text:
            return []
        return [
            self._event("reasoning_text.done", content_index=0, text=str(self._text)),
            self._event("content_part.done", content_index=0, part=self._part()),
        ]


class _ContentPart:
    """A content part of a message: text or a refusal."""

    def __init__(self, is_refusal: bool) -> None:
        self.is_refusal = is_refusal
        self.text = _TextBuffer()
        self.logprobs: list[TokenLogprob] = []

    def json(self) -> Json:
        if self.is_refusal:
            return {"type": "refusal", "refusal": str(self.text)}
        logprobs = [logprob_json(token, with_bytes=True) for token in self.logprobs]
        return {"type": "output_text", "text": str(self.text), "annotations": [], "logprobs": logprobs}


class _MessageItem(_Item):
    prefix = "msg"

    def __init__(self, key: str, index: int) -> None:
        super().__init__(key, index)
        self._parts: list[_ContentPart] = []

    def json(self) -> Json:
        content = [part.json() for part in self._parts]
        return {"id": self.id, "type": "message", "role": "assistant", "status": self.status, "content": content}

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = (), *, is_refusal: bool = False) -> Events:
        events: Events = []
        if not self._parts or self._parts[-1].is_refusal != is_refusal:
            events = self.content_done_events()
            self._parts.append(_ContentPart(is_refusal))
            events.append(self._part_event("content_part.added", part=self._parts[-1].json()))
        part = self._parts[-1]
        part.text.add(text)
        if is_refusal:
            return [*events, self._part_event("refusal.delta", delta=text)]
        part.logprobs += logprobs
        return [*events, self._part_event("output_text.delta", delta=text, logprobs=[*map(logprob_json, logprobs)])]

    def add_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Append log-probabilities of tokens that had no text."""
        if self._parts and not self._parts[-1].is_refusal:
            self._parts[-1].logprobs += logprobs

    def content_done_events(self) -> Events:
        if not self._parts:
            return []
        part = self._parts[-1]
        if part.is_refusal:
            done = self._part_event("refusal.done", refusal=str(part.text))
        else:
            done = self._part_event(
                "output_text.done", text=str(part.text), logprobs=[*map(logprob_json, part.logprobs)]
            )
        return [done, self._part_event("content_part.done", part=part.json())]

    def _part_event(self, type: str, **fields: Any) -> Json:
        return self._event(type, content_index=len(self._parts) - 1, **fields)


class _FunctionCallItem(_Item):
    prefix = "fc"

    def __init__(self, key: str, index: int, call: ToolCall, tools: ToolSet, taken: Set[str]) -> None:
        """`taken` contains the `call_id`s of earlier calls. Raises `UpstreamCut` if the call has no name."""
        super().__init__(key, index)
        if call.function is None or not call.function.name:
            raise UpstreamCut("the deployment called a function without a name")
        self._names = tools.names_of(call.function.name)
        own_id = f"call_{key}{index:02x}"
        self.given_id = call.id or own_id  # the engine's id; some engines give several calls the same id
        self.call_id = own_id if self.given_id in taken else self.given_id
        self._arguments = _TextBuffer()

    def json(self) -> Json:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self.call_id,
            **self._names,
            "arguments": str(self._arguments),
            "status": self.status,
        }

    def add(self, arguments: str) -> Events:
        self._arguments.add(arguments)
        return [self._event("function_call_arguments.delta", delta=arguments)]

    def content_done_events(self) -> Events:
        arguments = str(self._arguments)
        return [self._event("function_call_arguments.done", name=self._names["name"], arguments=arguments)]


class _CustomCallItem(_FunctionCallItem):
    """A call of a custom tool. Its input is known at its end, because it is inside the arguments' JSON."""

    prefix = "ctc"

    def json(self) -> Json:
        text = "" if self.status == "in_progress" else input_of(str(self._arguments))
        return {"id": self.id, "type": "custom_tool_call", "call_id": self.call_id, **self._names, "input": text}

    def add(self, arguments: str) -> Events:
        self._arguments.add(arguments)
        return []

    def content_done_events(self) -> Events:
        text = input_of(str(self._arguments))
        return [
            self._event("custom_tool_call_input.delta", delta=text),
            self._event("custom_tool_call_input.done", input=text),
        ]


class _ToolSearchCallItem(_FunctionCallItem):
    """A search for tools, which the client runs. It has no events of its own but those of all items."""

    prefix = "tsc"

    def json(self) -> Json:
        arguments: Any = {}
        if self.status != "in_progress":
            try:
                arguments = msgspec.json.decode(str(self._arguments) or "{}")
            except (msgspec.MsgspecError, RecursionError):
                arguments = {"query": str(self._arguments)}
        return {
            "id": self.id,
            "type": "tool_search_call",
            "call_id": self.call_id,
            "execution": "client",
            "arguments": arguments,
            "status": self.status,
        }

    def add(self, arguments: str) -> Events:
        self._arguments.add(arguments)
        return []

    def content_done_events(self) -> Events:
        return []


_CALL_ITEMS: Mapping[ToolKind, type[_FunctionCallItem]] = {
    "function": _FunctionCallItem,
    "custom": _CustomCallItem,
    "tool_search": _ToolSearchCallItem,
}


class OutputItems:
    """The output items of one answer.

    `key` is the part that the items' ids have in common. If `is_encoded`, reasoning items get `encrypted_content` for
    the client. If `is_stored`, signed thinking is always collected, because the stored response needs it
    (`StoredTurn.signed`).
    """

    def __init__(self, key: str, tools: ToolSet, *, is_encoded: bool, is_stored: bool) -> None:
        self._key = key
        self._tools = tools
        self._is_encoded = is_encoded
        self._is_stored = is_stored
        self._items: list[_Item] = []
        self._current_item: _ReasoningItem | _MessageItem | None = None  # the open reasoning item or message
        self._calls: dict[int, _FunctionCallItem] = {}  # by index in the chat; several may be open
        self._call_ids: set[str] = set()
        self._pending_logprobs: list[TokenLogprob] = []  # their text comes with a later piece
        self._pieces = 0

    def json(self) -> list[Json]:
        return [item.json() for item in self._items]

    def signed(self) -> dict[str, str]:
        """Return the signed thinking that the client does not receive, by item id. See `StoredTurn.signed`."""
        reasoning = (item for item in self._items if isinstance(item, _ReasoningItem))
        return {item.id: signed for item in reasoning if (signed := item.signed()) is not None}

    def add(self, message: AssistantMessage, logprobs: Sequence[TokenLogprob] = ()) -> Events:
        """Add one piece of the answer. Returns the events of the change. Raises `UpstreamCut`."""
        self._pieces += 1 + message.characters + len(logprobs)
        if self._pieces > MAX_ANSWER_PIECES:
            raise UpstreamCut(f"the deployment's answer is longer than {MAX_ANSWER_PIECES} characters")
        events: Events = []
        if message.has_reasoning:
            self._pending_logprobs.clear()  # they were of reasoning tokens
            reasoning = self._reasoning(events)
            reasoning.add_blocks(message.thinking_blocks or ())
            events += reasoning.add(message.reasoning_text)
        if message.content:
            text_logprobs, self._pending_logprobs = [*self._pending_logprobs, *logprobs], []
            item = self._message(events)
            events += item.add(message.content, text_logprobs)
        elif not message.has_reasoning and not message.tool_calls:
            self._pending_logprobs += logprobs
        if message.refusal:
            item = self._message(events)
            events += item.add(message.refusal, is_refusal=True)
        for position, call in enumerate(message.tool_calls or ()):
            self._add_call(call, position, events)
        return events

    def end(self, status: str) -> Events:
        """End all items. The last item gets `status`, which says how the answer ended. The others are completed."""
        if isinstance(self._current_item, _MessageItem):
            self._current_item.add_logprobs(self._pending_logprobs)
        last = self._items[-1:]
        return [event for item in self._items for event in item.end(status if item in last else "completed")]

    def cut(self) -> None:
        """End all open items as incomplete, without events."""
        for item in self._items:
            item.end("incomplete")

    def _reasoning(self, events: Events) -> _ReasoningItem:
        if isinstance(self._current_item, _ReasoningItem):
            return self._current_item
        item = _ReasoningItem(self._key, len(self._items), is_encoded=self._is_encoded, is_stored=self._is_stored)
        self._start(item, events)
        self._current_item = item
        return item

    def _message(self, events: Events) -> _MessageItem:
        if isinstance(self._current_item, _MessageItem):
            return self._current_item
        item = _MessageItem(self._key, len(self._items))
        self._start(item, events)
        self._current_item = item
        return item

    def _start(self, item: _Item, events: Events) -> None:
        if self._current_item is not None:
            events += self._current_item.end("completed")
            self._current_item = None
        self._items.append(item)
        events += item.added_events()

    def _add_call(self, call: ToolCall, position: int, events: Events) -> None:
        number = position if call.index is None else call.index
        item = self._calls.get(number)
        if item is None or (call.id and call.id != item.given_id):  # some engines give every call the same index
            name = "" if call.function is None else call.function.name or ""
            kind = _CALL_ITEMS[self._tools.kind_of(name)]
            item = kind(self._key, len(self._items), call, self._tools, self._call_ids)
            self._calls[number] = item
            self._call_ids.add(item.call_id)
            self._start(item, events)
        if call.function is not None and call.function.arguments:
            events += item.add(call.function.arguments)
