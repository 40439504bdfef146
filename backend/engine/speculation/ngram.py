"""Prompt lookup: where the last few tokens have stood before, what followed them then may follow again.

Summaries, edits, tool calls and anything that quotes its prompt repeat themselves in this way. Each request has an
index of its own, as LZ77 compressors have: from each run of `MIN_MATCH` tokens to its latest place, and from each place
to the one before it. Of the latest few places, the one that agrees with the most tokens before it is continued.
(Prompt lookup decoding: Saxena, 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from backend.engine.config import ResolvedConfig
from backend.engine.request import Request
from backend.engine.speculation.base import Drafter, Wanted

MIN_MATCH = 3  # tokens that must agree
MAX_MATCH = 16  # beyond which more agreement counts for no more
MAX_PLACES = 8  # that are looked at for one draft
MAX_INDEXED = 4096  # tokens for one draft: a long prompt is indexed in several steps


class NgramDrafter(Drafter):
    def __init__(self, config: ResolvedConfig) -> None:
        self._indexes: WeakKeyDictionary[Request, _Index] = WeakKeyDictionary()

    def draft(self, wanted: Sequence[Wanted]) -> list[tuple[int, ...]]:
        return [self._draft(each.request, each.num_tokens) for each in wanted]

    def _draft(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = _Index()
        token_ids = request.token_ids
        index.take(token_ids)
        place = index.find(token_ids)
        if place is None:
            return ()
        # Where the places overlap the text repeats itself, and so does the draft.
        draft = token_ids[place : place + num_tokens]
        while len(draft) < num_tokens:
            draft.append(draft[len(draft) - (len(token_ids) - place)])
        return tuple(draft)


class _Index:
    """Of one request's tokens. A place is the number of tokens before it: those that end there have to agree."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = [0] * MIN_MATCH  # by place, the one before with the same MIN_MATCH tokens, or 0

    def take(self, token_ids: Sequence[int]) -> None:
        """All places before the end, or as many more as one draft may take."""
        first = len(self._earlier)
        for place in range(first, min(len(token_ids), first + MAX_INDEXED)):
            key = tuple(token_ids[place - MIN_MATCH : place])
            self._earlier.append(self._latest.get(key, 0))
            self._latest[key] = place

    def find(self, token_ids: Sequence[int]) -> int | None:
        """The place whose tokens agree with the last ones the furthest back, the later one of equals."""
        best, most = None, 0
        place = self._latest.get(tuple(token_ids[-MIN_MATCH:]), 0)
        for _ in range(MAX_PLACES):
            if not place or most == MAX_MATCH:
                break
            agreed = MIN_MATCH
            while agreed < min(place, MAX_MATCH) and token_ids[place - 1 - agreed] == token_ids[-1 - agreed]:
                agreed += 1
            if agreed > most:
                best, most = place, agreed
            place = self._earlier[place]
        return best
