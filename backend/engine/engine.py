"""The engine. Read this first: `step` is all of it, and each of its three calls is one file.

`schedule` (scheduler.py) decides on ints who advances by how many tokens, in blocks that block_pool.py hands out;
`extend` (speculation/) adds guesses at what follows, if they are switched on;
`run` (runner.py) makes tensors of that (batch.py), puts them through the model (models/, attention/, ops/) and
samples (sampler.py); `advance` takes the new tokens in and says what they mean for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from backend.engine.block_pool import BlockListener, BlockPool
from backend.engine.config import EngineConfig, ResolvedConfig
from backend.engine.errors import RequestRefused
from backend.engine.graph_runner import create_runner
from backend.engine.host_tier import HostTier
from backend.engine.interruption import Interruption, nothing
from backend.engine.kv_memory import HostSlots
from backend.engine.lookahead import plan_ahead
from backend.engine.request import FinishReason, Request, StepOutput
from backend.engine.runner import Runner
from backend.engine.scheduler import Scheduler
from backend.engine.speculation import create_drafter
from backend.engine.speculation.speculator import Speculator


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the engine stands now, and what it has done since it was started."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    kv_usage: float  # the share of blocks in use, 0 to 1
    prompt_tokens_total: int
    cached_prompt_tokens_total: int  # of these
    generation_tokens_total: int
    unwanted_tokens_total: int
    prefix_cache_queries_total: int  # in tokens
    prefix_cache_hits_total: int  # in tokens
    preemptions_total: int
    steps_given_up_total: int
    drafts_total: int  # times that tokens were drafted for a request
    draft_tokens_total: int
    accepted_tokens_total: Sequence[int]  # of these, by their place among the drafts
    steps_total: Sequence[int]  # by the tokens that they had: up to each of STEP_TOKENS_BOUNDS, and above
    step_tokens_total: int
    requests_finished: Mapping[FinishReason, int]
    aborted_total: int
    num_host_blocks: int  # that the second tier has room for; 0 without one
    num_host_blocks_used: int
    host_blocks_saved_total: int
    host_blocks_restored_total: int
    host_blocks_corrupted_total: int  # whose checksum was another when they were wanted
    integrity_ok: bool
    integrity_checks_total: int


class Engine:
    """Not for more than one thread, but for `check` and `stats`."""

    def __init__(
        self, config: ResolvedConfig, scheduler: Scheduler, runner: Runner, speculator: Speculator | None = None
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.runner = runner
        self.speculator = speculator or Speculator(scheduler)
        self.interruption = Interruption()
        self._integrity_ok = True
        self._integrity_checks = 0

    @classmethod
    def load(cls, config: EngineConfig, listener: BlockListener | None = None) -> Engine:
        """Reads the weights and reserves the cache. Raises `ConfigError`, `UnsupportedModel` or `WeightsError`."""
        resolved = config.resolve()
        runner = create_runner(resolved)
        tier = None
        if resolved.num_host_blocks:
            tier = HostTier(HostSlots(runner.kv, resolved.num_host_blocks, resolved.kv_host_dir))
        scheduler = Scheduler(
            BlockPool(resolved.num_blocks, resolved.block_size, listener, tier),
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            max_model_len=resolved.max_model_len,
            max_waiting=resolved.max_waiting,
            enable_prefix_caching=resolved.enable_prefix_caching,
        )
        speculator = Speculator(scheduler, create_drafter(resolved), resolved.max_draft_tokens)
        return cls(resolved, scheduler, runner, speculator)

    def step(self, begun: Callable[[], None] = nothing) -> list[StepOutput]:
        """`begun` is called, on a CPU at least once, while the step's kernels compute or are about to."""
        plan = self.speculator.extend(self.scheduler.schedule())
        assert plan, "a step with nothing to do: ask has_unfinished first"
        following = plan_ahead(self.scheduler, plan) if self.runner.uses_lookahead else ()
        computed = self.runner.run(plan, self.interruption.watch(plan, begun), following)
        if computed is None:
            return []  # somebody more urgent waits: nobody has advanced
        outputs = self.scheduler.advance(plan, computed)
        self.speculator.learn(plan, computed)
        self.scheduler.pool.end_step()
        return outputs

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def check(self, request: Request) -> None:
        """Raises `RequestRefused` for what this model can never serve. Safe to call from any thread."""
        vocab_size = self.config.model.vocab_size
        sampling = request.sampling
        for param, token_ids in (
            ("prompt", request.prompt_token_ids),
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                raise RequestRefused(f"{param} holds a token outside the vocabulary of {vocab_size}", param=param)
        self.scheduler.check(request)

    def add(self, request: Request) -> None:
        """Raises `RequestRefused` or `QueueFull`."""
        self.check(request)
        self.scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> StepOutput | None:
        """Ends a request between two steps. None if it is unknown or has ended already."""
        return self.scheduler.abort(request_id, reason)

    def stop_early(self, request: Request, num_wanted: int) -> StepOutput | None:
        """Ends, between two steps, a request of whose tokens the first so many are an answer. None if it had ended."""
        return self.scheduler.stop_early(request, num_wanted)

    def expire(self, now: float) -> list[StepOutput]:
        """Ends, between two steps, what has passed its deadline. `now`: seconds since the epoch."""
        return self.scheduler.expire(now)

    def check_integrity(self) -> None:
        """Raises `IntegrityError`, and `stats` remembers it. For when the engine goes idle."""
        self._integrity_ok = False
        self._integrity_checks += 1
        self.scheduler.pool.check_integrity()
        self._integrity_ok = True

    def stats(self) -> EngineStats:
        """Safe to call from any thread; taken while a step is under way, it may be of two minds about one request."""
        scheduler, pool, counters = self.scheduler, self.scheduler.pool, self.scheduler.counters
        num_free, tier = pool.num_free, pool.tier
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_free_blocks=num_free,
            num_blocks=pool.num_blocks,
            kv_usage=1.0 - num_free / pool.num_blocks,
            prompt_tokens_total=counters.prompt_tokens,
            cached_prompt_tokens_total=counters.cached_prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            unwanted_tokens_total=counters.unwanted_tokens,
            prefix_cache_queries_total=counters.prefix_cache_queries,
            prefix_cache_hits_total=counters.prefix_cache_hits,
            preemptions_total=counters.preemptions,
            steps_given_up_total=self.interruption.num_interrupted,
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
            integrity_ok=self._integrity_ok,
            integrity_checks_total=self._integrity_checks,
        )
