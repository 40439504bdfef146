"""Learns how fast deployments compute prompts, from when their calls' first chunks arrive.

Engines compute several prompts in one step, so single prompts tell nothing: their first chunks may arrive together. So
the speed is measured over *busy periods*, from when the first prompt is sent to an idle deployment until every prompt
that was sent meanwhile has its first chunk:

    seconds = prompts * overhead_seconds + computed_tokens / tokens_per_second + context_tokens * context_seconds

`context_tokens` are, summed over the computed tokens, the tokens before each: attention reads them all, so that a token
at the end of a long prompt takes several times as long as one at its beginning. All lengths are therefore turned into
*work*, the number of tokens at the beginning of a prompt that take the same time:

    work = computed_tokens + attention * context_tokens          attention = context_seconds * tokens_per_second

The constants are fitted by least squares over the periods, weighted by 1 / seconds. Older periods count less: half
after `HALF_LIFE_SECONDS` of busy time. The policy's guess counts as one prompt of `GUESS_TOKENS`, for which attention
costs nothing. Attention counts only once it clearly explains what the two other terms cannot. One period that
contradicts the estimate by more than `SURPRISE_FACTOR` counts as if it contradicted it by that factor.

A deployment that is never idle is measured in parts of a period. What is partly computed when one ends makes it
inexact, so parts are as long as what was measured before, within `PART_SECONDS`: a rough speed soon, a good one later.

Deployments that the policy describes as equal share what they measure (`SpeedGroup`): the measurements of the others
count as up to `GROUP_SECONDS` more.

A period counts only if its computed tokens are known. They are what the responses report; without reports only prompts
count that were unknown to the cache model, since these were certainly computed. While the deployment computed prompts
of other gateways, too, it was faster than the period shows, so the period counts only if it raises the estimate.
"""

from __future__ import annotations

import math

import msgspec

from gateway.prefix.least_squares import NOTHING_OF_THREE, ThreeSums, three_terms

HALF_LIFE_SECONDS = 30.0
GUESS_TOKENS = 256
GROUP_SECONDS = 4.0
SURPRISE_FACTOR = 4.0
OVERHEAD_GUESS_SECONDS = 0.005  # of a prompt
OVERHEAD_MAX_SECONDS = 1.0
ATTENTION_MAX = 0.01  # with it, a token takes twice as long if 100 tokens are before it
PART_SECONDS = (1.0, 5.0)  # a longer busy period is measured in parts: short ones until as many seconds are measured
MIN_TOKENS = 64  # of a period; fewer measure the network rather than the engine
SECONDS_MIN = 0.001  # of a period
ERROR_WEIGHT = 0.1  # of the newest period, in the mean error


class BusyPeriod(msgspec.Struct, eq=False):
    """A time in which a deployment computed prompts without a pause."""

    since: float
    usable: bool = True  # every prompt in it streams, and was computed to its end
    shared: bool = False  # with prompts of other gateways
    is_whole: bool = True  # the deployment was idle before; False after a part that `PART_SECONDS` ended
    is_accounted: bool = True  # the computed tokens of all its prompts are known so far
    seconds: float = 0.0  # its length, once it has ended; 0 before
    prompts: int = 0  # whose first chunk arrived in it
    tokens: float = 0.0  # computed, as far as the prompts are accounted for
    context_tokens: float = 0.0  # before each of these, summed
    pending: int = 0  # prompts that are not yet accounted for


class SpeedGroup:
    """The measurements of deployments that the policy describes as equal."""

    def __init__(self) -> None:
        self.sums = NOTHING_OF_THREE  # of all members
        self.beginners: list[PrefillSpeed] = []  # members with few measurements of their own

    def add(self, member: PrefillSpeed) -> None:
        """Let a deployment share its measurements with the others from now on."""
        member.group = self
        self.sums = self.sums.plus(member.measured)
        self.beginners.append(member)

    def replace(self, before: ThreeSums, after: ThreeSums) -> None:
        """A member's measurements changed."""
        self.sums = self.sums.plus(before, -1.0).plus(after)
        for beginner in self.beginners:
            beginner.is_fitted = False
        self.beginners = [one for one in self.beginners if one.measured.seconds < GROUP_SECONDS]


class PrefillSpeed:
    """The speed of one deployment. Owned by the event loop."""

    def __init__(self, guess_tokens_per_second: float) -> None:
        """`guess_tokens_per_second` is the policy's."""
        self.fitted_tokens_per_second = float(guess_tokens_per_second)
        self.fitted_overhead_seconds = OVERHEAD_GUESS_SECONDS
        self.fitted_attention = 0.0  # what each token before another one adds to it, as a share of a token
        self.is_fitted = True  # False: equal deployments measured more since the constants were fitted
        self.measured = NOTHING_OF_THREE
        self.measured_at = -math.inf  # when the newest measured period ended
        self.error_seconds = 0.0  # by which periods differ from what the constants predict, as a mean
        self.group: SpeedGroup | None = None  # of equal deployments
        self._guess = three_terms(0, GUESS_TOKENS, 0, GUESS_TOKENS / guess_tokens_per_second).plus(
            three_terms(1, 0, 0, OVERHEAD_GUESS_SECONDS)
        )
        self._period: BusyPeriod | None = None

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens that the deployment computes in a second."""
        if not self.is_fitted:
            self._fit()
        return self.fitted_tokens_per_second

    @property
    def overhead_seconds(self) -> float:
        """What each prompt takes in addition."""
        if not self.is_fitted:
            self._fit()
        return self.fitted_overhead_seconds

    def fitted(self) -> PrefillSpeed:
        """This object, after its constants were fitted to all that was measured."""
        if not self.is_fitted:
            self._fit()
        return self

    def work(self, cached_tokens: float, prompt_tokens: float) -> float:
        """What it takes to compute the rest of a prompt, as a number of tokens at the beginning of one."""
        if not self.is_fitted:
            self._fit()
        return work_of(cached_tokens, prompt_tokens, self.fitted_attention)

    def slowness(self, other: PrefillSpeed) -> float | None:
        """How many times as long as at another deployment the prompts took that were measured here.

        None if one of the two has not been measured itself.
        """
        own, theirs = self.measured, other.measured
        if not (own.seconds and theirs.seconds):
            return None
        overhead_seconds, token_seconds, context_seconds = theirs.fit(ATTENTION_MAX)
        return own.seconds / (own.as_ * overhead_seconds + own.bs * token_seconds + own.cs * context_seconds)

    @property
    def is_measured(self) -> bool:
        """False: the speed is the policy's guess."""
        return self.measured is not NOTHING_OF_THREE or (self.group is not None and self.group.sums.seconds > 0)

    def _measured_seconds(self) -> float:
        """In how many seconds the speed was measured, here or at equal deployments; older ones count less."""
        return self.measured.seconds if self.group is None else self.group.sums.seconds

    # -- busy periods ----------------------------------------------------------------------------------------------

    def sent(self, now: float, *, usable: bool, shared: bool) -> None:
        """A prompt was sent. `usable` is False if the time until its first chunk does not tell when it was computed.

        `shared`: the deployment computes prompts of other gateways, too.
        """
        if self._period is None:
            self._period = BusyPeriod(now)
        self._period.usable &= usable
        self._period.shared |= shared

    def share(self) -> None:
        """The deployment computes prompts of other gateways now."""
        if self._period is not None:
            self._period.shared = True

    def spoil(self) -> None:
        """A prompt was not computed to its end, so the current period measures nothing."""
        if self._period is not None:
            self._period.usable = False

    def first_chunk(self, now: float, *, idle: bool, usable: bool, shared: bool) -> BusyPeriod | None:
        """A prompt was computed. Returns its busy period, to be given to `account`.

        `idle`: it was the last one, so the period ends. `usable` and `shared` are those of the prompts that are still
        computed.
        """
        period = self._period
        if period is None:
            return None
        period.prompts += 1
        period.pending += 1
        seconds = now - period.since
        if idle or (seconds > PART_SECONDS[0] and seconds > min(PART_SECONDS[1], self._measured_seconds())):
            period.seconds = seconds if seconds > SECONDS_MIN else SECONDS_MIN
            # Prompts that are still computed count for the next period, although it has only their last part.
            self._period = None if idle else BusyPeriod(now, usable, shared, is_whole=False)
            period.is_whole &= idle
        return period

    def account(self, period: BusyPeriod, prompt_tokens: float, computed_tokens: float | None) -> None:
        """So many of the last tokens of one of a period's prompts were computed; None if that is unknown."""
        period.pending -= 1
        if computed_tokens is None:
            period.is_accounted = False
        else:
            period.tokens += computed_tokens
            period.context_tokens += computed_tokens * (prompt_tokens - computed_tokens / 2)
        if period.seconds and not period.pending and period.usable and period.is_accounted:
            at_most = period.shared and self.is_measured
            if self.learn(period.prompts, period.tokens, period.seconds, period.context_tokens, at_most=at_most):
                self.measured_at = period.since + period.seconds

    def idle(self) -> None:
        """Nothing is computed any more, and the last prompt had no first chunk."""
        self._period = None

    # -- learning --------------------------------------------------------------------------------------------------

    def learn(
        self, prompts: int, tokens: float, seconds: float, context_tokens: float = 0.0, *, at_most: bool = False
    ) -> bool:
        """`prompts` prompts with `tokens` uncached tokens took `seconds` in all, or `at_most` so long.

        `context_tokens`: the tokens before each of these, summed. Returns False if this teaches nothing.
        """
        speed = self.fitted()
        work = tokens + speed.fitted_attention * context_tokens
        expected = prompts * speed.fitted_overhead_seconds + work / speed.fitted_tokens_per_second
        if tokens < MIN_TOKENS or (at_most and seconds > expected):
            return False
        seconds = min(max(seconds, expected / SURPRISE_FACTOR), expected * SURPRISE_FACTOR)
        self.error_seconds += ERROR_WEIGHT * (abs(seconds - expected) - self.error_seconds)
        before, kept = self.measured, 0.5 ** (seconds / HALF_LIFE_SECONDS)
        self.measured = three_terms(prompts, tokens, context_tokens, seconds).plus(before, kept)
        if self.group is not None:
            self.group.replace(before, self.measured)
        self.is_fitted = False
        return True

    def _fit(self) -> None:
        """Compute the constants from the guess, this deployment's measurements, and those of its equals."""
        sums = self._guess.plus(self.measured)
        if self.group is not None:
            others = self.group.sums.plus(self.measured, -1.0)
            if others.seconds > SECONDS_MIN:
                sums = sums.plus(others, min(1.0, GROUP_SECONDS / others.seconds))
        overhead_seconds, token_seconds, context_seconds = sums.fit(ATTENTION_MAX)
        if overhead_seconds > OVERHEAD_MAX_SECONDS:
            overhead_seconds, token_seconds, context_seconds = 0.0, sums.bs / sums.bb, 0.0
        self.fitted_overhead_seconds, self.fitted_tokens_per_second = overhead_seconds, 1 / token_seconds
        self.fitted_attention = context_seconds / token_seconds
        self.is_fitted = True


def work_of(cached_tokens: float, prompt_tokens: float, attention: float) -> float:
    """See `PrefillSpeed.work`. The tokens before each computed one are, on average, those before the middle one."""
    return (prompt_tokens - cached_tokens) * (1 + attention * (prompt_tokens + cached_tokens) / 2)
