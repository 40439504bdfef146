"""What scheduler and runner exchange: which tokens of which request a step computes, and what came out.

A plan is a sequence of `ScheduledRequest`s. The runner answers it with one `RunnerOutput` for each, in the same order.

Minimal path 3 of 9. Next: scheduler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend.engine.outputs import TokenLogprob
from backend.engine.request import Request


@dataclass(slots=True)  # never changed; not frozen, because frozen ones take several times as long to make
class ScheduledRequest:
    """One request's part of a step: its tokens `[start, start + num_tokens)` are computed.

    Drafts (speculative decoding, off by default) follow its last known token. The model samples a token after each of
    them. A draft is accepted if it equals the token sampled at its position, and then its keys and values are valid.
    """

    request: Request
    start: int
    num_tokens: int  # includes the drafts
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def catches_up(self) -> bool:
        """Whether the step computes the last token, so that the next one can be sampled.

        In a step that is predicted (lookahead.py), the last token may be one that the running step samples.
        """
        return self.end - len(self.drafts) >= len(self.request.token_ids)

    @property
    def num_sampled(self) -> int:
        """How many tokens are sampled: one after the last known token, and one after each draft."""
        return min(self.num_tokens, 1 + len(self.drafts)) if self.catches_up else 0

    @property
    def is_decode(self) -> bool:
        """Whether this part computes one token and samples one, and needs nothing else."""
        request = self.request
        is_last = self.num_tokens == 1 and not self.drafts and self.start + 1 == len(request.token_ids)
        return is_last and (request.is_plain or not request.needs_prompt)

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute, drafts included."""
        known = self.request.token_ids
        return [*known[self.start : self.end], *self.drafts[max(0, self.start - len(known)) :]]


@dataclass(slots=True)
class RunnerOutput:
    """What the model computed for one `ScheduledRequest`."""

    token_ids: tuple[int, ...] = ()  # sampled after the last known token and after each draft; () before catching up
    logprobs: tuple[TokenLogprob, ...] = ()
    pooled: tuple[float, ...] = ()  # pooling: the vector; for the mean, the sum over the scheduled tokens
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt token that follows each scheduled token
    error: str | None = None  # the request cannot continue
    is_late: bool = False  # no token was sampled, because the grammar's mask was not ready


def count_accepted(drafts: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many drafts are accepted. `token_ids`: the token sampled in place of each draft, and one after the last."""
    return next((i for i, draft in enumerate(drafts) if draft != token_ids[i]), len(drafts))
