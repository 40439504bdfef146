"""A runner for GPUs: steps in which each request computes one token are whole graphs, and begin before they are due.

    step n      launched   ~~~~~~~~~~ read
    step n + 1             launched   ~~~~~~~~~~ read        while step n is read, advanced and its tokens are sent

What is due is either what was begun (foresight.py), or is computed now. A part of it that was not begun, such as a
prompt that has come meanwhile, is computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from backend.attention.base import AttentionMetadata
from backend.engine.batch import Batch
from backend.engine.config import NONE, TRITON, ResolvedConfig
from backend.engine.graphs import Capture, CudaCapture, DecodeGraphs, LaunchedStep
from backend.engine.lookahead import is_decode, is_plain
from backend.engine.paged_model import PagedModel
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.runner import Runner
from backend.engine.sampling_batch import NextToken

# Of the tiles that prompts are cut into: tokens times the heads that share a key.
WARM_UP_ROWS = (16, 32, 64, 128)


def create_runner(config: ResolvedConfig) -> Runner:
    """With graphs where a step can be captured: on a GPU, with attention that finds lengths there, and with experts, if
    any, that find their visitors there."""
    runner = Runner(config)
    is_on_gpu = config.device.type == "cuda" and config.attention == TRITON
    if is_on_gpu and not config.enforce_eager and not runner.model.needs_host_sync:
        return GraphRunner(config, CudaCapture(config.device), runner.model)
    return runner


class GraphRunner(Runner):
    def __init__(self, config: ResolvedConfig, capture: Capture, model: PagedModel | None = None) -> None:
        super().__init__(config, model)
        with torch.inference_mode():
            self._warm_up()
            self._decodes = DecodeGraphs(config, self._model, capture)
        self._begun: LaunchedStep | None = None  # ahead of its time

    @property
    def uses_lookahead(self) -> bool:
        return self._config.speculation == NONE  # whose guesses would be another step

    @torch.inference_mode()
    def run(
        self,
        plan: Sequence[ScheduledRequest],
        is_interrupted: Callable[[], bool],
        following: Sequence[ScheduledRequest] = (),
    ) -> list[RunnerOutput] | None:
        self._use_device()
        begun, self._begun = self._begun, None
        due = [begun is not None and begun.covers(s, self._decodes.slot(s)) for s in plan]
        rest = [scheduled for scheduled, is_due in zip(plan, due, strict=True) if not is_due]
        if len(rest) == len(plan):
            if len(plan) > self._decodes.max_size or not all(map(is_decode, plan)):
                return super().run(plan, is_interrupted)
            if not all(is_plain(scheduled.request) for scheduled in plan):
                return self._run_and_sample(plan)
            begun, rest = self._decodes.launch(plan), []
        assert begun is not None
        others = super().run(rest, is_interrupted) if rest else []
        if others is None:
            return None
        if following and not rest:
            self._begun = self._decodes.launch(following, begun)
        token_ids, computed = begun.token_ids(), iter(others)
        rows = [begun.rows.get(scheduled.request.request_id) for scheduled in plan]
        later = {id(scheduled) for scheduled in rest}
        return [
            next(computed) if row is None or id(scheduled) in later else RunnerOutput((token_ids[row.index],))
            for scheduled, row in zip(plan, rows, strict=True)
        ]

    def _warm_up(self) -> None:
        """Has the kernels for prompts compiled, so that nobody's first token waits for that. The cache, which it writes
        to, holds nothing yet."""
        model, device = self._config.model, self._config.device
        # The longest, too, for which experts have larger tiles.
        longest = min(self._config.max_num_batched_tokens, self._config.max_model_len)
        for length in (*(rows // (model.num_heads // model.num_kv_heads) for rows in WARM_UP_ROWS), longest):
            length = max(2, min(length, longest))
            places = torch.zeros(length, dtype=torch.int64, device=device)
            # Two tensors, as in a step: for an address that is no multiple of 16, kernels are compiled once more.
            lens = torch.tensor([length], dtype=torch.int32, device=device)
            starts = torch.tensor([0, length], dtype=torch.int32, device=device)
            num_blocks = -(-length // self._config.block_size)
            table = torch.zeros((1, num_blocks), dtype=torch.int32, device=device)
            metadata = AttentionMetadata((length,), (length,), lens, starts, table, self._config.block_size)
            self._model.forward(Batch(places, places, places, (), (), places[:0], metadata))

    def _run_and_sample(self, plan: Sequence[ScheduledRequest]) -> list[RunnerOutput]:
        """A decode whose tokens are chosen with more than a graph knows."""
        next_tokens = [NextToken(scheduled.request) for scheduled in plan]
        masks = self._masks.start([token.request for token in next_tokens])
        logits = self._decodes.logits(self._decodes.launch(plan), plan)
        return self._choose(next_tokens, logits, masks)
