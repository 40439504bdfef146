"""An answer's output items, and the events by which they grow.

A whole answer is one piece, and a stream is many: both go through `Output`, so that the events of a stream, put
together, are the answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from typing import Any

from gateway.core.errors import UpstreamCut
from gateway.endpoints.chat_answers import Said, ThinkingBlock, TokenLogprob, ToolCall
from gateway.endpoints.responses.logprobs import told
from gateway.endpoints.responses.reasoning import Thought, sealed
from gateway.endpoints.responses.tools import Tools

Json = dict[str, Any]
Events = list[Json]

MAX_ANSWER_PIECES = 2**24  # deltas, their characters and log-probabilities, of one answer: far above any model's


class _Text:
    """A text in pieces: to add one must not cost a copy of all that came before."""

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
    """One item, from its first piece to its end."""

    prefix = ""

    def __init__(self, key: str, index: int) -> None:
        self.id = f"{self.prefix}_{key}{index:02x}"
        self.index = index
        self.status = "in_progress"

    @abstractmethod
    def json(self) -> Json:
        """As it stands now."""

    def begun(self) -> Events:
        return [{"type": "response.output_item.added", "output_index": self.index, "item": self.json()}]

    @abstractmethod
    def content_ended(self) -> Events:
        """By which its parts are told to be done."""

    def ended(self, status: str) -> Events:
        """Empty where it had come to its end before."""
        if self.status != "in_progress":
            return []
        events = self.content_ended()
        self.status = status
        return [*events, {"type": "response.output_item.done", "output_index": self.index, "item": self.json()}]

    def _event(self, type: str, **fields: Any) -> Json:
        return {"type": f"response.{type}", "item_id": self.id, "output_index": self.index, **fields}


class _Reasoning(_Item):
    prefix = "rs"

    def __init__(self, key: str, index: int, *, seals: bool, keeps: bool) -> None:
        super().__init__(key, index)
        self._seals = seals
        self._notes = seals or keeps
        self._text = _Text()
        self._blocks: dict[int, dict[str, _Text]] = {}  # of what a server has signed, by their fields

    def json(self) -> Json:
        content = [self._part()] if self._text else []
        item: Json = {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": self.status}
        if self._seals and self.status != "in_progress":
            item["encrypted_content"] = self._sealed()
        return item

    def signed(self) -> str | None:
        """What a server has signed, where its client is not given it."""
        return self._sealed() if self._blocks and not self._seals else None

    def _sealed(self) -> str:
        blocks = [{name: str(text) for name, text in block.items()} for block in self._blocks.values()]
        return sealed(Thought(str(self._text), tuple(blocks)))

    def note(self, blocks: Sequence[ThinkingBlock]) -> None:
        for place, block in enumerate(blocks if self._notes else ()):
            known = self._blocks.setdefault(place if block.index is None else block.index, {})
            for name, piece in block.pieces():
                known.setdefault(name, _Text()).add(piece)

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": str(self._text)}

    def add(self, text: str) -> Events:
        if not text:
            return []
        events = [] if self._text else [self._event("content_part.added", content_index=0, part=self._part())]
        self._text.add(text)
        return [*events, self._event("reasoning_text.delta", content_index=0, delta=text)]

    def content_ended(self) -> Events:
        if not self._text:
            return []
        return [
            self._event("reasoning_text.done", content_index=0, text=str(self._text)),
            self._event("content_part.done", content_index=0, part=self._part()),
        ]


class _Part:
    """Of a message: its text, or that it refuses."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses
        self.text = _Text()
        self.logprobs: list[TokenLogprob] = []

    def json(self) -> Json:
        if self.refuses:
            return {"type": "refusal", "refusal": str(self.text)}
        logprobs = [told(token, with_bytes=True) for token in self.logprobs]
        return {"type": "output_text", "text": str(self.text), "annotations": [], "logprobs": logprobs}


class _Message(_Item):
    prefix = "msg"

    def __init__(self, key: str, index: int) -> None:
        super().__init__(key, index)
        self._parts: list[_Part] = []

    def json(self) -> Json:
        content = [part.json() for part in self._parts]
        return {"id": self.id, "type": "message", "role": "assistant", "status": self.status, "content": content}

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = (), *, refuses: bool = False) -> Events:
        events: Events = []
        if not self._parts or self._parts[-1].refuses != refuses:
            events = self.content_ended()
            self._parts.append(_Part(refuses))
            events.append(self._part_event("content_part.added", part=self._parts[-1].json()))
        part = self._parts[-1]
        part.text.add(text)
        if refuses:
            return [*events, self._part_event("refusal.delta", delta=text)]
        part.logprobs += logprobs
        return [*events, self._part_event("output_text.delta", delta=text, logprobs=[*map(told, logprobs)])]

    def note(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Of tokens without a text."""
        if self._parts and not self._parts[-1].refuses:
            self._parts[-1].logprobs += logprobs

    def content_ended(self) -> Events:
        if not self._parts:
            return []
        part = self._parts[-1]
        if part.refuses:
            done = self._part_event("refusal.done", refusal=str(part.text))
        else:
            done = self._part_event("output_text.done", text=str(part.text), logprobs=[*map(told, part.logprobs)])
        return [done, self._part_event("content_part.done", part=part.json())]

    def _part_event(self, type: str, **fields: Any) -> Json:
        return self._event(type, content_index=len(self._parts) - 1, **fields)


class _FunctionCall(_Item):
    prefix = "fc"

    def __init__(self, key: str, index: int, call: ToolCall, tools: Tools, taken: Set[str]) -> None:
        """`taken` are the `call_id` of other calls."""
        super().__init__(key, index)
        if call.function is None or not call.function.name:
            raise UpstreamCut("the server calls a function, and does not say which")
        self._names = tools.names_of(call.function.name)
        own_id = f"call_{key}{index:02x}"
        self.given_id = call.id or own_id  # by the server, perhaps to several
        self.call_id = own_id if self.given_id in taken else self.given_id
        self._arguments = _Text()

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

    def content_ended(self) -> Events:
        arguments = str(self._arguments)
        return [self._event("function_call_arguments.done", name=self._names["name"], arguments=arguments)]


class Output:
    """The items so far. `key` makes their ids; `seals` reasoning, where the client wants to send it back; `keeps` what
    it takes to send it back without the client.
    """

    def __init__(self, key: str, tools: Tools, *, seals: bool, keeps: bool) -> None:
        self._key = key
        self._tools = tools
        self._seals = seals
        self._keeps = keeps
        self._items: list[_Item] = []
        self._speaking: _Reasoning | _Message | None = None  # an item that goes on, as long as nothing else is said
        self._calls: dict[int, _FunctionCall] = {}  # which may grow side by side, and end together
        self._call_ids: set[str] = set()
        self._unsaid: list[TokenLogprob] = []  # of tokens whose text is still to come
        self._pieces = 0

    def json(self) -> list[Json]:
        return [item.json() for item in self._items]

    def signed(self) -> dict[str, str]:
        """By the ids of reasoning items: see `Turn`."""
        thoughts = (item for item in self._items if isinstance(item, _Reasoning))
        return {item.id: signed for item in thoughts if (signed := item.signed()) is not None}

    def take(self, said: Said, logprobs: Sequence[TokenLogprob] = ()) -> Events:
        """What one more piece of the answer changes. Raises `UpstreamCut`."""
        self._pieces += 1 + said.characters + len(logprobs)
        if self._pieces > MAX_ANSWER_PIECES:
            raise UpstreamCut("the server's answer is longer than a response may be")
        events: Events = []
        if said.thinks:
            self._unsaid.clear()
            reasoning = self._reasoning(events)
            reasoning.note(said.thinking_blocks or ())
            events += reasoning.add(said.thought)
        if said.content:
            of_it, self._unsaid = [*self._unsaid, *logprobs], []
            message = self._message(events)
            events += message.add(said.content, of_it)
        elif not said.thinks and not said.tool_calls:
            self._unsaid += logprobs
        if said.refusal:
            message = self._message(events)
            events += message.add(said.refusal, refuses=True)
        for place, call in enumerate(said.tool_calls or ()):
            self._take_call(call, place, events)
        return events

    def end(self, status: str) -> Events:
        """The last item has this status; all others have come to their own end."""
        if isinstance(self._speaking, _Message):
            self._speaking.note(self._unsaid)
        last = self._items[-1:]
        return [event for item in self._items for event in item.ended(status if item in last else "completed")]

    def cut(self) -> None:
        """Whatever was open stays as it is."""
        for item in self._items:
            item.ended("incomplete")

    def _reasoning(self, events: Events) -> _Reasoning:
        if isinstance(self._speaking, _Reasoning):
            return self._speaking
        item = _Reasoning(self._key, len(self._items), seals=self._seals, keeps=self._keeps)
        self._begin(item, events)
        self._speaking = item
        return item

    def _message(self, events: Events) -> _Message:
        if isinstance(self._speaking, _Message):
            return self._speaking
        item = _Message(self._key, len(self._items))
        self._begin(item, events)
        self._speaking = item
        return item

    def _begin(self, item: _Item, events: Events) -> None:
        if self._speaking is not None:
            events += self._speaking.ended("completed")
            self._speaking = None
        self._items.append(item)
        events += item.begun()

    def _take_call(self, call: ToolCall, place: int, events: Events) -> None:
        number = place if call.index is None else call.index
        item = self._calls.get(number)
        if item is None or (call.id and call.id != item.given_id):  # some servers give every call the same index
            item = _FunctionCall(self._key, len(self._items), call, self._tools, self._call_ids)
            self._calls[number] = item
            self._call_ids.add(item.call_id)
            self._begin(item, events)
        if call.function is not None and call.function.arguments:
            events += item.add(call.function.arguments)
