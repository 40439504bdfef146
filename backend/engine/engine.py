"""The engine: `step` advances all unfinished requests. Read this file first; each call in `step` is one file.

    schedule   scheduler.py    decides, on ints, which requests advance by how many tokens, in blocks of block_pool.py
    extend     speculation/    adds draft tokens to the plan; without a drafter, it returns the plan as it is
    run        runner.py       makes tensors of the plan (batch.py), runs the model, and samples (sampler.py)
    advance    scheduler.py    appends the new tokens and returns what they mean for each request

Minimal path 1 of 9. Next: request.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from backend.engine.block_pool import BlockPool
from backend.engine.cached_block import BlockListener
from backend.engine.config import EngineConfig
from backend.engine.engine_stats import EngineStats, collect_stats
from backend.engine.errors import RequestRefused
from backend.engine.graph_runner import create_runner
from backend.engine.host_tier import HostTier
from backend.engine.image_encoder import ImageEncoder
from backend.engine.interruption import Interruption, do_nothing
from backend.engine.kv_memory import HostSlots
from backend.engine.lookahead import plan_ahead
from backend.engine.outputs import FinishReason, StepOutput
from backend.engine.paged_model import PagedModel
from backend.engine.request import Request
from backend.engine.resolved_config import ResolvedConfig
from backend.engine.runner import Runner
from backend.engine.scheduler import Scheduler
from backend.engine.speculation import create_drafter
from backend.engine.speculation.speculator import Speculator
from backend.engine.thread_tuner import ThreadTuner, create_tuner
from backend.engine.waiting import end_failed, wait_for_input

INPUT_WAIT_SECONDS = 0.002  # while no request can advance; commands of other requests are executed after it


class Engine:
    """One model with its scheduler, block pool and runner. Not thread-safe, except for `check` and `stats`."""

    def __init__(
        self, config: ResolvedConfig, scheduler: Scheduler, runner: Runner, speculator: Speculator | None = None
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.runner = runner
        self.speculator = speculator or Speculator(scheduler)
        self.interruption = Interruption()
        self.images: ImageEncoder | None = None  # optional: for models that read images (image_encoder.py)
        self._tuner: ThreadTuner | None = None
        self._integrity_ok = True
        self._integrity_checks = 0

    @classmethod
    def load(cls, config: EngineConfig, listener: BlockListener | None = None) -> Engine:
        """Loads the weights and allocates the KV cache. Raises `ConfigError`, `UnsupportedModel` or `WeightsError`."""
        resolved = config.resolve()
        images = ImageEncoder(resolved) if resolved.model.vision else None
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
            whole_prompts=resolved.model.encoder is not None,
        )
        speculator = Speculator(scheduler, create_drafter(resolved), resolved.max_draft_tokens)
        engine = cls(resolved, scheduler, runner, speculator)
        engine._tuner = create_tuner(resolved, engine._use_threads)
        engine.images = images
        return engine

    def step(self, on_launch: Callable[[], None] = do_nothing) -> list[StepOutput]:
        """Advances all scheduled requests by one forward pass. Requires `has_unfinished`.

        `on_launch` is called when the step's kernels run or are about to: on a CPU at least once, before the result.
        """
        if self._tuner:
            self._tuner.begin_step(on_launch)  # optional: may choose another number of threads (thread_tuner.py)
        if self.images and self.images.take_failures():  # optional: requests with an image that cannot be encoded
            on_launch()
            return end_failed(self.scheduler)
        plan = self.speculator.extend(self.scheduler.schedule())
        if self.images:
            self.images.encode_next()  # optional: on a GPU, one image whose tokens a later step computes
        if not plan:  # optional: every running request waits for its grammar's mask or an image (waiting.py)
            on_launch()
            wait_for_input(self.scheduler.running, INPUT_WAIT_SECONDS)
            return []
        # Optional: on a GPU, the next step starts before this one is read (lookahead.py).
        next_plan = plan_ahead(self.scheduler, plan) if self.runner.uses_lookahead else ()
        computed = self.runner.run(plan, self.interruption.start_step(plan, on_launch), next_plan)
        self.runner.model.check()  # optional: raises if another process that computes the model has ended
        if computed is None:
            return []  # optional: interrupted by a more urgent request (interruption.py); no request has advanced
        outputs = self.scheduler.advance(plan, computed)
        self.speculator.learn(plan, computed)
        self.scheduler.pool.end_step()
        if self._tuner:
            self._tuner.end_step(plan)
        return outputs

    def use_kernels(self, config: ResolvedConfig, model: PagedModel) -> None:
        """Continues with the native kernels, between two steps: `model` is loaded for them and has the same KV cache.

        Running requests continue, since their keys and values are stored in the same form.
        """
        self.config = config
        self.runner.model = model
        self._tuner = create_tuner(config, self._use_threads)
        if self._tuner:
            self._tuner.choose_now("the native kernels compute")

    def _use_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.runner.model.set_num_threads(num_threads)
        self.speculator.set_num_threads(num_threads)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def check(self, request: Request) -> None:
        """Raises `RequestRefused` for a request that this model can never serve. Safe to call from any thread."""
        vocab_size = self.config.model.vocab_size
        if request.pooling is None and not self.config.model.has_lm_head:
            raise RequestRefused("this model has no output head; it only embeds or scores prompts", param="model")
        sampling = request.sampling
        for param, token_ids in (
            ("prompt", request.prompt_token_ids),
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                raise RequestRefused(f"{param} contains a token outside the vocabulary of {vocab_size}", param=param)
        self.scheduler.check(request)

    def add(self, request: Request) -> None:
        """Queues a request. Raises `RequestRefused` or `QueueFull`."""
        self.check(request)
        self.scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> StepOutput | None:
        """Ends a request between two steps. None if it is unknown or has ended already."""
        return self.scheduler.abort(request_id, reason)

    def stop_early(self, request: Request, num_wanted: int) -> StepOutput | None:
        """Ends a request between two steps, because its first `num_wanted` output tokens are the whole answer."""
        return self.scheduler.stop_early(request, num_wanted)

    def expire(self, now: float) -> list[StepOutput]:
        """Ends, between two steps, every request whose deadline has passed. `now`: seconds since the epoch."""
        return self.scheduler.expire(now)

    def check_integrity(self) -> None:
        """Checks the block pool when the engine is idle. Raises `IntegrityError`, and `stats` reports it."""
        self._integrity_ok = False
        self._integrity_checks += 1
        self.scheduler.pool.check_integrity()
        self._integrity_ok = True

    def close(self) -> None:
        """Ends the threads of optional parts. No request may be unfinished."""
        if self.images:
            self.images.close()

    def stats(self) -> EngineStats:
        """Safe to call from any thread."""
        return collect_stats(
            self.scheduler,
            steps_given_up_total=self.interruption.num_interrupted,
            integrity_ok=self._integrity_ok,
            integrity_checks_total=self._integrity_checks,
            max_loras=self.config.max_loras,
        )
