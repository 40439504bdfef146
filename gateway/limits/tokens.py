from __future__ import annotations

from abc import abstractmethod
from typing import Self

from gateway.core.errors import BadRequest, GatewayError, LimitReached
from gateway.core.times import go_duration
from gateway.limits.base import Estimate, Limit
from gateway.limits.headers import ratelimit_headers
from gateway.limits.scope import Scope
from gateway.policy import Limits, Rate
from gateway.storage.base import RateCharge, Rejection
from gateway.types import Usage

WHOLE = 1_000_000  # what a weight is a share of: sums stay integers


class _TokenRate(Limit[RateCharge]):
    """Tokens of some kind per time."""

    header_kind = "tokens"
    named: str  # as a message says it

    @classmethod
    def of(cls, limits: Limits, scope: Scope) -> Self | None:
        rate: Rate | None = getattr(limits, cls.kind)
        return None if rate is None else cls(scope, rate, limits.cached_input_weight)

    def __init__(self, scope: Scope, rate: Rate, cached_input_weight: float | None) -> None:
        super().__init__(scope)
        self._key = scope.key(self.kind)
        self._amount, self._period_seconds = rate.amount, rate.period
        self._free_share = WHOLE - round((1.0 if cached_input_weight is None else cached_input_weight) * WHOLE)

    def charge(self, estimate: Estimate) -> RateCharge:
        return RateCharge(self._key, self.needed(estimate), self._amount, self._period_seconds)

    @abstractmethod
    def needed(self, estimate: Estimate) -> int:
        """The most tokens that a call may use of this kind."""

    def _at_most_all(self, tokens: int, known: int, estimate: Estimate) -> int:
        """A guess of ours must not make a call impossible that may well be short: it ends where the limit does."""
        return max(known, min(tokens, self._amount)) if estimate.output_is_guessed else tokens

    def _weighed(self, usage: Usage) -> int:
        """Input tokens; cached ones count as the policy weighs them, rounded up."""
        return usage.input - usage.cache_read * self._free_share // WHOLE if self._free_share else usage.input

    def refuse(self, charge: RateCharge, refused: Rejection) -> GatewayError:
        allowed = f"{charge.limit} {self.named} per {go_duration(charge.period_seconds)}"
        if refused.retry_after_seconds is None:
            return BadRequest(
                f"this request may need {charge.amount} {self.named}, more than {self.scope} may ever use at once "
                f"({allowed}): shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        return LimitReached(
            f"rate limit reached: {self.scope} may use {allowed}; {refused.remaining} are left and this request "
            f"may need {charge.amount}; try again in {go_duration(refused.retry_after_seconds)}",
            retry_after_seconds=refused.retry_after_seconds,
            headers=ratelimit_headers("tokens", charge, refused.remaining),
        )


class Tokens(_TokenRate):
    """Input and output tokens together."""

    kind = "tokens"
    named = "tokens"

    def needed(self, estimate: Estimate) -> int:
        return self._at_most_all(estimate.input_tokens + estimate.output_tokens, estimate.input_tokens, estimate)

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return self._weighed(usage) + usage.output


class InputTokens(_TokenRate):
    kind = "input_tokens"
    named = "input tokens"

    def needed(self, estimate: Estimate) -> int:
        return estimate.input_tokens

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return self._weighed(usage)


class OutputTokens(_TokenRate):
    kind = "output_tokens"
    named = "output tokens"

    def needed(self, estimate: Estimate) -> int:
        return self._at_most_all(estimate.output_tokens, 0, estimate)

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return usage.output
