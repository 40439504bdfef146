"""What is computed from the hidden states of a whole prompt: embeddings, and the log-probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from backend.engine.outputs import TokenLogprob
from backend.engine.paged_model import PagedModel
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.sampler import score

NO_OUTPUT = RunnerOutput()
PROMPT_LOGPROBS_ROWS = 64  # rows of logits that are in memory at once while a prompt is scored


def compute_prompt_outputs(
    plan: Sequence[ScheduledRequest], hidden: Tensor, output_lens: Sequence[int], model: PagedModel
) -> list[RunnerOutput]:
    """For each part of the plan what its request needs all hidden states for; NO_OUTPUT if it does not.

    hidden: [W, hidden_size], of which each request has `output_lens` rows.
    """
    if not any(scheduled.request.needs_all_hidden for scheduled in plan):
        return [NO_OUTPUT] * len(plan)
    parts = torch.split(hidden, list(output_lens))
    return [_prompt_output(scheduled, part, model) for scheduled, part in zip(plan, parts, strict=True)]


def _prompt_output(scheduled: ScheduledRequest, hidden: Tensor, model: PagedModel) -> RunnerOutput:
    """hidden: [num_tokens, hidden_size]."""
    request = scheduled.request
    if request.pooling:
        return RunnerOutput(hidden_sum=tuple(hidden.float().sum(0).tolist()))
    if request.needs_all_hidden:
        return RunnerOutput(prompt_logprobs=tuple(_prompt_logprobs(scheduled, hidden, model)))
    return NO_OUTPUT


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
