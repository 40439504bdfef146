"""Predictions against the real content of a block pool, call by call, over a long time.

The cache holds a fraction of the requested prompts. The tests run with KV events, without events, and with lost events.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from zlib import crc32

import pytest

from backend.engine.block_pool import BlockPool
from backend.engine.cached_block import ROOT_HASH, CachedBlock, hash_block
from gateway.prefix.estimate import Estimate
from gateway.prefix.events.base import BlocksRemoved, BlocksStored
from gateway.prefix.events.block_index import BlockIndex, FinishedCall
from gateway.prefix.fingerprint import BLOCK_BYTES, BYTES_PER_TOKEN, fingerprint

BLOCK_TOKENS = 16
POOL_BLOCKS = 400
POOL_TOKENS = POOL_BLOCKS * BLOCK_TOKENS
CONVERSATIONS = 30
ROOM = 2.0


class EngineModel:
    """One engine's block pool, and the estimates for it.

    Tokens are slices of text of the length that a fingerprint assumes. So an error is an error of the prediction, not
    of the token count.
    """

    def __init__(
        self, *, guess_tokens: int = POOL_TOKENS, publishes: bool = False, capacity_reported: bool = False
    ) -> None:
        self.estimate = Estimate(guess_tokens, prefill_tokens_per_second=1000)
        self.index = BlockIndex(self.estimate.cache) if publishes else None
        self.pool = BlockPool(POOL_BLOCKS, BLOCK_TOKENS, self)
        self.receives_events = True  # False: events are lost
        self.capacity_reported = capacity_reported
        self.calls = 0
        self.error_tokens: list[int] = []  # per call: predicted and not found, or found and not predicted
        self.found_tokens: list[int] = []

    def stored(self, block: CachedBlock) -> None:
        if self.index is not None and self.receives_events:
            parent = None if block.parent == ROOT_HASH else block.parent
            self.index.stored(BlocksStored((block.block_hash,), parent, BLOCK_TOKENS, block.session_id))

    def removed(self, block_hash: bytes) -> None:
        if self.index is not None and self.receives_events:
            self.index.removed(BlocksRemoved((block_hash,)))

    def cleared(self) -> None:
        if self.index is not None:
            self.index.cleared()

    def end_step(self) -> None:
        pass

    def ask(self, text: str) -> None:
        """Send a prompt and get its response, as `DeploymentState` and `SentCall` do."""
        self.calls += 1
        if self.capacity_reported:
            in_doubt = self.index is not None and self.index.in_doubt
            self.estimate.set_capacity(POOL_TOKENS, ROOM if self.index is not None and not in_doubt else 1.0)
            if self.index is not None:
                self.index.set_capacity(POOL_TOKENS)
        chain, tokens, now = fingerprint([text.encode()], 7), len(text) // BYTES_PER_TOKEN, float(self.calls)
        prediction = self.estimate.cache.predict(chain)
        if self.index is not None:
            prediction = self.estimate.predict_cache(chain, self.index.present_tokens, now)
        sent = self.estimate.begin(chain, tokens, now, prediction=prediction)
        cached = self._compute(f"call-{self.calls}", text)
        self.estimate.first_chunk(sent, now)
        told = self.index is not None and self.index.reports_all_evictions
        self.estimate.learn_cached(sent, tokens, cached, evictions_reported=told)
        if self.index is not None:
            self.index.call_finished(FinishedCall(f"call-{self.calls}", chain, len(text), tokens, cached, 1))
        self.estimate.end(sent, now)
        edge = BLOCK_BYTES // BYTES_PER_TOKEN + BLOCK_TOKENS  # text blocks and token blocks end at different positions
        off = abs(prediction.matched * BLOCK_BYTES // BYTES_PER_TOKEN - cached)
        self.error_tokens.append(max(0, off - edge))
        self.found_tokens.append(cached)

    def _compute(self, call_id: str, text: str) -> int:
        hashes: list[bytes] = []
        for start in range(0, len(text) // BYTES_PER_TOKEN - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            piece = text[start * BYTES_PER_TOKEN : (start + BLOCK_TOKENS) * BYTES_PER_TOKEN]
            hashes.append(hash_block(hashes[-1] if hashes else ROOT_HASH, [crc32(piece.encode()) % 2**31]))
        cached = self.pool.find_cached_prefix(hashes)
        table = self.pool.allocate(len(hashes) - len(cached), cached)
        assert table is not None
        for i in range(len(cached), len(hashes)):
            self.pool.cache_block(table[i], CachedBlock(hashes[i], hashes[i - 1] if i else ROOT_HASH, (), "", call_id))
        self.pool.free(table)
        return len(cached) * BLOCK_TOKENS

    def error_share(self, last: int) -> float:
        """The error, relative to the cached tokens, over the last calls."""
        return sum(self.error_tokens[-last:]) / sum(self.found_tokens[-last:])


class Traffic:
    """Conversations that grow turn by turn and restart when they are long. Some are continued often, most seldom."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._texts = [self._words(i, 2_000) for i in range(CONVERSATIONS)]
        self._made = CONVERSATIONS

    def prompts(self, count: int) -> Sequence[str]:
        made = []
        for _ in range(count):
            number = min(int(self._rng.expovariate(0.15)), CONVERSATIONS - 1)
            self._made += 1
            text = self._texts[number] + self._words(self._made, self._rng.randrange(200, 1_200))
            self._texts[number] = text if len(text) < 8_000 else self._words(self._made, 2_000)
            made.append(text)
        return made

    @staticmethod
    def _words(name: int, length: int) -> str:
        return "".join(f"{name}:{i:05}," for i in range(length // 7))[:length]


@pytest.mark.parametrize("guess_tokens", [POOL_TOKENS // 5, POOL_TOKENS, POOL_TOKENS * 5])
def test_without_events_responses_bound_the_error(guess_tokens: int) -> None:
    """Even if the configured cache size is far off."""
    engine = EngineModel(guess_tokens=guess_tokens)
    for text in Traffic(2).prompts(800):
        engine.ask(text)
    assert engine.error_share(400) < 0.08


def test_with_events_there_is_no_error() -> None:
    engine = EngineModel(publishes=True, capacity_reported=True)
    for text in Traffic(1).prompts(300):
        engine.ask(text)
    assert engine.error_share(300) == 0
    assert engine.pool.num_cached * BLOCK_TOKENS > 0.95 * POOL_TOKENS, "it was full"


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("capacity_reported", [True, False])
def test_after_lost_events_responses_count_until_all_blocks_are_known(seed: int, capacity_reported: bool) -> None:
    engine, traffic = EngineModel(publishes=True, capacity_reported=capacity_reported), Traffic(seed)
    assert engine.index is not None
    for text in traffic.prompts(150):
        engine.ask(text)
    engine.receives_events = False
    for text in traffic.prompts(100):
        engine.ask(text)
    engine.receives_events = True
    engine.index.events_lost()
    assert not engine.index.reports_all_evictions
    for text in traffic.prompts(50):
        engine.ask(text)
    assert engine.error_share(50) < 0.02
    assert engine.index.reports_all_evictions == capacity_reported, "needs a reported capacity"
    for text in traffic.prompts(50):
        engine.ask(text)
    assert engine.error_share(50) < 0.02
