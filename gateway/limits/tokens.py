from __future__ import annotations

from gateway.errors import BadRequest, GatewayError, LimitReached
from gateway.limits.base import Estimate, charge_key
from gateway.limits.headers import go_duration, ratelimit_headers
from gateway.storage.base import Charge, RateCharge, Refused
from gateway.types import Call, Usage


class Tokens:
    """Input and output tokens per time."""

    def charge(self, call: Call, estimate: Estimate) -> RateCharge | None:
        """A guess of ours must not make a call impossible that may well be short: it ends where the limit does."""
        rate = call.principal.tenant.limits.tokens
        if rate is None:
            return None
        amount = estimate.input_tokens + estimate.output_tokens
        if estimate.output_is_guessed:
            amount = max(estimate.input_tokens, min(amount, rate.amount))
        return RateCharge(charge_key(call.principal.tenant.name, "tokens"), amount, rate.amount, rate.period)

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return usage.total

    def refuse(self, call: Call, charge: Charge, refused: Refused) -> GatewayError:
        assert isinstance(charge, RateCharge)
        allowed = f"{charge.limit} tokens per {go_duration(charge.period_seconds)}"
        tenant = call.principal.tenant.name
        if refused.retry_after_seconds is None:
            return BadRequest(
                f"this request may need {charge.amount} tokens, more than tenant {tenant} may ever use at once "
                f"({allowed}): shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        return LimitReached(
            f"rate limit reached: tenant {tenant} may use {allowed}; {refused.remaining} are left and this request "
            f"may need {charge.amount}; try again in {go_duration(refused.retry_after_seconds)}",
            retry_after_seconds=refused.retry_after_seconds,
            headers=self.headers(charge, refused.remaining),
        )

    def headers(self, charge: Charge, remaining: int) -> dict[str, str]:
        assert isinstance(charge, RateCharge)
        return ratelimit_headers("tokens", charge, remaining)
