"""Encodes conversations to token ids and caches the ids of their earlier messages.

A tokenizer splits a text at its special tokens before any other processing, and encodes the text between two special
tokens separately. So the ids of a prompt are the concatenated ids of its segments. A segment reaches from one special
token to the next. When a conversation continues, all its segments except the last few are cached. Encoding 8,000 tokens
takes 5 to 10 ms, which is much compared with a prefill whose prefix is in the prefix cache.
"""

from __future__ import annotations

import os
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator

from tokenizers import AddedToken, Tokenizer

MAX_CHARACTERS = 8 * 1024 * 1024  # total length of cached segments; the least recently used are evicted
MIN_CHARACTERS = 16  # shorter segments are faster to encode than to look up

# The library shares out the texts of a batch among threads of its own, and here each batch has one.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def encode_text(tokenizer: Tokenizer, text: str | tuple[str, str], *, add_special_tokens: bool) -> list[int]:
    """Returns the token ids of a text or a pair, without stopping other threads.

    `Tokenizer.encode` holds Python's lock until it ends, 5 s for 4 MB, and no answer advances meanwhile. Encoding a
    batch releases it. Without the tokens' offsets, long texts take half as long.
    """
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


class SegmentEncoder:
    """Encodes text segment by segment, with a least-recently-used cache. Thread-safe.

    Each `salt` has its own cache entries, so that a tenant cannot learn another tenant's prompts from response times.
    """

    def __init__(self, tokenizer: Tokenizer, max_characters: int = MAX_CHARACTERS) -> None:
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        boundaries = boundary_tokens(list(tokenizer.get_added_tokens_decoder().values()))
        self._boundary = re.compile("|".join(map(re.escape, boundaries))) if boundaries else None
        self._cache: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()

    @property
    def num_characters(self) -> int:
        """Total length of the cached segments."""
        return self._num_characters

    def encode(self, text: str, salt: str) -> list[int]:
        """Returns the token ids that the tokenizer returns for the complete text. Adds no special tokens."""
        token_ids: list[int] = []
        for segment in self._segments(text):
            token_ids.extend(self._encode(segment, salt))
        return token_ids

    def _segments(self, text: str) -> Iterator[str]:
        start = 0
        for match in self._boundary.finditer(text) if self._boundary else ():
            if match.start() > start:
                yield text[start : match.start()]
            start = match.start()
        yield text[start:]

    def _encode(self, segment: str, salt: str) -> array[int]:
        key = (salt, segment)
        with self._lock:
            if (cached := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return cached
        token_ids = array("I", encode_text(self._tokenizer, segment, add_special_tokens=False))
        if MIN_CHARACTERS <= len(segment) <= self._max_characters:
            self._store(key, token_ids)
        return token_ids

    def _store(self, key: tuple[str, str], token_ids: array[int]) -> None:
        with self._lock:
            if key in self._cache:  # another thread has added it meanwhile
                return
            self._cache[key] = token_ids
            self._num_characters += len(key[1])
            while self._num_characters > self._max_characters:
                (_, segment), _ = self._cache.popitem(last=False)
                self._num_characters -= len(segment)


def boundary_tokens(added: list[AddedToken]) -> list[str]:
    """Returns the special tokens before which a text can be split without changing a token id, longest first.

    Excludes special tokens that match the normalised text, absorb the spaces before them or depend on neighbouring
    characters. Also excludes special tokens whose beginning can be a part of another token.
    """
    contents = [token.content for token in added]
    boundaries = [
        token.content
        for token in added
        if token.special and not (token.normalized or token.lstrip or token.single_word)
        if token.content and not any(_may_begin_within(token.content, other) for other in contents)
    ]
    return sorted(boundaries, key=len, reverse=True)


def _may_begin_within(token: str, other: str) -> bool:
    """Whether `token` can begin inside an occurrence of `other`, after its first character."""
    return any(other[i:].startswith(token) or token.startswith(other[i:]) for i in range(1, len(other)))
