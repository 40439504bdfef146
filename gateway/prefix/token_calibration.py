"""Converts fingerprint blocks to an engine's own tokens: learns how many tokens the prefixes of prompts have.

Estimates from the text's length ignore the tokenizer, the language and the chat template. But each response reports its
prompt's tokens, and the prompts of a conversation begin with each other. So the token count is known exactly where an
earlier prompt ended: at an *anchor*. Between two anchors, tokens are proportional to blocks. Behind the last one, and
for new text, the learned mean per block applies.

Engines report cached tokens in whole KV blocks. The greatest common divisor of the reported counts is soon the KV
block's size.

The engine also caches its answer, which the next turn usually repeats. The share of it that is found again is learned,
too. It depends on whether the client returns the answer unchanged, and on how the template renders it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from gateway.prefix.fingerprint import BLOCK_TOKENS

ANCHORS_MAX = 16_384  # of one deployment; the oldest are forgotten first
SEARCH_BLOCKS = 256  # in both directions from the end of the match, within which an anchor is searched
MEAN_WEIGHT = 0.05  # of the newest prompt, in the mean tokens per block
REUSE_WEIGHT = 0.2  # of the newest sample, in `answer_reuse`
REUSE_MIN_TOKENS = 32  # of an answer; for shorter ones, rounding to KV blocks hides the reuse
REPORTS_MIN = 4  # different counts, after which their divisor is used as the KV block's size


class _Anchor(msgspec.Struct, frozen=True, gc=False):
    """The engine's token counts of an earlier prompt, and of its answer."""

    prompt_tokens: int
    output_tokens: int


class TokenCalibration:
    """The calibration of one deployment. Owned by the event loop."""

    def __init__(self) -> None:
        self.tokens_per_block = float(BLOCK_TOKENS)  # engine tokens per fingerprint block, as a mean
        # The share of an answer that is found cached when the next turn repeats it.
        self.answer_reuse = 0.0
        self._learned = 0  # prompts
        self._divisor = 0  # greatest common divisor of all reported counts
        self._last_count = 0
        self._counts = 0  # reported counts that differed from the one before
        self._anchors: OrderedDict[int, _Anchor] = OrderedDict()  # by the hash of the prompt's last block

    def predict_cached_tokens(self, chain: Sequence[int], matched: int, prompt_tokens: int) -> int:
        """How many cached tokens the engine will report if the first `matched` blocks of a chain are cached.

        `prompt_tokens` is the prompt's length in fingerprint tokens. If the prompt continues where an earlier one
        ended, the result is that one's tokens plus the expected reuse of its answer.
        """
        if not matched:
            return 0
        tokens = int(self._interpolate(chain, matched, prompt_tokens))
        return tokens // self._divisor * self._divisor if self._counts >= REPORTS_MIN else tokens

    def _interpolate(self, chain: Sequence[int], matched: int, prompt_tokens: int) -> float:
        """The same, before rounding down to whole KV blocks."""
        if not self._anchors:
            return matched * self.tokens_per_block
        before, anchor = self._last_anchor(chain, matched) or (0, _Anchor(0, 0))
        if before == matched and matched:  # the match ends where an earlier prompt ended
            whole = prompt_tokens * self.tokens_per_block / BLOCK_TOKENS
            most = whole if whole > anchor.prompt_tokens else anchor.prompt_tokens
            reused = anchor.prompt_tokens + self.answer_reuse * anchor.output_tokens
            return reused if reused < most else most
        # Between two anchors, interpolate; behind the last one, continue with the mean.
        per_block = self.tokens_per_block
        after = self._next_anchor(chain, matched)
        if after is not None and after[1].prompt_tokens > anchor.prompt_tokens:
            per_block = (after[1].prompt_tokens - anchor.prompt_tokens) / (after[0] - before)
        return anchor.prompt_tokens + (matched - before) * per_block

    def learn(
        self, chain: Sequence[int], matched: int, prompt_tokens: int, cached_tokens: int, output_tokens: int
    ) -> None:
        """Learn from a response's usage, in engine tokens. The first `matched` blocks were predicted to be cached."""
        if not chain or not prompt_tokens:
            return
        if cached_tokens and cached_tokens != self._last_count:
            self._divisor = math.gcd(self._divisor, cached_tokens)
            self._last_count = cached_tokens
            self._counts += 1
        self._learn_reuse(chain, matched, cached_tokens)
        self._learned += 1
        weight = 1 / self._learned if self._learned * MEAN_WEIGHT < 1 else MEAN_WEIGHT
        self.tokens_per_block += weight * (prompt_tokens / len(chain) - self.tokens_per_block)
        last_hash = chain[-1]
        self._anchors[last_hash] = _Anchor(prompt_tokens, output_tokens)
        self._anchors.move_to_end(last_hash)
        if len(self._anchors) > ANCHORS_MAX:
            self._anchors.popitem(last=False)

    def _learn_reuse(self, chain: Sequence[int], matched: int, cached_tokens: int) -> None:
        """Learn how much of an earlier answer was found cached, if the match ended where that answer's prompt ended."""
        anchor = self._anchors.get(chain[matched - 1]) if 0 < matched < len(chain) else None
        if anchor is None:
            return
        if anchor.output_tokens >= REUSE_MIN_TOKENS and cached_tokens > anchor.prompt_tokens - REUSE_MIN_TOKENS:
            share = min(max(0.0, (cached_tokens - anchor.prompt_tokens) / anchor.output_tokens), 1.0)
            self.answer_reuse += REUSE_WEIGHT * (share - self.answer_reuse)

    def _last_anchor(self, chain: Sequence[int], matched: int) -> tuple[int, _Anchor] | None:
        """The last anchor within the first `matched` blocks, and its depth in blocks."""
        for depth in range(matched, matched - SEARCH_BLOCKS if matched > SEARCH_BLOCKS else 0, -1):
            anchor = self._anchors.get(chain[depth - 1])
            if anchor is not None:
                return depth, anchor
        return None

    def _next_anchor(self, chain: Sequence[int], matched: int) -> tuple[int, _Anchor] | None:
        """The first anchor behind the first `matched` blocks of the chain, and its depth in blocks."""
        for depth in range(matched + 1, min(len(chain), matched + SEARCH_BLOCKS) + 1):
            anchor = self._anchors.get(chain[depth - 1])
            if anchor is not None:
                return depth, anchor
        return None
