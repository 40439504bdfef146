"""Whether guessing pays, by what it has cost and brought so far.

A plain step gives n requests a token each in `plain` seconds, so that a token is worth plain / n. A drafted token costs
`extra` seconds more, drafting included, and is of use if it comes true, and all before it. So the i-th draft of a
request pays while rate ** i > extra * n / plain, where `rate` is how often that request's drafts come true. Costs are
measured per size of the batch, rates per request, which begins with what is usual. Where guesses do not pay they are
tried again now and then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from backend.engine.request import Request

NEWEST_WEIGHT = 0.2  # of the newest step in a running mean
OUTLIER = 2.0  # times the mean is the most that a step counts for: a pause of the machine is no step's cost
MIN_PLAIN_STEPS = 3  # before anything is compared with them
PLAIN_EVERY = 64  # steps, at the most, between two plain ones: contexts grow, and with them the cost of a step
HYSTERESIS = 1.25  # times the rate at which it would just pay, before guessing is taken up again
FORGETTING = 0.9  # what a request's drafts count for with each time that there are newer ones
FORGETTING_USUAL = 0.99  # the same for those of all requests
FIRST_RATE, FIRST_WEIGHT = 0.5, 2.0  # before anything was seen, and for how many drafts that counts
LEAST_RATE = 0.1  # however cheap a draft seems: it is never free, and measuring is not exact
FIRST_PATIENCE, MAX_PATIENCE = 32, 512  # tokens until a request that does not pay is tried again; doubles each time
TRIAL = 3  # tokens that it is tried again with


@dataclass(slots=True)
class _Mean:
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
class _Cost:
    """Of steps with about as many requests."""

    plain: _Mean = field(default_factory=_Mean)  # seconds of a step without drafts
    extra: _Mean = field(default_factory=_Mean)  # seconds for each draft
    since_plain: int = 0


@dataclass(slots=True)
class _Luck:
    """How often drafts come true, the newer ones above all."""

    num_accepted: float
    tried: float

    @property
    def rate(self) -> float:
        return self.num_accepted / self.tried

    def add(self, num_drafts: int, num_confirmed: int, forgetting: float) -> None:
        """What stands behind the first wrong one has not been tried."""
        self.num_accepted = forgetting * self.num_accepted + num_confirmed
        self.tried = forgetting * self.tried + min(num_drafts, num_confirmed + 1)


@dataclass(slots=True)
class _Record:
    """Of one request's drafts."""

    luck: _Luck
    is_paused: bool = False
    waited: int = 0
    patience: int = FIRST_PATIENCE


class AdaptiveDraftLength:
    def __init__(self) -> None:
        self._costs: dict[int, _Cost] = {}
        self._usual = _Luck(FIRST_RATE * FIRST_WEIGHT, FIRST_WEIGHT)
        self._records: WeakKeyDictionary[Request, _Record] = WeakKeyDictionary()

    def num_drafts(self, requests: Sequence[Request], most: int) -> list[int]:
        """How many tokens to draft for each request, in a step in which these advance by a token each."""
        cost = self._cost(len(requests))
        if cost.plain.count < MIN_PLAIN_STEPS or cost.since_plain >= PLAIN_EVERY:
            return [0] * len(requests)
        least_rate = max(LEAST_RATE, cost.extra.value * len(requests) / cost.plain.value)
        return [min(most, self._num_drafts(self._record(request), least_rate, most)) for request in requests]

    def record_step(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        cost = self._cost(num_requests)
        if num_drafts:
            cost.since_plain += 1
            cost.extra.add(max(0.0, seconds - cost.plain.value) / num_drafts)
        else:
            cost.since_plain = 0
            cost.plain.add(seconds)

    def record_drafts(self, request: Request, num_drafts: int, num_confirmed: int) -> None:
        self._record(request).luck.add(num_drafts, num_confirmed, FORGETTING)
        self._usual.add(num_drafts, num_confirmed, FORGETTING_USUAL)

    def _num_drafts(self, record: _Record, least_rate: float, most: int) -> int:
        rate = record.luck.rate
        if record.is_paused and rate <= HYSTERESIS * least_rate:
            record.waited += 1
            if record.waited < record.patience:
                return 0
            record.waited, record.patience = 0, min(MAX_PATIENCE, 2 * record.patience)
            return TRIAL
        record.is_paused = rate <= least_rate
        if record.is_paused:
            record.waited = 0
            return 0
        record.patience = FIRST_PATIENCE
        return most if rate >= 1.0 else max(1, math.ceil(math.log(least_rate) / math.log(rate)) - 1)

    def _cost(self, num_requests: int) -> _Cost:
        return self._costs.setdefault(num_requests.bit_length(), _Cost())

    def _record(self, request: Request) -> _Record:
        record = self._records.get(request)
        if record is None:
            record = self._records[request] = _Record(_Luck(self._usual.rate * FIRST_WEIGHT, FIRST_WEIGHT))
        return record
