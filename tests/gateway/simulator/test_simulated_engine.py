"""The simulated engine beside the bundled engine's own scheduler and block pool: equal steps, blocks and times."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from backend.engine.block_pool import BlockPool
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.engine.scheduler import Scheduler
from gateway.simulator.engine_cache import EngineCache
from gateway.simulator.engine_steps import EngineJob, EngineSpeed
from gateway.simulator.simulated_engine import SimulatedEngine

BLOCK = 16
TIMING = EngineSpeed(0.01, 0.001, 0.002, 1e-6, 1e-6, start=0.003, start_token=1e-5, step_tokens_max=128, running_max=8)


@dataclass
class Arrival:
    at: float
    prompt: list[int]
    output_tokens: int


@dataclass
class Outcome:
    first_chunk: float = -1.0
    finished: float = -1.0
    cached_tokens: int = -1


def arrivals(seed: int, count: int, mean_gap: float) -> list[Arrival]:
    """Conversations that share beginnings: each prompt continues a former one, its answer included, or is a new one."""
    rng, at, texts = random.Random(seed), 0.0, [[0] * 70]
    made = []
    for _ in range(count):
        at += rng.expovariate(1 / mean_gap)
        known = rng.choice(texts[-6:])[: rng.randrange(16, 600)] if rng.random() < 0.7 else []
        prompt = known + [rng.randrange(2, 10**6) for _ in range(rng.randrange(1, 300))]
        output_tokens = rng.choice([1, 2, 17, 60, 90])
        made.append(Arrival(at, prompt, output_tokens))
        texts.append(prompt + [1] * output_tokens)
    return made


def step_seconds(plan: Sequence[ScheduledRequest], running: Sequence[Request]) -> float:
    """How long a step takes by the model. `running`: the requests that ran before it."""
    seconds = TIMING.step
    for part in plan:
        if part.request not in running:
            seconds += TIMING.start + TIMING.start_token * len(part.request.token_ids)
    for part in plan:
        if (
            part.end > part.request.num_prompt_tokens
            and part.num_tokens == 1
            and part.start >= part.end - 1
            and (part.request.num_output_tokens)
        ):
            seconds += TIMING.decode + TIMING.decode_context * part.start
        else:
            context = part.start + part.num_tokens / 2
            seconds += part.num_tokens * (TIMING.prefill_token + TIMING.prefill_context * context)
    return seconds


def run_scheduler(traffic: list[Arrival], num_blocks: int) -> tuple[list[Outcome], int]:
    """What the bundled engine would do, step by step, if a step took as long as the model says."""
    scheduler = Scheduler(
        BlockPool(num_blocks, BLOCK), max_num_seqs=TIMING.running_max, max_num_batched_tokens=TIMING.step_tokens_max,
        max_model_len=10**6, max_waiting=10**6,
    )  # fmt: skip
    outcomes, now, added = [Outcome() for _ in traffic], 0.0, 0
    while added < len(traffic) or scheduler.has_unfinished:
        if not scheduler.has_unfinished:
            now = max(now, traffic[added].at)
        while added < len(traffic) and traffic[added].at <= now:
            one = traffic[added]
            sampling = SamplingParams(max_tokens=one.output_tokens)
            scheduler.add(Request(str(added), list(one.prompt), sampling, arrived=one.at))
            added += 1
        running = [*scheduler.running]
        plan = scheduler.schedule()
        now += step_seconds(plan, running)
        computed = [RunnerOutput(token_ids=(1,) if part.catches_up else ()) for part in plan]
        for output in scheduler.advance(plan, computed):
            outcome = outcomes[int(output.request_id)]
            if outcome.first_chunk < 0:
                outcome.first_chunk, outcome.cached_tokens = now, output.num_cached_tokens
            if output.finish_reason is not None:
                outcome.finished = now
    return outcomes, scheduler.counters.preemptions


def chains_of(traffic: list[Arrival]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each prompt's blocks, and those that its answer completes."""
    chains = []
    for one in traffic:
        tokens, chain, block = [*one.prompt, *[1] * (one.output_tokens - 1)], [], 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block = hash((block, tuple(tokens[start : start + BLOCK])))
            chain.append(block)
        full = len(one.prompt) // BLOCK
        chains.append((tuple(chain[:full]), tuple(chain[full:])))
    return chains


def run_model(traffic: list[Arrival], num_blocks: int) -> tuple[list[Outcome], SimulatedEngine]:
    engine = SimulatedEngine(EngineCache(num_blocks), TIMING, block_tokens=BLOCK)
    jobs = [
        EngineJob(chain, len(one.prompt), one.output_tokens, answer)
        for one, (chain, answer) in zip(traffic, chains_of(traffic), strict=True)
    ]
    outcomes, waiting = {job: Outcome() for job in jobs}, list(zip(traffic, jobs, strict=True))
    while waiting or engine.next_event_at < math.inf:
        if waiting and waiting[0][0].at <= engine.next_event_at:
            one, job = waiting.pop(0)
            engine.submit(job, one.at)
        else:
            now = engine.next_event_at
            for event in engine.advance(now):
                if event.is_first:
                    outcomes[event.job].first_chunk = now
                if event.is_end:
                    outcomes[event.job].finished = now
        check_blocks(engine)
    for job, outcome in outcomes.items():
        outcome.cached_tokens = job.cached_tokens
    return list(outcomes.values()), engine


def check_blocks(engine: SimulatedEngine) -> None:
    cache = engine.cache
    assert 0 <= cache.pinned <= cache.findable
    assert cache.findable + cache.private <= cache.capacity
    tables = [job.table for job in [*engine.prefilling, *engine.decoding] if job.table is not None]
    assert len(tables) == engine.running
    assert cache.private == sum(table.private for table in tables)
    if not tables:
        assert not cache.pinned


@pytest.mark.parametrize("seed", range(8))
def test_with_room_for_all_it_does_what_the_bundled_engine_does(seed: int) -> None:
    traffic = arrivals(seed, 60, mean_gap=0.3)
    real, preemptions = run_scheduler(traffic, 4000)
    modelled, engine = run_model(traffic, 4000)
    assert not preemptions and not engine.preemptions
    assert [one.cached_tokens for one in modelled] == [one.cached_tokens for one in real]
    assert [one.first_chunk for one in modelled] == pytest.approx([one.first_chunk for one in real])
    assert [one.finished for one in modelled] == pytest.approx([one.finished for one in real])


@pytest.mark.parametrize("seed", range(8))
def test_with_little_room_it_comes_close(seed: int) -> None:
    """Evictions and preemptions: equal blocks that two requests compute at once are counted once, unlike there."""
    traffic = arrivals(seed, 80, mean_gap=0.2)
    real, preemptions = run_scheduler(traffic, 140)
    modelled, engine = run_model(traffic, 140)
    assert all(one.finished >= one.first_chunk >= arrival.at for one, arrival in zip(modelled, traffic, strict=True))
    assert sum(one.cached_tokens for one in modelled) == pytest.approx(sum(one.cached_tokens for one in real), rel=0.1)
    assert max(one.finished for one in modelled) == pytest.approx(max(one.finished for one in real), rel=0.05)
    if preemptions > 3:
        assert engine.preemptions
