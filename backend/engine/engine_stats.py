"""A snapshot of the engine's state and totals, for metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backend.engine.outputs import FinishReason
from backend.engine.request import Request
from backend.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's current state, and its totals since the start."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    kv_usage: float  # the share of blocks in use, 0 to 1
    prompt_tokens_total: int
    cached_prompt_tokens_total: int  # of these
    transferred_prompt_tokens_total: int  # of these, from another engine
    generation_tokens_total: int
    unwanted_tokens_total: int  # of these, generated after a stop string
    prefix_cache_queries_total: int  # in tokens
    prefix_cache_hits_total: int  # in tokens
    preemptions_total: int
    steps_given_up_total: int
    drafts_total: int  # how often any tokens were drafted for a request
    draft_tokens_total: int
    accepted_tokens_total: Sequence[int]  # of these, by position among the drafts
    steps_total: Sequence[int]  # by number of tokens: up to each of STEP_TOKENS_BOUNDS, and above
    step_tokens_total: int
    requests_finished: Mapping[FinishReason, int]
    aborted_total: int
    num_host_blocks: int  # capacity of the second tier; 0 without one
    num_host_blocks_used: int
    host_blocks_saved_total: int
    host_blocks_restored_total: int
    host_blocks_corrupted_total: int  # blocks whose checksum had changed when they were restored
    integrity_ok: bool
    integrity_checks_total: int
    max_loras: int
    running_adapters: frozenset[str]  # the names of LoRA adapters with running requests
    waiting_adapters: frozenset[str]


def collect_stats(
    scheduler: Scheduler, *, steps_given_up_total: int, integrity_ok: bool, integrity_checks_total: int, max_loras: int
) -> EngineStats:
    """Safe to call from any thread. During a step, the fields may describe different moments of it."""
    pool, counters = scheduler.pool, scheduler.counters
    num_free, tier = pool.num_free, pool.tier
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_free_blocks=num_free,
        num_blocks=pool.num_blocks,
        kv_usage=1.0 - num_free / pool.num_blocks,
        prompt_tokens_total=counters.prompt_tokens,
        cached_prompt_tokens_total=counters.cached_prompt_tokens,
        transferred_prompt_tokens_total=counters.transferred_prompt_tokens,
        generation_tokens_total=counters.generation_tokens,
        unwanted_tokens_total=counters.unwanted_tokens,
        prefix_cache_queries_total=counters.prefix_cache_queries,
        prefix_cache_hits_total=counters.prefix_cache_hits,
        preemptions_total=counters.preemptions,
        steps_given_up_total=steps_given_up_total,
        drafts_total=counters.drafts,
        draft_tokens_total=counters.draft_tokens,
        accepted_tokens_total=tuple(counters.accepted_tokens),
        steps_total=tuple(counters.step_tokens.num_steps),
        step_tokens_total=counters.step_tokens.num_tokens,
        requests_finished=dict(counters.finished),
        aborted_total=counters.finished[FinishReason.ABORT],
        num_host_blocks=tier.num_slots if tier else 0,
        num_host_blocks_used=tier.num_used if tier else 0,
        host_blocks_saved_total=tier.num_saved_total if tier else 0,
        host_blocks_restored_total=tier.num_restored_total if tier else 0,
        host_blocks_corrupted_total=tier.num_corrupted_total if tier else 0,
        integrity_ok=integrity_ok,
        integrity_checks_total=integrity_checks_total,
        max_loras=max_loras,
        running_adapters=_adapters_of(scheduler.running),
        waiting_adapters=_adapters_of(scheduler.waiting),
    )


def _adapters_of(requests: list[Request]) -> frozenset[str]:
    return frozenset(adapter.name for request in requests.copy() if (adapter := request.adapter))
