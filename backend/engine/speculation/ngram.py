"""Prompt lookup: if a request's last few tokens have occurred before, the tokens that followed them may follow again.

Summaries, edits, tool calls and anything that quotes its prompt repeat themselves in this way. Each request has its own
index, built as in LZ77 compressors: from each run of `MIN_MATCH` tokens to the latest position where it ends, and from
each position to the previous one with the same run. Among the latest few positions, the one with the longest match is
continued. (Prompt lookup decoding: Saxena, 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from backend.engine.request import Request
from backend.engine.resolved_config import ResolvedConfig
from backend.engine.speculation.base import Drafter, DraftRequest

MIN_MATCH = 3  # tokens that must match
MAX_MATCH = 16  # a longer match counts for no more than this
MAX_CANDIDATES = 8  # positions that are compared for one draft
MAX_INDEXED = 4096  # tokens indexed per draft, so that a long prompt is indexed over several steps


class NgramDrafter(Drafter):
    """Drafts from the request's own tokens, without a model."""

    def __init__(self, config: ResolvedConfig) -> None:
        self._indexes: WeakKeyDictionary[Request, _TokenIndex] = WeakKeyDictionary()

    def draft(self, wanted: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """Continues the longest match of each request's last tokens."""
        return [self._draft(each.request, each.num_tokens) for each in wanted]

    def _draft(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = _TokenIndex()
        token_ids = request.token_ids
        index.extend(token_ids)
        position = index.find(token_ids)
        if position is None:
            return ()
        # If the match reaches up to the end, the text repeats itself, and so does the draft.
        draft = token_ids[position : position + num_tokens]
        while len(draft) < num_tokens:
            draft.append(draft[len(draft) - (len(token_ids) - position)])
        return tuple(draft)


class _TokenIndex:
    """Index of one request's tokens. A position is the number of tokens before it; matches end there."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, ...], int] = {}
        self._previous: list[int] = [0] * MIN_MATCH  # by position: the previous one with the same run, or 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Indexes all positions before the end, at most MAX_INDEXED more of them."""
        first = len(self._previous)
        for position in range(first, min(len(token_ids), first + MAX_INDEXED)):
            key = tuple(token_ids[position - MIN_MATCH : position])
            self._previous.append(self._latest.get(key, 0))
            self._latest[key] = position

    def find(self, token_ids: Sequence[int]) -> int | None:
        """The position with the longest match of the last tokens; of equally long ones, the latest."""
        best, longest = None, 0
        position = self._latest.get(tuple(token_ids[-MIN_MATCH:]), 0)
        for _ in range(MAX_CANDIDATES):
            if not position or longest == MAX_MATCH:
                break
            length = MIN_MATCH
            while length < min(position, MAX_MATCH) and token_ids[position - 1 - length] == token_ids[-1 - length]:
                length += 1
            if length > longest:
                best, longest = position, length
            position = self._previous[position]
        return best
