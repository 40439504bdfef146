"""A runner for GPUs: steps are CUDA graphs, and the next decode step is launched before the current one is read.

    step n      launched   ~~~~~~~~~~ read
    step n + 1             launched   ~~~~~~~~~~ read        while the host reads step n, advances and sends its tokens

A plan is answered from the step that was launched early (lookahead.py), as far as that covers it. Other parts of the
plan, such as a prompt that has arrived meanwhile, are computed in addition. Decode steps are the graphs of graphs.py,
and all other steps of up to 2048 tokens those of prompt_graphs.py. Steps with LoRA adapters run as `Runner` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from backend.attention.base import AttentionMetadata
from backend.engine.batch import Batch
from backend.engine.graphs import CudaCapture, DecodeGraphs, GraphCapture, LaunchedStep
from backend.engine.paged_model import PagedModel
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.prompt_graphs import PromptGraphs
from backend.engine.resolved_config import NONE, TRITON, ResolvedConfig
from backend.engine.runner import Runner
from backend.engine.sampling_batch import NextToken
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
        return GraphRunner(config, CudaCapture(config.device), runner.model)
    return runner


class GraphRunner(Runner):
    """Runs steps as captured graphs, and steps of very many tokens as `Runner` does."""

    def __init__(self, config: ResolvedConfig, capture: GraphCapture, model: PagedModel | None = None) -> None:
        super().__init__(config, model)
        with torch.inference_mode():
            self._warm_up()
            self._warm_up_draws()
            self._prompts = PromptGraphs(config, self._model, capture)  # first: their steps need the most memory
            self._graphs = DecodeGraphs(config, self._model, capture, self._masks)
        self._launched: LaunchedStep | None = None  # the step that was launched early

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
        """As `Runner.run`, with decode steps as graphs. Launches `next_plan` before it waits for the current step."""
        self._use_device()
        launched, self._launched = self._launched, None
        if launched and launched.computes(plan):
            if next_plan:
                self._launched = self._graphs.launch(next_plan, launched)
            return launched.outputs()
        places = launched.places() if launched else {}
        covered = [
            place if launched and launched.covers(scheduled, place) else None
            for scheduled, place in ((s, places.get(s.request.request_id)) for s in plan)
        ]
        rest = [scheduled for scheduled, place in zip(plan, covered, strict=True) if place is None]
        if launched is None or len(rest) == len(plan):
            return self._run_uncovered(plan, is_interrupted, next_plan)
        others = self._run_prompts(rest, is_interrupted) if rest else []
        if others is None:
            return None
        if next_plan and not rest:
            self._launched = self._graphs.launch(next_plan, launched)
        outputs, computed = launched.outputs(), iter(others)
        return [next(computed) if place is None else outputs[place] for place in covered]

    def _run_uncovered(
        self,
        plan: Sequence[ScheduledRequest],
        is_interrupted: Callable[[], bool],
        next_plan: Sequence[ScheduledRequest],
    ) -> list[RunnerOutput] | None:
        """Runs a plan of which nothing was launched early."""
        if len(plan) > self._graphs.max_size or not all(s.is_decode and not s.request.adapter for s in plan):
            return self._run_prompts(plan, is_interrupted)
        if not self._graphs.fits(plan):
            return self._run_and_sample(plan)
        self._masks.begin_step()
        launched = self._graphs.launch(plan)
        if next_plan:
            self._launched = self._graphs.launch(next_plan, launched)
        outputs = launched.outputs()
        self._masks.end_step()
        return outputs

    def _run_prompts(
        self, plan: Sequence[ScheduledRequest], is_interrupted: Callable[[], bool]
    ) -> list[RunnerOutput] | None:
        """Runs a plan that contains prompts or drafts. A captured step is not interrupted after it was launched."""
        if not self._prompts.fits(plan) or any(scheduled.request.adapter for scheduled in plan):
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
        model, device = self._config.model, self._config.device
        # The longest prompt is included, because mixtures of experts use larger tiles for it.
        longest = min(self._config.max_num_batched_tokens, self._config.max_model_len)
        of_tiles = (rows // (model.num_heads // model.num_kv_heads) for rows in WARM_UP_ROWS)
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
