"""Computes a plan: makes tensors of it, runs one forward pass of the model, and samples. Keeps no state of requests.

`run` calls make_batch (batch.py), PagedModel.forward (paged_model.py: the layers of models/ and layers/, which call
attention) and `sample` (sampler.py).

Minimal path 7 of 9. Next: ../attention/sdpa.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from backend.engine.batch import Batch, make_batch
from backend.engine.decode_batch import DecodeBatches
from backend.engine.kv_memory import KvMemory
from backend.engine.masks import MaskCollector
from backend.engine.paged_model import PagedModel, create_model
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.prompt_outputs import NO_OUTPUT, compute_prompt_outputs, joined
from backend.engine.resolved_config import ResolvedConfig
from backend.engine.sampler import sample
from backend.engine.sampling_batch import NextToken, SamplingBatch, make_sampling_batch
from backend.native.recording import StepInterrupted


class Runner:
    """Owns the model and its KV cache, on one device. Not thread-safe."""

    def __init__(self, config: ResolvedConfig, model: PagedModel | None = None) -> None:
        """Loads the model unless one is given. Raises `WeightsError` if the checkpoint does not fit the model."""
        torch.set_num_threads(config.num_threads)
        self._config = config
        self._use_device()
        self._model = model or create_model(config)
        self._masks = MaskCollector(config.model.vocab_size, config.device)
        self._decode_batches = DecodeBatches(config.block_size, config.device)  # optional: faster than make_batch

    @property
    def model(self) -> PagedModel:
        return self._model

    @model.setter
    def model(self, model: PagedModel) -> None:
        """Continues with another copy of the model, which has the same KV cache. Only between two steps."""
        self._model = model

    @property
    def kv(self) -> KvMemory:
        return self._model.kv

    @property
    def uses_lookahead(self) -> bool:
        """Whether `run` makes use of `next_plan`."""
        return False

    def use_idle_time(self) -> bool:
        """Prepares later steps, while no request is unfinished. Returns whether there may be more to prepare."""
        return False

    @torch.inference_mode()
    def run(
        self,
        plan: Sequence[ScheduledRequest],
        is_interrupted: Callable[[], bool],
        next_plan: Sequence[ScheduledRequest] = (),
    ) -> list[RunnerOutput] | None:
        """Computes a non-empty plan: one result for each of its entries, in its order.

        `is_interrupted` is called before the layers and between them. If it returns True, the step is abandoned and the
        result is None: some slots may have been written, and the repeated step writes them again.
        `next_plan` is the predicted next step, which a GPU may start early (lookahead.py).
        """
        self._use_device()
        device = self._config.device
        decodes = all(scheduled.is_decode for scheduled in plan)
        batch = self._decode_batches.make(plan) if decodes else make_batch(plan, self._config.block_size, device)
        self._masks.begin_step()
        try:
            if decodes and self._decode_batches.is_plain_greedy(batch):
                token_ids = self._model.next_tokens(batch, is_interrupted).tolist()
                return [RunnerOutput((token_id,)) for token_id in token_ids]
            hidden = self._model.forward(batch, is_interrupted)
        except StepInterrupted:
            return None
        if decodes:
            sampling = self._decode_batches.sampling(batch, self._config.model.vocab_size)
            scores = self._model.scores(hidden)
            if self._decode_batches.is_plain_or_penalised:  # nothing else is wanted
                chosen = self._model.ops.choose(scores, sampling.random, sampling.penalties)
                return [RunnerOutput((token_id,)) for token_id in chosen.tolist()]
            return self._sample(batch.next_tokens, scores, sampling)
        return self._outputs(plan, batch, hidden)

    def _outputs(self, plan: Sequence[ScheduledRequest], batch: Batch, hidden: Tensor) -> list[RunnerOutput]:
        """Samples. hidden: the final hidden states of the batch's output rows."""
        computed = compute_prompt_outputs(plan, hidden, batch.output_lens, self._model)
        if batch.sampled:
            is_all = len(batch.sampled) == len(hidden)
            hidden = hidden if is_all else hidden[batch.sampled_rows]
            if all(token.is_plain_greedy for token in batch.next_tokens):
                chosen = [RunnerOutput((token_id,)) for token_id in self._model.greedy_tokens(hidden).tolist()]
            else:
                chosen = self._sample(batch.next_tokens, self._model.scores(hidden))
            for i, sampled in zip(batch.sampled, chosen, strict=True):
                computed[i] = sampled if computed[i] is NO_OUTPUT else joined(computed[i], sampled)
        return computed

    def _use_device(self) -> None:
        """Selects the configured GPU for this thread; by default, kernels are launched on the first one."""
        if self._config.device.type == "cuda":
            torch.cuda.set_device(self._config.device)

    def _sample(
        self, tokens: Sequence[NextToken], logits: Tensor, sampling: SamplingBatch | None = None
    ) -> list[RunnerOutput]:
        """One token for each row of logits, which are in float32 or the model's dtype."""
        sampling = sampling or make_sampling_batch(tokens, self._config.model.vocab_size, self._config.device)
        allowed = self._masks.collect([token.request for token in tokens])
        errors, late = (allowed.errors, allowed.late) if allowed else ({}, frozenset[int]())
        outputs = [
            RunnerOutput((sampled.token_id,), sampled.logprobs, error=errors.get(row), is_late=row in late)
            for row, sampled in enumerate(sample(logits, sampling, allowed, self._model.ops))
        ]
        self._masks.end_step()
        return outputs
