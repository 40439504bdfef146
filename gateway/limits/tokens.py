"""Token limits: the number of input tokens, of output tokens, or of both together per period."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

from gateway.core.errors import BadRequest, GatewayError, LimitReached
from gateway.core.times import go_duration
from gateway.limits.base import CallEstimate, Limit
from gateway.limits.headers import ratelimit_headers
from gateway.limits.scope import Scope
from gateway.policy import Limits, Rate
from gateway.storage.base import RateCharge, Rejection
from gateway.types import Usage

WEIGHT_SCALE = 1_000_000  # weights are integers in units of 1/WEIGHT_SCALE, so that sums are exact


class _TokenRate(Limit[RateCharge]):
    """Base class of the limits of tokens of one kind per period."""

    header_kind = "tokens"
    label: str  # the kind's name in error messages

    @classmethod
    def from_policy(cls, limits: Limits, scope: Scope) -> Self | None:
        rate: Rate | None = getattr(limits, cls.kind)
        return None if rate is None else cls(scope, rate, limits.cached_input_weight)

    def __init__(self, scope: Scope, rate: Rate, cached_input_weight: float | None) -> None:
        super().__init__(scope)
        self._key = scope.key(self.kind)
        self._amount, self._period_seconds = rate.amount, rate.period
        weight = 1.0 if cached_input_weight is None else cached_input_weight
        self._discount = WEIGHT_SCALE - round(weight * WEIGHT_SCALE)

    def charge(self, estimate: CallEstimate) -> RateCharge:
        return RateCharge(self._key, self.needed(estimate), self._amount, self._period_seconds)

    @abstractmethod
    def needed(self, estimate: CallEstimate) -> int:
        """Return the most tokens of this kind that the call may use."""

    def _capped(self, tokens: int, known: int, estimate: CallEstimate) -> int:
        """Return `tokens`, but at most the limit if the output length is a guess.

        The actual answer may be short, so a guess above the limit must not reject the call. `known` is the number of
        tokens that are not a guess.
        """
        return max(known, min(tokens, self._amount)) if estimate.output_is_guessed else tokens

    def _weighed(self, usage: Usage) -> int:
        """Return the input tokens, with cached tokens multiplied by the policy's weight. Rounded up."""
        return usage.input - usage.cache_read * self._discount // WEIGHT_SCALE if self._discount else usage.input

    def rejection(self, charge: RateCharge, rejected: Rejection) -> GatewayError:
        allowed = f"{charge.limit} {self.label} per {go_duration(charge.period_seconds)}"
        if rejected.retry_after_seconds is None:
            return BadRequest(
                f"this request may need {charge.amount} {self.label}, more than {self.scope} may ever use at once "
                f"({allowed}): shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        return LimitReached(
            f"rate limit reached: {self.scope} may use {allowed}; {rejected.remaining} are left and this request "
            f"may need {charge.amount}; try again in {go_duration(rejected.retry_after_seconds)}",
            retry_after_seconds=rejected.retry_after_seconds,
            headers=ratelimit_headers("tokens", charge, rejected.remaining),
        )


class TokenLimit(_TokenRate):
    """Limits input and output tokens together. Cached input tokens are multiplied by their weight."""

    kind = "tokens"
    label = "tokens"

    def needed(self, estimate: CallEstimate) -> int:
        return self._capped(estimate.input_tokens + estimate.output_tokens, estimate.input_tokens, estimate)

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return self._weighed(usage) + usage.output


class InputTokenLimit(_TokenRate):
    """Limits input tokens. Cached tokens are multiplied by their weight."""

    kind = "input_tokens"
    label = "input tokens"

    def needed(self, estimate: CallEstimate) -> int:
        return estimate.input_tokens

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return self._weighed(usage)


class OutputTokenLimit(_TokenRate):
    """Limits output tokens."""

    kind = "output_tokens"
    label = "output tokens"

    def needed(self, estimate: CallEstimate) -> int:
        return self._capped(estimate.output_tokens, 0, estimate)

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return usage.output
