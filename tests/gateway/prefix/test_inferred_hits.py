"""What times teach about the caches of deployments that do not report cached tokens."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from gateway.prefix.cache_model import CacheModel
from gateway.prefix.estimate import Estimate
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.in_flight import InFlightPrompt

RATE = 8_000.0


class Server:
    """Computes prompts one after the other at `RATE`, and caches the newest `capacity` blocks. Reports nothing."""

    def __init__(self, capacity: int, guess: int) -> None:
        self.cache = CacheModel(capacity * BLOCK_TOKENS)
        self.cache.resize(capacity * BLOCK_TOKENS)
        self.estimate = Estimate(guess * BLOCK_TOKENS, RATE)
        self.now = 0.0

    def compute(self, *chains: Sequence[int], noise_seconds: float = 0.0) -> None:
        """The prompts are sent together, and the server is idle afterwards."""
        tokens = [len(chain) * BLOCK_TOKENS for chain in chains]
        sent = [self.estimate.begin(chain, length, self.now) for chain, length in zip(chains, tokens, strict=True)]
        for prompt, chain in zip(sent, chains, strict=True):
            uncached = len(chain) - self.cache.match(chain)
            self.cache.add(chain)
            self.now += self.estimate.speed.overhead_seconds + uncached * BLOCK_TOKENS / RATE + noise_seconds
            self.estimate.first_chunk(prompt, self.now)
        for prompt in sent:
            self.estimate.end(prompt, self.now + 1)
        self.now += 2.0


def conversation(number: int, blocks: int) -> tuple[int, ...]:
    return tuple(range(number * 10_000, number * 10_000 + blocks))


def test_the_capacity_is_found_from_prompts_that_are_computed_together() -> None:
    server, rng = Server(capacity=1_000, guess=10_000), random.Random(1)
    lengths = [20] * 40
    for _ in range(150):
        numbers = rng.sample(range(len(lengths)), 2)
        for number in numbers:
            lengths[number] += 2
        server.compute(*(conversation(number, lengths[number]) for number in numbers))
    assert 700 < server.estimate.cache.capacity < 1_400


class BusyServer(Server):
    """One that is never idle: a conversation's next prompt is sent before the last one is computed."""

    def __init__(self, capacity: int, guess: int, lengths: list[int]) -> None:
        super().__init__(capacity, guess)
        self.lengths = lengths  # of the conversations, in blocks
        self._waiting: deque[tuple[InFlightPrompt, int]] = deque()
        self.compute(conversation(9, 100))  # teaches the speed
        for number in range(len(lengths)):
            self._send(number)

    def _send(self, number: int) -> None:
        self.lengths[number] += 2
        chain = conversation(number, self.lengths[number])
        self._waiting.append((self.estimate.begin(chain, len(chain) * BLOCK_TOKENS, self.now), number))

    def compute_next(self) -> None:
        prompt, number = self._waiting.popleft()
        uncached = len(prompt.chain) - self.cache.match(prompt.chain)
        self.cache.add(prompt.chain)
        self.now += self.estimate.speed.overhead_seconds + uncached * BLOCK_TOKENS / RATE
        self.estimate.first_chunk(prompt, self.now)
        self.estimate.end(prompt, self.now)
        self._send(number)
        assert self._waiting, "it is never idle"


def test_the_capacity_is_found_of_a_server_that_is_never_idle() -> None:
    """Three conversations do not fit into the cache."""
    server = BusyServer(250, 10_000, [100, 100, 100])
    for _ in range(90):
        server.compute_next()
    assert 150 < server.estimate.cache.capacity < 400


def test_two_conversations_that_evict_each_others_ends_show_the_capacity_within_a_few_turns() -> None:
    """Each finds its beginning, so the capacity lies between its reuse distance and that plus its length."""
    server = BusyServer(1_000, 100_000, [600, 600])
    for _ in range(6):
        server.compute_next()
    assert server.estimate.cache.capacity == pytest.approx(1_000, rel=0.25)


def test_periods_that_take_twice_as_long_for_another_reason_show_no_capacity() -> None:
    """The engine pauses, or computes prompts of others: nothing says that a part of these prompts was evicted."""
    server, rng = Server(capacity=100_000, guess=100_000), random.Random(1)
    for number in range(1, 10):
        server.compute(conversation(number, 100))
    for _ in range(10):
        chains = [conversation(number, 104) for number in rng.sample(range(1, 10), 3)]
        server.compute(*chains, noise_seconds=4 * BLOCK_TOKENS / RATE)
    assert server.estimate.cache.capacity == 100_000


def test_a_delay_of_a_short_prefix_does_not_look_like_a_restart() -> None:
    server, rng = Server(capacity=1_000, guess=1_000), random.Random(1)
    for number in range(1, 40):  # unknown prompts show how exact predictions are
        server.compute(conversation(number, 10), noise_seconds=rng.choice((0.0, 0.03)))
    for _ in range(20):
        server.compute(conversation(50, 8), noise_seconds=0.06)
    assert all(server.estimate.cache.match(conversation(number, 10)) for number in range(1, 40))


def test_a_long_prefix_that_is_gone_looks_like_a_restart() -> None:
    server = Server(capacity=1_000, guess=1_000)
    for number in range(1, 10):
        server.compute(conversation(number, 100))
    server.cache.clear()
    server.compute(conversation(9, 100))
    assert not any(server.estimate.cache.match(conversation(number, 100)) for number in range(1, 9))


def test_an_evicted_conversation_behind_a_cached_beginning_does_not_look_like_a_restart() -> None:
    server = Server(capacity=1_000, guess=1_000)
    system = tuple(range(8))
    for number in range(1, 8):
        server.compute(system + conversation(number, 100))
    server.cache.remove(system + conversation(1, 100)[:1])
    server.compute(system + conversation(1, 100))  # computes all but the common beginning
    held = [server.estimate.cache.match(system + conversation(number, 100)) for number in range(2, 8)]
    assert held[1] > 90 and held[2:] == [108] * 4, "newer conversations are still predicted to be cached"


def test_a_delay_does_not_look_like_an_evicted_beginning() -> None:
    server = Server(capacity=1_000, guess=1_000)
    system = tuple(range(8))
    for number in range(1, 8):
        server.compute(system + conversation(number, 20), noise_seconds=0.02)
    server.compute(system + conversation(8, 500), noise_seconds=8 * BLOCK_TOKENS / RATE)
    held = [server.estimate.cache.match(system + conversation(number, 20)) for number in range(1, 8)]
    assert held == [28] * 7, "a delay of a long prompt does not show that its short beginning was evicted"


def test_an_error_of_a_long_period_does_not_look_like_an_evicted_beginning() -> None:
    server = Server(capacity=5_000, guess=5_000)
    system = tuple(range(40))
    for number in range(1, 8):
        server.compute(system + conversation(number, 20))
    server.compute(system + conversation(8, 1_000), noise_seconds=40 * BLOCK_TOKENS / RATE)  # 4% of the period
    held = [server.estimate.cache.match(system + conversation(number, 20)) for number in range(1, 8)]
    assert held == [60] * 7


def test_delays_of_hits_count_as_errors() -> None:
    """Prompts that are cached do not teach the speed, so their errors are not among those of the speed."""
    server, rng = Server(capacity=1_000, guess=1_000), random.Random(1)
    for number in range(1, 12):
        server.compute(conversation(number, 10))
    for _ in range(30):
        server.compute(conversation(11, 10), noise_seconds=rng.choice((0.0, 0.03)))
    server.compute(conversation(11, 10), noise_seconds=10 * BLOCK_TOKENS / RATE)
    assert all(server.estimate.cache.match(conversation(number, 10)) for number in range(1, 12))
