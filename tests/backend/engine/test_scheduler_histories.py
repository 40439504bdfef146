"""Random histories of the scheduler and its pool, against an oracle that knows the true content of every block.

The oracle plays the model. It writes into each slot of the cache the tokens, and the salt, that led to it. Whenever a
request is computed, it checks everything that attention would read. It also remembers which blocks have served more
than background work, and checks which ones are evicted. The "next token" is a function of the whole sequence, so a
request that was chunked, cached, preempted, drafted for and batched with others must still end with exactly the tokens
that it gets alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.engine.block_pool import BlockPool
from backend.engine.cached_block import CachedBlock
from backend.engine.errors import ContextTooLong, QueueFull, RequestRefused
from backend.engine.host_tier import HostTier
from backend.engine.outputs import FinishReason, StepOutput
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.pooling import Pooling
from backend.engine.request import Request, RequestStatus
from backend.engine.sampling_params import SamplingParams
from backend.engine.scheduler import Scheduler
from backend.engine.speculation.base import Drafter, DraftRequest
from backend.engine.speculation.draft_length import AdaptiveDraftLength
from backend.engine.speculation.speculator import Speculator

STOP_TOKEN = 3
MAX_MODEL_LEN = 40

Content = tuple[str, tuple[int, ...]]  # the salt, and every token up to and including the slot's own


def next_token(token_ids: list[int]) -> int:
    value = (sum(token_ids) * 7 + len(token_ids)) % 23
    return STOP_TOKEN if value == 22 else value % 2


def generate_alone(request: Request) -> tuple[list[int], FinishReason]:
    token_ids = list(request.prompt_token_ids)
    output: list[int] = []
    while True:
        output.append(next_token(token_ids + output))
        if output[-1] in request.sampling.stop_token_ids and len(output) >= request.sampling.min_tokens:
            return output, FinishReason.STOP
        if len(output) == request.sampling.max_tokens:
            return output, FinishReason.LENGTH


class RandomDrafter(Drafter):
    """Drafts a random number of tokens, most of them right."""

    def __init__(self) -> None:
        self._random = Random(0)

    def draft(self, wanted: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        return [self._draft(each.request.token_ids, self._random.randint(0, each.num_tokens)) for each in wanted]

    def _draft(self, token_ids: list[int], count: int) -> tuple[int, ...]:
        drafts: list[int] = []
        for _ in range(count):
            right = next_token(token_ids + drafts)
            drafts.append(right if self._random.random() < 0.7 else 1 - min(right, 1))
        return tuple(drafts)


class AlwaysDraft(AdaptiveDraftLength):
    """Drafts as many tokens as possible."""

    def num_drafts(self, requests: Sequence[Request], most: int) -> list[int]:
        return [most] * len(requests)


class UnreliableSlots:
    """Host memory that is found corrupted one time in ten."""

    def __init__(self, num_slots: int, blocks: list[list[Content | None]]) -> None:
        self.num_slots = num_slots
        self._blocks = blocks
        self._saved: list[list[Content | None]] = [[] for _ in range(num_slots)]
        self._random = Random(0)

    def save(self, block: int, slot: int) -> int:
        self._saved[slot] = list(self._blocks[block])
        return hash(tuple(self._saved[slot]))

    def load(self, slot: int, block: int, checksum: int) -> bool:
        is_sound = self._random.random() < 0.9
        self._blocks[block][:] = self._saved[slot] if is_sound else [None] * len(self._saved[slot])
        assert hash(tuple(self._saved[slot])) == checksum
        return is_sound


class Histories(RuleBasedStateMachine):
    @initialize(
        pool_tokens=st.integers(4, 12) | st.integers(24, 40),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 30),
        max_num_seqs=st.integers(1, 6),
        max_waiting=st.integers(0, 6),
        caching=st.sampled_from([True, True, True, False]),
        max_drafts=st.sampled_from([0, 1, 6]),
        host_slots=st.sampled_from([0, 0, 2, 12]),
    )
    def start(
        self,
        pool_tokens: int,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        max_waiting: int,
        caching: bool,
        max_drafts: int,
        host_slots: int = 0,
    ) -> None:
        num_blocks = pool_tokens // block_size
        self.slots: list[list[Content | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.tier = HostTier(UnreliableSlots(host_slots, self.slots)) if host_slots else None
        self.pool = BlockPool(num_blocks, block_size, self, self.tier)
        self.findable: set[bytes] = set()  # according to the listener's events
        self.foreground: set[bytes] = set()  # hashes of blocks that have served more than background work
        self.num_foreground_evicted = 0
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            max_waiting=max_waiting,
            enable_prefix_caching=caching,
        )
        self.speculator = Speculator(self.scheduler, RandomDrafter() if max_drafts else None, max_drafts)
        self.speculator._draft_length = AlwaysDraft()
        self.budget, self.max_num_seqs, self.max_unfinished = budget, max_num_seqs, max_num_seqs + max_waiting
        self.caching = caching
        self.live: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.clock = 0

    def stored(self, block: CachedBlock) -> None:
        assert block.block_hash not in self.findable
        self.findable.add(block.block_hash)

    def removed(self, block_hash: bytes) -> None:
        """A block is evicted: if it was foreground, no background block may be left that could be evicted instead."""
        self.findable.remove(block_hash)
        if block_hash in self.foreground and not self.tier:
            self.foreground.remove(block_hash)
            free = [h for h, block in self.pool._index.items() if not self.pool._ref_counts[block]]
            assert set(free) <= self.foreground
            self.num_foreground_evicted += 1

    def cleared(self) -> None:
        self.findable.clear()

    def end_step(self) -> None:
        pass

    @rule(
        prompt=st.lists(st.integers(0, 1), max_size=16) | st.integers(1, 30).map(lambda n: [0] * n),
        max_tokens=st.integers(1, 4) | st.integers(8, 20),
        min_tokens=st.integers(0, 3),
        salt=st.sampled_from(["", "", "", "a"]),
        priority=st.sampled_from([0, 0, 5, 7, -1]),
        pooling=st.sampled_from([None, None, None, Pooling.MEAN, Pooling.LAST]),
        lifetime=st.sampled_from([math.inf, math.inf, 3]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        salt: str,
        priority: int,
        pooling: Pooling | None,
        lifetime: float,
    ) -> None:
        self.clock += 1
        sampling = SamplingParams(
            max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop_token_ids=frozenset({STOP_TOKEN})
        )
        request = Request(
            f"r{self.clock}",
            prompt,
            sampling,
            cache_salt=salt,
            priority=priority,
            pooling=pooling,
            deadline=self.clock + lifetime,
            arrived=self.clock,
        )
        longest = len(prompt) + (0 if pooling else max_tokens)
        stored = len(prompt) if pooling else longest - 1
        try:
            self.scheduler.add(request)
        except ContextTooLong:
            assert longest > MAX_MODEL_LEN
        except RequestRefused:
            assert not prompt or stored > self.pool.num_blocks * self.pool.block_size
        except QueueFull:
            assert len(self.live) >= self.max_unfinished
        else:
            assert prompt
            assert longest <= MAX_MODEL_LEN
            assert stored <= self.pool.num_blocks * self.pool.block_size
            self.live[request.request_id] = request
            self.outputs[request.request_id] = []
            assert len(self.live) <= self.max_unfinished

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        output = self.scheduler.abort(request_id)
        assert output is not None
        assert output.finish_reason is FinishReason.ABORT
        assert self.live.pop(request_id).block_table == []
        assert self.scheduler.abort(request_id) is None

    @rule()
    def expire(self) -> None:
        self.clock += 1
        due = {request_id for request_id, request in self.live.items() if request.deadline <= self.clock}
        outputs = self.scheduler.expire(self.clock)
        assert {output.request_id for output in outputs} == due
        assert all(output.finish_reason is FinishReason.DEADLINE for output in outputs)
        assert all(self.live.pop(request_id).block_table == [] for request_id in due)
        assert len(self.scheduler._deadlines._heap) <= 2 * self.max_unfinished + 1

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        assert not self.findable

    @precondition(lambda self: self.live)
    @rule(count=st.integers(1, 3))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.live:
                self.step()
                self.pool_is_whole()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def interrupted_step(self, data: st.DataObject) -> None:
        """Some slots have been written, but no request has advanced."""
        plan = self.speculator.extend(self.scheduler.schedule())
        self.check_plan(plan)
        for scheduled in plan[: data.draw(st.integers(0, len(plan)))]:
            self.compute(scheduled)

    def step(self) -> int:
        """Returns how many requests have advanced without catching up."""
        preemptions = self.scheduler.counters.preemptions
        plan = self.scheduler.schedule()
        preempted = self.scheduler.counters.preemptions - preemptions
        plan = self.speculator.extend(plan)
        assert self.scheduler.counters.preemptions == preemptions + preempted, "a request was preempted for a draft"
        self.check_plan(plan)
        computed = [self.compute(scheduled) for scheduled in plan]
        num_chunks = sum(not scheduled.catches_up for scheduled in plan)
        foreground_blocks = [block for s in plan if s.request.priority <= 0 for block in s.request.block_table]
        for output in self.scheduler.advance(plan, computed):
            self.take(output)
        self.speculator.learn(plan, computed)
        self.foreground |= {block_hash for block in foreground_blocks if (block_hash := self.pool._hashes[block])}
        return num_chunks

    def run_until_idle(self) -> None:
        for _ in range(len(self.live) * MAX_MODEL_LEN * 2 + 1):
            if not self.live:
                return
            self.step()
        pytest.fail("a request never ends")

    def check_plan(self, plan: tuple[ScheduledRequest, ...]) -> None:
        assert plan, "there are unfinished requests, but none advances"
        assert sum(scheduled.num_tokens for scheduled in plan) <= self.budget
        assert all(scheduled.num_tokens > 0 for scheduled in plan)
        assert len({scheduled.request.request_id for scheduled in plan}) == len(plan)
        assert len(self.scheduler.running) <= self.max_num_seqs
        assert {scheduled.request.status for scheduled in plan} == {RequestStatus.RUNNING}
        # The most urgent running request is never starved.
        assert self.scheduler.running[0] in [scheduled.request for scheduled in plan]
        # No tokens are spent on a priority while a more urgent request waits.
        if self.scheduler.waiting:
            assert max(scheduled.request.priority for scheduled in plan) <= self.scheduler.waiting[0].priority

    def compute(self, scheduled: ScheduledRequest) -> RunnerOutput:
        request, size = scheduled.request, self.pool.block_size
        token_ids = [*request.token_ids, *scheduled.drafts]
        assert scheduled.start == request.num_computed_tokens
        assert len(token_ids) < scheduled.request.max_total_tokens or not scheduled.drafts
        for position in range(scheduled.start, scheduled.end):
            block = request.block_table[position // size]
            assert self.pool._ref_counts[block] == 1, "a shared block is written"
            self.slots[block][position % size] = (request.cache_salt, tuple(token_ids[: position + 1]))
        for position in range(scheduled.end):
            content = self.slots[request.block_table[position // size]][position % size]
            assert content == (request.cache_salt, tuple(token_ids[: position + 1])), "reads keys of another sequence"
        if request.pooling is Pooling.LAST:
            return RunnerOutput(pooled=(float(len(request.token_ids)),) if scheduled.catches_up else ())
        if request.pooling:
            return RunnerOutput(pooled=(float(sum(request.token_ids[scheduled.start : scheduled.end])),))
        if not scheduled.catches_up:
            return RunnerOutput()
        known = len(request.token_ids)
        return RunnerOutput(tuple(next_token(token_ids[:end]) for end in range(known, len(token_ids) + 1)))

    def take(self, output: StepOutput) -> None:
        request = self.live[output.request_id]
        self.outputs[output.request_id] += output.new_token_ids
        assert output.num_cached_tokens < request.num_prompt_tokens
        assert not (output.num_cached_tokens and (request.pooling is Pooling.MEAN or not self.caching))
        if output.finish_reason is None:
            return
        del self.live[output.request_id]
        assert request.block_table == []
        assert request.status is RequestStatus.FINISHED
        if request.pooling is Pooling.LAST:
            assert output.pooled == (request.num_prompt_tokens,)
        elif request.pooling:
            assert output.pooled == pytest.approx([sum(request.prompt_token_ids) / request.num_prompt_tokens])
        else:
            assert (self.outputs[output.request_id], output.finish_reason) == generate_alone(request)

    @invariant()
    def pool_is_whole(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        saved = {*self.tier._foreground, *self.tier._background} if self.tier else set()
        assert self.findable == self.pool._index.keys() | saved
        held = Counter(block for request in self.live.values() for block in request.block_table)
        assert {block: n for block, n in enumerate(self.pool._ref_counts) if n} == held
        assert all(not request.block_table for request in self.scheduler.waiting)
        assert all(request.num_computed_tokens == 0 for request in self.scheduler.waiting)
        assert {*self.scheduler.running, *self.scheduler.waiting} == set(self.live.values())
        assert all(max(Counter(request.block_table).values(), default=1) == 1 for request in self.live.values())
        if not self.live:
            assert self.pool.num_free == self.pool.num_blocks

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.run_until_idle()
            self.pool_is_whole()


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_histories_under_pressure() -> None:
    """Hypothesis prefers small examples. In these, a few long requests always compete for the pool."""
    counters: Counter[str] = Counter()
    for seed in range(100):
        random = Random(seed)
        machine = Histories()
        block_size = random.choice([1, 2, 4])
        budget, drafts = random.choice([6, 16, 60]), random.choice([0, 4])
        caching, host_slots = seed % 4 > 0, random.choice([4, 30]) if seed % 2 else 0
        machine.start(random.randint(24, 40), block_size, budget, 6, 6, caching, drafts, host_slots)
        for _ in range(60):
            action = random.random()
            if action < 0.4:
                prompt = [random.randint(0, 1) for _ in range(random.randint(1, 12))]
                salt, priority = random.choice(["", "", "a"]), random.choice([0, 0, 1])
                share, lifetime = random.random(), random.choice([math.inf, 20])
                pooling = Pooling.MEAN if share < 0.1 else Pooling.LAST if share < 0.2 else None
                machine.add(prompt, random.randint(4, 16), random.randint(0, 4), salt, priority, pooling, lifetime)
            elif action < 0.43:
                machine.expire()
            elif action < 0.45 and machine.live:
                request_id = random.choice(sorted(machine.live))
                assert machine.scheduler.abort(request_id) is not None
                del machine.live[request_id]
            elif machine.live:
                counters["chunks"] += machine.step()
            machine.pool_is_whole()
        machine.teardown()
        counters["preemptions"] += machine.scheduler.counters.preemptions
        counters["accepted drafts"] += sum(machine.scheduler.counters.accepted_tokens)
        counters["drafts"] += machine.scheduler.counters.draft_tokens
        counters["hits"] += machine.scheduler.counters.prefix_cache_hits
        counters["expired"] += machine.scheduler.counters.finished[FinishReason.DEADLINE]
        counters["foreground evicted"] += machine.num_foreground_evicted
        if machine.tier:
            counters["restored"] += machine.tier.num_restored_total
            counters["corrupted"] += machine.tier.num_corrupted_total
    assert counters["preemptions"] > 300, counters
    assert counters["hits"] > 500, counters
    assert counters["drafts"] > 1.3 * counters["accepted drafts"] > 200, counters
    assert counters["chunks"] > 200, counters
    assert counters["expired"] > 25, counters
    assert counters["foreground evicted"] > 50, counters
    assert counters["restored"] > 200, counters
    assert counters["corrupted"] > 20, counters
