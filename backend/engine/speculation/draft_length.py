"""How many tokens to draft for each request, so that speculation pays off: learned from cost and acceptance.

A plain step gives n requests one token each in `plain` seconds, so a token is worth plain / n. A drafted token costs
`extra` more seconds, drafting included, and is useful if it and all drafts before it are accepted. So the i-th draft of
a request pays off while rate ** i > extra * n / plain, where `rate` is the acceptance rate of that request's drafts.
Costs are measured per batch size. Rates are measured per request and start at the mean of all requests. If drafting
does not pay off for a request, it pauses and is tried again now and then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from backend.engine.request import Request

NEWEST_WEIGHT = 0.2  # of the newest step in a running mean
OUTLIER = 2.0  # a step counts for at most so many times the mean: a pause of the machine is not a step's cost
MIN_PLAIN_STEPS = 3  # before drafting is compared with them
PLAIN_EVERY = 64  # steps, at most, between two plain ones: contexts grow, and with them the cost of a step
HYSTERESIS = 1.25  # drafting resumes at so many times the rate at which it would just pay off
DECAY = 0.9  # of a request's older drafts, with each newer result
DECAY_OVERALL = 0.99  # the same for the drafts of all requests
FIRST_RATE, FIRST_WEIGHT = 0.5, 2.0  # the assumed rate before any result, and for how many drafts it counts
LEAST_RATE = 0.1  # required however cheap a draft seems: drafts are never free, and measurements are not exact
FIRST_PATIENCE, MAX_PATIENCE = 32, 512  # tokens until a paused request is tried again; doubles each time
TRIAL_DRAFTS = 3  # tokens that are drafted in such a trial


@dataclass(slots=True)
class _RunningMean:
    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        if self.count == 0:
            self.value = value
        elif self.value > 0.0:
            self.value += NEWEST_WEIGHT * (min(value, OUTLIER * self.value) - self.value)
        else:
            self.value = NEWEST_WEIGHT * value
        self.count += 1


@dataclass(slots=True)
class _StepCost:
    """Measured cost of steps of about the same batch size."""

    plain: _RunningMean = field(default_factory=_RunningMean)  # seconds of a step without drafts
    extra: _RunningMean = field(default_factory=_RunningMean)  # additional seconds per draft
    steps_since_plain: int = 0


@dataclass(slots=True)
class _Acceptance:
    """Acceptance rate of drafts, weighted towards the newer ones."""

    accepted: float
    tried: float

    @property
    def rate(self) -> float:
        return self.accepted / self.tried

    def add(self, num_drafts: int, num_accepted: int, decay: float) -> None:
        """Drafts after the first rejected one do not count as tried."""
        self.accepted = decay * self.accepted + num_accepted
        self.tried = decay * self.tried + min(num_drafts, num_accepted + 1)


@dataclass(slots=True)
class _DraftHistory:
    """The state of one request."""

    acceptance: _Acceptance
    is_paused: bool = False
    waited: int = 0
    patience: int = FIRST_PATIENCE


class AdaptiveDraftLength:
    """Chooses the number of drafts per request from measured cost and acceptance."""

    def __init__(self) -> None:
        self._costs: dict[int, _StepCost] = {}
        self._overall = _Acceptance(FIRST_RATE * FIRST_WEIGHT, FIRST_WEIGHT)
        self._histories: WeakKeyDictionary[Request, _DraftHistory] = WeakKeyDictionary()

    def num_drafts(self, requests: Sequence[Request], most: int) -> list[int]:
        """How many tokens, at most `most`, to draft for each request of a step in which each advances by one token."""
        cost = self._cost(len(requests))
        if cost.plain.count < MIN_PLAIN_STEPS or cost.steps_since_plain >= PLAIN_EVERY:
            return [0] * len(requests)
        least_rate = max(LEAST_RATE, cost.extra.value * len(requests) / cost.plain.value)
        return [min(most, self._num_drafts(self._history(request), least_rate, most)) for request in requests]

    def record_step(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """Records the duration of a step, drafting included."""
        cost = self._cost(num_requests)
        if num_drafts:
            cost.steps_since_plain += 1
            cost.extra.add(max(0.0, seconds - cost.plain.value) / num_drafts)
        else:
            cost.steps_since_plain = 0
            cost.plain.add(seconds)

    def record_drafts(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Records how many of a request's drafts in one step were accepted."""
        self._history(request).acceptance.add(num_drafts, num_accepted, DECAY)
        self._overall.add(num_drafts, num_accepted, DECAY_OVERALL)

    def _num_drafts(self, history: _DraftHistory, least_rate: float, most: int) -> int:
        rate = history.acceptance.rate
        if history.is_paused and rate <= HYSTERESIS * least_rate:
            history.waited += 1
            if history.waited < history.patience:
                return 0
            history.waited, history.patience = 0, min(MAX_PATIENCE, 2 * history.patience)
            return TRIAL_DRAFTS
        history.is_paused = rate <= least_rate
        if history.is_paused:
            history.waited = 0
            return 0
        history.patience = FIRST_PATIENCE
        return most if rate >= 1.0 else max(1, math.ceil(math.log(least_rate) / math.log(rate)) - 1)

    def _cost(self, num_requests: int) -> _StepCost:
        return self._costs.setdefault(num_requests.bit_length(), _StepCost())

    def _history(self, request: Request) -> _DraftHistory:
        history = self._histories.get(request)
        if history is None:
            acceptance = _Acceptance(self._overall.rate * FIRST_WEIGHT, FIRST_WEIGHT)
            history = self._histories[request] = _DraftHistory(acceptance)
        return history
