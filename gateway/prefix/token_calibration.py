"""How many of the engine's own tokens the beginning of a prompt has, learned from the usage of earlier prompts.

Estimates by the length of text are off by the tokenizer, the language and the chat template. But every reply says how
many tokens its prompt had, and the prompts of a conversation begin with each other: where one has ended, its tokens are
known exactly. Between two such ends tokens and text are proportional; behind the last one, and for what is new, tokens
go by the mean of what was seen.

Engines count what was cached in whole blocks, so that the greatest common divisor of their counts soon is a block's
size.

The engine also holds the answer, which the next turn mostly repeats. How much of it is found again is learned, too: it
depends on whether the client sends it back as it was, and the template renders it so.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from gateway.prefix.fingerprint import BLOCK_TOKENS

ENDS_MAX = 16_384  # prompts whose lengths are remembered, of one server
SEARCH_BLOCKS = 256  # from a match's end to the end of an earlier prompt, back and forth
MEAN_WEIGHT = 0.05  # of the newest prompt in the mean
REUSE_WEIGHT = 0.2  # of the newest conversation in the share of answers that is found again
REUSE_MIN_TOKENS = 32  # of an answer: of shorter ones, blocks hide it
REPORTS_MIN = 4  # of different counts, before their divisor is believed to be a block's size


class _End(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int
    output_tokens: int


class TokenCalibration:
    """Of one server's engine. Owned by the event loop."""

    def __init__(self) -> None:
        self.tokens_per_block = float(BLOCK_TOKENS)  # of the fingerprint
        self.answer_reuse = 0.0
        self._learned = 0  # prompts
        self._divisor = 0  # of all counts so far
        self._last_count = 0
        self._counts = 0  # that differed from the one before
        self._ends: OrderedDict[int, _End] = OrderedDict()  # by the last block's hash, which stands for all before it

    def of(self, chain: Sequence[int], matched: int, prompt_tokens: int) -> int:
        """How many cached tokens the engine will report where the first `matched` blocks of a chain are there. Of a
        prompt of `prompt_tokens` (by estimate) that goes on where an earlier one ended: that one's, and what is reused
        of its answer."""
        if not matched:
            return 0
        tokens = int(self._of(chain, matched, prompt_tokens))
        return tokens // self._divisor * self._divisor if self._counts >= REPORTS_MIN else tokens

    def _of(self, chain: Sequence[int], matched: int, prompt_tokens: int) -> float:
        if not self._ends:
            return matched * self.tokens_per_block
        before, known = self._last_anchor(chain, matched) or (0, _End(0, 0))
        if before == matched and matched:
            whole = prompt_tokens * self.tokens_per_block / BLOCK_TOKENS
            reused = known.prompt_tokens + self.answer_reuse * known.output_tokens
            return min(reused, max(whole, known.prompt_tokens))
        per_block = self.tokens_per_block
        after = self._next_anchor(chain, matched)
        if after is not None and after[1].prompt_tokens > known.prompt_tokens:
            per_block = (after[1].prompt_tokens - known.prompt_tokens) / (after[0] - before)
        return known.prompt_tokens + (matched - before) * per_block

    def learn(
        self, chain: Sequence[int], matched: int, prompt_tokens: int, cached_tokens: int, output_tokens: int
    ) -> None:
        """A reply's usage; `matched` of its chain were believed to be cached."""
        if not chain or not prompt_tokens:
            return
        if cached_tokens and cached_tokens != self._last_count:
            self._divisor = math.gcd(self._divisor, cached_tokens)
            self._last_count = cached_tokens
            self._counts += 1
        self._learn_reuse(chain, matched, cached_tokens)
        self._learned += 1
        weight = max(MEAN_WEIGHT, 1 / self._learned)
        self.tokens_per_block += weight * (prompt_tokens / len(chain) - self.tokens_per_block)
        tip = chain[-1]
        self._ends[tip] = _End(prompt_tokens, output_tokens)
        self._ends.move_to_end(tip)
        if len(self._ends) > ENDS_MAX:
            self._ends.popitem(last=False)

    def _learn_reuse(self, chain: Sequence[int], matched: int, cached_tokens: int) -> None:
        end = self._ends.get(chain[matched - 1]) if 0 < matched < len(chain) else None
        if end is None:
            return
        if end.output_tokens >= REUSE_MIN_TOKENS and cached_tokens > end.prompt_tokens - REUSE_MIN_TOKENS:
            share = min(max(0.0, (cached_tokens - end.prompt_tokens) / end.output_tokens), 1.0)
            self.answer_reuse += REUSE_WEIGHT * (share - self.answer_reuse)

    def _last_anchor(self, chain: Sequence[int], matched: int) -> tuple[int, _End] | None:
        """The longest earlier prompt that the first `matched` blocks begin with, and how many of them it has."""
        for depth in range(matched, max(0, matched - SEARCH_BLOCKS), -1):
            end = self._ends.get(chain[depth - 1])
            if end is not None:
                return depth, end
        return None

    def _next_anchor(self, chain: Sequence[int], matched: int) -> tuple[int, _End] | None:
        """The shortest earlier prompt that begins with the first `matched` blocks and more of this chain."""
        for depth in range(matched + 1, min(len(chain), matched + SEARCH_BLOCKS) + 1):
            end = self._ends.get(chain[depth - 1])
            if end is not None:
                return depth, end
        return None
