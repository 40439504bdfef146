"""P3 transform `chunk_order`: the same retrieved chunks are sent in the order in which they were seen first.

Retrieval returns the same chunks for similar questions, but ranks them differently, so the prompts part at the first
chunk. The client marks chunks as elements with an id, in one text or each in a text part of its own:

    <document id="faq-7">...</document>        also <doc>, <chunk> and <passage>

Elements of one run, between which there is only whitespace (or the border of two parts), are one set. The order of a
set is remembered when it is seen first, at all replicas and within one cache group. Later runs of the same set take
this order. Each element moves as a whole, and what is between the elements stays where it is. Text without such marks,
elements without an id, and elements within elements of the same name never move. The order tells the model how
relevant a chunk is, and a question may refer to "the first document", so the policy must name this transform.
"""

from __future__ import annotations

import hashlib
import re
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import msgspec

from gateway.core.cache_breakpoints import FIELD, without_breakpoint
from gateway.prompts.transforms.base import (
    SYSTEM_ROLES,
    Message,
    MessagesTransform,
    MessagesView,
    Safety,
    TransformContext,
    role_of,
)
from gateway.prompts.transforms.shared_decisions import DecisionNotLoaded

MAX_CHUNKS = 256  # of one run; a longer one stays as it is
MAX_RUNS = 64  # of one request, the first ones; more would evict the decisions of other tenants
DIGEST_BYTES = 16

_TAG = re.compile(r"<(/?)(document|doc|chunk|passage)\b([^<>]*)>")
_ID = re.compile(r"""\sid\s*=\s*(?:"[^"]+"|'[^']+')""")
_CLOSING = ("</document>", "</doc>", "</chunk>", "</passage>")
_CLOSING_JSON = (b"</doc", b"</chunk", b"</passage", b"<\\/")  # a part may escape its slashes

_parts = msgspec.json.Decoder(list[msgspec.Raw])
_any = msgspec.json.Decoder()
_encode = msgspec.json.encode


class Span(NamedTuple):
    """A chunk's place in a text, [start, end)."""

    start: int
    end: int


class ChunkOrder(MessagesTransform):
    """Puts runs of marked chunks into the order that was seen first."""

    name: ClassVar[str] = "chunk_order"
    safety: ClassVar[Safety] = Safety.P3

    def may_apply(self, view: MessagesView) -> bool:
        for message in view.messages:
            content = message.content
            if isinstance(content, str):
                if any(tag in content for tag in _CLOSING):
                    return True
            elif content and any(tag in bytes(part) for part in content for tag in _CLOSING_JSON):
                return True
        return False

    def change(self, messages: list[Message], context: TransformContext) -> list[int]:
        orders = _Orders(context)
        changed = []
        for i, message in enumerate(messages):
            role = role_of(message)
            if (role == "user" or role in SYSTEM_ROLES) and FIELD not in message:
                content = bytes(message.get("content", b""))
                if (ordered := _ordered_content(content, orders)) != content:
                    message["content"] = msgspec.Raw(ordered)
                    changed.append(i)
        if orders.unknown:  # loaded together
            raise DecisionNotLoaded(orders.unknown)
        return changed


class _Orders:
    """The orders of the sets of one request."""

    def __init__(self, context: TransformContext) -> None:
        self.unknown: list[str] = []  # keys of decisions that have to be loaded
        self._context = context
        self._runs = 0

    def of(self, chunks: list[bytes]) -> list[int]:
        """The order for these chunks, as indices. Decides for the given order if the set is new."""
        given = list(range(len(chunks)))
        if not 2 <= len(chunks) <= MAX_CHUNKS or self._runs >= MAX_RUNS:
            return given
        self._runs += 1
        digests = [hashlib.blake2b(chunk, digest_size=DIGEST_BYTES).digest() for chunk in chunks]
        members = hashlib.blake2b(b"".join(sorted(digests)), digest_size=DIGEST_BYTES).hexdigest()
        key = f"canonical:chunks:{self._context.scope}:{members}"
        try:
            stored = self._context.decisions.find(key)
        except DecisionNotLoaded as missing:
            self.unknown += missing.keys
            return given
        if stored is None:
            self._context.decisions.decide(key, b"".join(digests))
            return given
        first = [stored[at : at + DIGEST_BYTES] for at in range(0, len(stored), DIGEST_BYTES)]
        if sorted(first) != sorted(digests):  # the order comes from the storage, so it is checked before it is used
            return given
        places: dict[bytes, list[int]] = {}
        for index in reversed(given):
            places.setdefault(digests[index], []).append(index)
        return [places[digest].pop() for digest in first]


def chunk_runs(text: str) -> list[list[Span]]:
    """The runs of marked chunks of a text, in order.

    If an element contains another one of its name, the ends are ambiguous, and the text has no runs.
    """
    runs: list[list[Span]] = []
    name, start = "", 0
    for tag in _TAG.finditer(text):
        closing, tag_name, attributes = tag.groups()
        if not name:
            if not closing and _ID.search(attributes) and not attributes.endswith("/"):
                name, start = tag_name, tag.start()
        elif tag_name == name and not closing:
            return []
        elif tag_name == name:
            name = ""
            if not runs or text[runs[-1][-1].end : start].strip():
                runs.append([])
            runs[-1].append(Span(start, tag.end()))
    return runs


def _ordered_content(content: bytes, orders: _Orders) -> bytes:
    if content.startswith(b'"'):
        text: str = _any.decode(content)
        ordered = _ordered_text(text, orders)
        return content if ordered == text else _encode(ordered)
    if not content.startswith(b"["):
        return content
    parts = [bytes(part) for part in _parts.decode(content)]
    ordered_parts = [_ordered_part(part, orders) for part in parts]
    for is_run, numbered in groupby(enumerate(ordered_parts), key=lambda entry: _is_chunk(entry[1])):
        run = list(numbered) if is_run else []
        order = orders.of([part for _, part in run])
        for (i, _), chosen in zip(run, order, strict=True):
            ordered_parts[i] = run[chosen][1]
    return content if ordered_parts == parts else b"[" + b",".join(ordered_parts) + b"]"


def _ordered_part(part: bytes, orders: _Orders) -> bytes:
    """The part with the runs of its text in order. A part with a cache breakpoint stays as it is."""
    text = _text_of(part)
    if text is None or (ordered := _ordered_text(text, orders)) == text:
        return part
    return _encode({**_any.decode(part), "text": ordered})


def _ordered_text(text: str, orders: _Orders) -> str:
    pieces: list[str] = []
    done = 0
    for run in chunk_runs(text):
        chunks = [text[span.start : span.end] for span in run]
        order = orders.of([chunk.encode("utf-8", "surrogatepass") for chunk in chunks])
        for span, chosen in zip(run, order, strict=True):
            pieces += (text[done : span.start], chunks[chosen])
            done = span.end
    return "".join((*pieces, text[done:])) if pieces else text


def _is_chunk(part: bytes) -> bool:
    """Whether a part's text is one marked chunk and nothing else."""
    text = _text_of(part)
    spans = [span for run in chunk_runs(text) for span in run] if text is not None else []
    return text is not None and [text[span.start : span.end] for span in spans] == [text.strip()]


def _text_of(part: bytes) -> str | None:
    """The text of a part; None if it is not text or carries a cache breakpoint."""
    value: Any = _any.decode(part) if without_breakpoint(part) == part else None
    text = value.get("text") if isinstance(value, dict) else None
    return text if isinstance(text, str) else None
