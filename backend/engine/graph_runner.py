"""A runner for GPUs: steps are CUDA graphs, and the next step is launched before the current one is read.

    step n      launched   ~~~~~~~~~~ read
    step n + 1             launched   ~~~~~~~~~~ read        while the host reads step n, advances and sends its tokens

A plan is answered from the step that was launched early (lookahead.py), as far as that covers it. Other parts of the
plan, such as a prompt that has arrived meanwhile, are launched in addition, and the next step after them. So there may
be three steps in flight. Steps of decodes are the graphs of graphs.py, all other steps of up to 2048 tokens those of
prompt_graphs.py, and longer ones are launched kernel by kernel. Steps with LoRA adapters run as `Runner` runs them.

The host waits for a step before it launches the next one only if it must sample the step's tokens itself, or read its
hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from backend.attention.base import AttentionMetadata
from backend.engine.batch import Batch, make_batch
from backend.engine.graphs import CudaCapture, DecodeGraphs, GraphCapture
from backend.engine.launched_step import HostResults, LaunchedStep
from backend.engine.paged_model import PagedModel
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.prompt_graphs import PromptGraphs
from backend.engine.resolved_config import NONE, TRITON, ResolvedConfig
from backend.engine.runner import Runner
from backend.engine.sampling_batch import NextToken, random_rows
from backend.engine.step_inputs import OF_OTHER_PROMPTS, OF_PROMPTS, StepInputs
from backend.engine.token_arrays import with_sampled
from backend.native.recording import StepInterrupted, StopCheck, raise_if_interrupted
from backend.ops.sampling import RandomRows, SamplingFilters

# Rows of the tiles that prompts are divided into: tokens times the query heads that share a key/value head.
WARM_UP_ROWS = (16, 32, 64, 128)


def create_runner(config: ResolvedConfig) -> Runner:
    """A `GraphRunner` if decode steps can be captured, otherwise a plain `Runner`.

    Capturing needs a GPU, attention that reads sequence lengths there, a model that generates tokens, and no mixture of
    experts that syncs with the host.
    """
    runner = Runner(config)
    is_on_gpu = config.device.type == "cuda" and config.attention == TRITON and config.model.has_lm_head
    if is_on_gpu and not config.enforce_eager and not runner.model.needs_host_sync:
        return GraphRunner(config, runner.model.capture_of_ranks(CudaCapture(config.device)), runner.model)
    return runner


class GraphRunner(Runner):
    """Runs steps as captured graphs, and launches each before the one before it is read."""

    def __init__(self, config: ResolvedConfig, capture: GraphCapture, model: PagedModel | None = None) -> None:
        super().__init__(config, model)
        with torch.inference_mode():
            self._warm_up()
            self._warm_up_draws()
            self._inputs = StepInputs(config.max_num_seqs, config.device)
            self._results = HostResults(config.max_num_seqs, config.device)
            # First: their steps need the most memory.
            self._prompts = PromptGraphs(config, self._model, capture, self._inputs)
            self._graphs = DecodeGraphs(config, self._model, capture, self._masks, self._inputs, self._results)
        self._captured = (self._graphs.steps, self._prompts.steps)
        self._prompts_row = OF_PROMPTS  # of the inputs: where the last step with prompts has put its tokens
        self._early: LaunchedStep | None = None  # the step that was launched early

    @property
    def uses_lookahead(self) -> bool:
        return self._config.speculation == NONE  # with drafts, the next step would be another one

    @torch.inference_mode()
    def run(
        self,
        plan: Sequence[ScheduledRequest],
        is_interrupted: Callable[[], bool],
        next_plan: Sequence[ScheduledRequest] = (),
    ) -> list[RunnerOutput] | None:
        """As `Runner.run`, with steps as graphs. Launches `next_plan` before it waits for the current step.

        A captured step is not interrupted after it was launched.
        """
        self._use_device()
        early, self._early = self._early, None
        if due := [steps for steps in self._captured if steps.is_due]:
            next_plan = ()  # the next call begins without a step in flight
            if early is None:
                due[0].capture_next()
        if early and early.computes(plan):
            if self._is_launchable_early(next_plan):
                self._early = self._launch(next_plan, [early])
            return early.outputs()
        places = early.places() if early else {}
        covered = [
            place if early and early.covers(scheduled, place) else None
            for scheduled, place in ((s, places.get(s.request.request_id)) for s in plan)
        ]
        rest = [scheduled for scheduled, place in zip(plan, covered, strict=True) if place is None]
        launched = [early] if early and len(rest) < len(plan) else []
        has_early, others = bool(launched), list[RunnerOutput]()
        self._masks.begin_step()
        if not self._can_launch(rest, has_early=has_early):
            if (computed := self._run_and_wait(rest, is_interrupted, has_early=has_early)) is None:
                return None
            others, next_plan = computed, ()
        elif rest:
            try:
                launched.append(self._launch(rest, [], is_interrupted, has_early=has_early))
            except StepInterrupted:
                return None
        if self._is_launchable_early(next_plan):
            self._early = self._launch(next_plan, launched)
        outputs = [step.outputs() for step in launched]
        self._masks.end_step()
        remaining = iter(others or outputs[-1])
        return [next(remaining) if place is None else outputs[0][place] for place in covered]

    @torch.inference_mode()
    def use_idle_time(self) -> bool:
        """Captures a step of a size that was needed."""
        self._use_device()
        self._early = None  # at most, a step of requests that have ended
        return any(steps.capture_next() for steps in self._captured)

    def _can_launch(self, plan: Sequence[ScheduledRequest], *, has_early: bool) -> bool:
        """Whether the device can compute a plan without the host. `has_early`: as in `_launch`."""
        if self._is_for_decode_graphs(plan, has_early=has_early) and all(map(_is_captured_decode, plan)):
            return self._graphs.fits(plan)
        return all(map(_samples_on_device, plan))

    def _is_launchable_early(self, next_plan: Sequence[ScheduledRequest]) -> bool:
        """Whether a predicted step can be launched. If it has more decodes than a graph, all must be plain samples."""
        is_small = 0 < len(next_plan) <= self._graphs.max_size
        return is_small or (bool(next_plan) and all(scheduled.request.is_plain for scheduled in next_plan))

    def _is_for_decode_graphs(self, plan: Sequence[ScheduledRequest], *, has_early: bool) -> bool:
        return not has_early and len(plan) <= self._graphs.max_size and all(s.num_tokens == 1 for s in plan)

    def _launch(
        self,
        plan: Sequence[ScheduledRequest],
        previous: Sequence[LaunchedStep],
        is_interrupted: StopCheck | None = None,
        *,
        has_early: bool = False,
    ) -> LaunchedStep:
        """Launches a step whose unknown tokens are sampled by the previous ones.

        has_early: a step is in flight whose tokens the next one needs. If it is a step of decodes, another one would
        overwrite them.
        """
        raise_if_interrupted(is_interrupted)
        unknown = {request_id: place for step in previous for request_id, place in step.sampled_places().items()}
        if self._is_for_decode_graphs(plan, has_early=has_early):
            return self._graphs.launch(plan, unknown)
        if self._prompts.fits(plan):
            return self._sample_on_device(plan, *self._prompts.run(plan, unknown))
        batch = make_batch(plan, self._config.block_size, self._config.device, unknown)
        batch = replace(batch, input_ids=with_sampled(batch.input_ids, self._inputs.tokens))
        return self._sample_on_device(plan, batch, self._model.forward(batch, is_interrupted))

    def _sample_on_device(self, plan: Sequence[ScheduledRequest], batch: Batch, hidden: Tensor) -> LaunchedStep:
        """Samples the tokens of a step with prompts. hidden: the final hidden states of the batch's output rows."""
        self._prompts_row = OF_PROMPTS + OF_OTHER_PROMPTS - self._prompts_row
        chosen = self._inputs.row(self._prompts_row, len(batch.sampled))
        rows = [0] * len(plan)
        for row, place in enumerate(batch.sampled):
            rows[place] = row
        if batch.sampled:
            logits = self._model.logits(hidden if len(batch.sampled) == len(hidden) else hidden[batch.sampled_rows])
            tokens = [_token_after(plan[place]) for place in batch.sampled]
            random = random_rows(tokens, self._config.model.vocab_size, self._config.device)
            chosen.copy_(self._model.ops.choose(logits, random, None))
        place = self._inputs.place_of(self._prompts_row)
        return LaunchedStep(plan, rows, chosen, place, self._results.next())

    def _run_and_wait(
        self, plan: Sequence[ScheduledRequest], is_interrupted: Callable[[], bool], *, has_early: bool
    ) -> list[RunnerOutput] | None:
        """Runs a plan of which the host samples some tokens, or reads hidden states, or with adapters."""
        has_adapters = any(scheduled.request.adapter for scheduled in plan)
        if self._is_for_decode_graphs(plan, has_early=has_early) and all(map(_is_captured_decode, plan)):
            return self._run_and_sample(plan)
        if has_adapters or not self._prompts.fits(plan):
            return super().run(plan, is_interrupted)
        self._masks.begin_step()
        if is_interrupted():
            return None
        return self._outputs(plan, *self._prompts.run(plan))

    def _warm_up_draws(self) -> None:
        """Compiles the kernels that draw tokens of steps with prompts, with and without filters."""
        rows = torch.zeros(1, dtype=torch.int64, device=self._config.device)
        ones, logits = rows.float() + 1.0, rows.new_zeros((1, self._config.model.vocab_size), dtype=torch.float32)
        for filters in (None, SamplingFilters(rows, rows + 1, ones, ones)):
            self._model.ops.draw(logits, RandomRows(rows, ones, rows.double(), filters))

    def _warm_up(self) -> None:
        """Compiles the kernels for prompts, so that no first token waits for it. Writes to the cache, still unused."""
        device = self._config.device
        # The longest prompt is included, because mixtures of experts use larger tiles for it.
        longest = min(self._config.max_num_batched_tokens, self._config.max_model_len)
        of_tiles = (rows // self._model.queries_per_key for rows in WARM_UP_ROWS)
        for length in (*of_tiles, *self._model.warm_up_lengths(longest), longest):
            length = max(2, min(length, longest))
            zeros = torch.zeros(length, dtype=torch.int64, device=device)
            # Two tensors, as in a step: for an address that is not a multiple of 16, Triton compiles another kernel.
            lens = torch.tensor([length], dtype=torch.int32, device=device)
            starts = torch.tensor([0, length], dtype=torch.int32, device=device)
            num_blocks = -(-length // self._config.block_size)
            table = torch.zeros((1, num_blocks), dtype=torch.int32, device=device)
            metadata = AttentionMetadata((length,), (length,), lens, starts, table, self._config.block_size)
            self._model.forward(Batch(zeros, zeros, zeros, (), (), zeros[:0], metadata))

    def _run_and_sample(self, plan: Sequence[ScheduledRequest]) -> list[RunnerOutput]:
        """A decode step with more biases than graphs can sample: the graph gives logits, the sampler does the rest."""
        next_tokens = [NextToken(scheduled.request) for scheduled in plan]
        self._masks.begin_step()
        return self._sample(next_tokens, self._graphs.logits(plan))


def _samples_on_device(scheduled: ScheduledRequest) -> bool:
    """Whether the device can compute this part without the host: what it samples depends on logits alone."""
    request = scheduled.request
    if scheduled.drafts or request.needs_prompt or request.adapter:
        return False
    return not scheduled.catches_up or request.has_plain_sampling()


def _is_captured_decode(scheduled: ScheduledRequest) -> bool:
    return scheduled.is_decode and not scheduled.request.adapter


def _token_after(scheduled: ScheduledRequest) -> NextToken:
    """The token that a part samples. One before it may not be known yet: it counts as a draft."""
    return NextToken(scheduled.request, (0,) * (scheduled.end - len(scheduled.request.token_ids)))
