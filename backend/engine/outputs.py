"""What the engine returns for a request: tokens, log-probabilities, a vector, and why the request ended.

Plain values without tensors. `StepOutput` is the only type that leaves the engine while a request runs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypedDict


class FinishReason(enum.Enum):
    """Why a request ended. The values are those of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    DISPLACED = "displaced"  # removed from a full queue by a more urgent request
    ERROR = "error"


@dataclass(slots=True)
class Timing:
    """When a request reached each stage, in seconds since the epoch; 0.0 if it has not reached it."""

    arrived: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability (natural log) of a sampled token and of the most likely alternatives.

    Both are the model's own, before penalties, bias and temperature.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1  # of the token in the whole vocabulary; 1 is the most likely


@dataclass(slots=True)  # never changed; not frozen, because frozen ones take several times as long to make
class StepOutput:
    """The result of one engine step for one request. The last output of a request carries `finish_reason`.

    With `FinishReason.STOP`, the last of `new_token_ids` is the stop token itself: it is counted, but not shown.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    pooled: tuple[float, ...] | None = None  # the vector of a request with pooling
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # on the first output, if requested
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    timing: Timing | None = None  # on the last output only
    error: str | None = None


class NewOutput(TypedDict, total=False):
    """What a step adds to a request's output, with the field names of `StepOutput`."""

    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    pooled: tuple[float, ...] | None
    error: str | None
