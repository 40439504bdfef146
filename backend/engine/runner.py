"""From a plan to what was computed: one forward pass, and sampling. It remembers nothing about requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from backend.engine.batch import make_batch
from backend.engine.config import ResolvedConfig
from backend.engine.kv_memory import KvMemory
from backend.engine.lookahead import is_decode
from backend.engine.masks import AllowedTokens, MaskFiller
from backend.engine.paged_model import PagedModel
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.request import TokenLogprob
from backend.engine.sampler import sample, score
from backend.engine.sampling_batch import NextToken, make_sampling_batch
from backend.native.recording import StepInterrupted

NOTHING = RunnerOutput()
PROMPT_LOGPROBS_ROWS = 64  # rows of logits that are held at once to score a prompt


class Runner:
    """Loads a model that is not given. Raises `WeightsError` if the checkpoint does not fit it."""

    def __init__(self, config: ResolvedConfig, model: PagedModel | None = None) -> None:
        torch.set_num_threads(config.num_threads)
        self._config = config
        self._use_device()
        self._model = model or PagedModel(config)
        self._masks = MaskFiller(config.model.vocab_size, config.device)

    @property
    def model(self) -> PagedModel:
        return self._model

    @property
    def kv(self) -> KvMemory:
        return self._model.kv

    @property
    def uses_lookahead(self) -> bool:
        """Whether `run` does anything with what follows."""
        return False

    @torch.inference_mode()
    def run(
        self,
        plan: Sequence[ScheduledRequest],
        is_interrupted: Callable[[], bool],
        following: Sequence[ScheduledRequest] = (),
    ) -> list[RunnerOutput] | None:
        """Computes a non-empty plan: one result for each of its entries, in its order.

        `is_interrupted` is called before the layers and between them. If it returns True, the step is given up and the
        result is None: some slots may have been written, and the repeated step writes them again.
        `following` is the expected next plan, which a GPU may start early (lookahead.py).
        """
        self._use_device()
        device = self._config.device
        batch = make_batch(plan, self._config.block_size, device)
        masks = self._masks.start([row.request for row in batch.next_tokens])
        try:
            if all(map(is_decode, plan)) and all(token.is_plain_greedy for token in batch.next_tokens):
                return [
                    RunnerOutput((token_id,)) for token_id in self._model.next_tokens(batch, is_interrupted).tolist()
                ]
            hidden = self._model.forward(batch, is_interrupted)
        except StepInterrupted:
            if masks:
                masks.result()  # the walks must not change while they are asked
            return None

        computed = self._of_all_hidden(plan, hidden, batch.output_lens)
        if batch.sampled:
            is_all = len(batch.sampled) == len(hidden)
            hidden = hidden if is_all else hidden[batch.sampled_rows]
            if all(token.is_plain_greedy for token in batch.next_tokens):
                chosen = [RunnerOutput((token_id,)) for token_id in self._model.greedy_tokens(hidden).tolist()]
            else:
                chosen = self._choose(batch.next_tokens, self._model.logits(hidden), masks)
            for i, sampled in zip(batch.sampled, chosen, strict=True):
                computed[i] = sampled if computed[i] is NOTHING else _joined(computed[i], sampled)
        return computed

    def _use_device(self) -> None:
        """Of several GPUs, a thread uses the first until it is told otherwise, and kernels go where the thread is."""
        if self._config.device.type == "cuda":
            torch.cuda.set_device(self._config.device)

    def _choose(
        self, tokens: Sequence[NextToken], logits: Tensor, masks: Future[AllowedTokens] | None
    ) -> list[RunnerOutput]:
        """One token for each row of logits."""
        sampling = make_sampling_batch(tokens, self._config.model.vocab_size, self._config.device)
        allowed = masks.result() if masks else None
        errors = allowed.errors if allowed else {}
        return [
            RunnerOutput((sampled.token_id,), sampled.logprobs, error=errors.get(row))
            for row, sampled in enumerate(sample(logits, sampling, allowed, self._model.ops))
        ]

    def _of_all_hidden(
        self, plan: Sequence[ScheduledRequest], hidden: Tensor, output_lens: Sequence[int]
    ) -> list[RunnerOutput]:
        """What is made of all hidden states of those requests that need them all. hidden: [W, hidden_size]."""
        if not any(scheduled.request.needs_all_hidden for scheduled in plan):
            return [NOTHING] * len(plan)
        parts = torch.split(hidden, list(output_lens))
        return [self._of_hidden(scheduled, part) for scheduled, part in zip(plan, parts, strict=True)]

    def _of_hidden(self, scheduled: ScheduledRequest, hidden: Tensor) -> RunnerOutput:
        """hidden: [num_tokens, hidden_size]."""
        request = scheduled.request
        if request.pooling:
            return RunnerOutput(hidden_sum=tuple(hidden.float().sum(0).tolist()))
        if request.needs_all_hidden:
            return RunnerOutput(prompt_logprobs=tuple(self._prompt_logprobs(scheduled, hidden)))
        return NOTHING

    def _prompt_logprobs(self, scheduled: ScheduledRequest, hidden: Tensor) -> Iterator[TokenLogprob]:
        """Of the prompt's tokens that follow the scheduled ones, some rows at a time: a vocabulary is wide."""
        following = scheduled.request.prompt_token_ids[scheduled.start + 1 : scheduled.end + 1]
        count = scheduled.request.sampling.prompt_logprobs or 0
        for start in range(0, len(following), PROMPT_LOGPROBS_ROWS):
            token_ids = torch.tensor(following[start : start + PROMPT_LOGPROBS_ROWS], device=hidden.device)
            logits = self._model.logits(hidden[start : start + len(token_ids)])
            yield from score(logits, None, token_ids, [count] * len(token_ids), self._model.ops)


def _joined(computed: RunnerOutput, sampled: RunnerOutput) -> RunnerOutput:
    """What one request has of its hidden states and of its next tokens."""
    return replace(
        computed,
        token_ids=(*computed.token_ids, *sampled.token_ids),
        logprobs=computed.logprobs + sampled.logprobs,
        error=sampled.error,
    )
