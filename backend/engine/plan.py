"""What flows between scheduler and runner: who advances by how many tokens, and what was computed of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend.engine.request import Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part in a step: its tokens `[start, start + num_tokens)` are computed.

    Drafts are guesses at what follows its last token, and come behind it. The model says at each of them which token
    would have followed; as far as that is the draft, it was right, and what was computed for it stands.
    """

    request: Request
    start: int
    num_tokens: int  # with the drafts
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def catches_up(self) -> bool:
        """Whether the step gets to the last known token, so that the next one can be sampled."""
        return self.end - len(self.drafts) == len(self.request.token_ids)

    @property
    def num_sampled(self) -> int:
        return min(self.num_tokens, 1 + len(self.drafts)) if self.catches_up else 0

    @property
    def token_ids(self) -> list[int]:
        known = self.request.token_ids
        return [*known[self.start : self.end], *self.drafts[max(0, self.start - len(known)) :]]


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """What the model computed for one `ScheduledRequest`."""

    token_ids: tuple[int, ...] = ()  # what follows the last known token, and what follows each draft
    logprobs: tuple[TokenLogprob, ...] = ()
    hidden_sum: tuple[float, ...] = ()  # over the scheduled tokens
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens behind each of the scheduled ones
    error: str | None = None  # the request can not go on


def count_accepted(drafts: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many drafts came true. `token_ids`: what the model says in place of each, and behind the last."""
    return next((i for i, draft in enumerate(drafts) if draft != token_ids[i]), len(drafts))
