"""What is computed from the hidden states of a prompt: its vector, and the log-probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from backend.engine.outputs import TokenLogprob
from backend.engine.paged_model import PagedModel
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.pooling import Pooling
from backend.engine.sampler import score

NO_OUTPUT = RunnerOutput()
PROMPT_LOGPROBS_ROWS = 64  # rows of logits that are in memory at once while a prompt is scored


def compute_prompt_outputs(
    plan: Sequence[ScheduledRequest], hidden: Tensor, output_lens: Sequence[int], model: PagedModel
) -> list[RunnerOutput]:
    """For each part of the plan what its request needs of its prompt; NO_OUTPUT if it needs nothing.

    hidden: [W, hidden_size], of which each request has `output_lens` rows.
    """
    outputs = [NO_OUTPUT] * len(plan)
    if not any(scheduled.request.needs_prompt for scheduled in plan):
        return outputs
    rows: dict[int, int] = {}  # by place in the plan: the row that is the vector
    end = 0
    for i, (scheduled, num_rows) in enumerate(zip(plan, output_lens, strict=True)):
        begin, end = end, end + num_rows
        pooling = scheduled.request.pooling
        if pooling is Pooling.LAST and scheduled.catches_up:
            rows[i] = end - 1
        elif pooling is Pooling.CLS and scheduled.start == 0:
            rows[i] = begin
        elif pooling is Pooling.MEAN:
            outputs[i] = RunnerOutput(pooled=tuple(hidden[begin:end].float().sum(0).tolist()))
        elif scheduled.request.needs_all_hidden and pooling is None:
            outputs[i] = RunnerOutput(prompt_logprobs=tuple(_prompt_logprobs(scheduled, hidden[begin:end], model)))
    if rows:
        vectors = model.pooled(hidden[[*rows.values()]]).tolist()  # all at once, since a device is waited for
        for i, vector in zip(rows, vectors, strict=True):
            outputs[i] = RunnerOutput(pooled=tuple(vector))
    return outputs


def _prompt_logprobs(scheduled: ScheduledRequest, hidden: Tensor, model: PagedModel) -> Iterator[TokenLogprob]:
    """Log-probabilities of the prompt tokens that follow the scheduled ones.

    A few rows at a time: a row of logits is as wide as the vocabulary.
    """
    following = scheduled.request.prompt_token_ids[scheduled.start + 1 : scheduled.end + 1]
    count = scheduled.request.sampling.prompt_logprobs or 0
    for start in range(0, len(following), PROMPT_LOGPROBS_ROWS):
        token_ids = torch.tensor(following[start : start + PROMPT_LOGPROBS_ROWS], device=hidden.device)
        logits = model.logits(hidden[start : start + len(token_ids)])
        yield from score(logits, None, token_ids, [count] * len(token_ids), model.ops)


def joined(computed: RunnerOutput, sampled: RunnerOutput) -> RunnerOutput:
    """Adds one more sampled token to a request's result."""
    return replace(
        computed,
        token_ids=(*computed.token_ids, *sampled.token_ids),
        logprobs=computed.logprobs + sampled.logprobs,
        error=sampled.error,
        is_late=sampled.is_late,
    )
