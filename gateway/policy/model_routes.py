"""Policy models of routes: to another model or to some deployments, by conditions, time of day, shares and weights."""

from __future__ import annotations

import re
from datetime import UTC, datetime, time
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gateway.policy.fields import Frozen, Name, Names, Share, Weight, as_list, parts_of
from gateway.policy.traffic import Match

_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]|24):([0-5]\d)")
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES = 24 * 60
Days = Annotated[tuple[Day, ...], BeforeValidator(as_list, json_schema_input_type=Day | tuple[Day, ...])]


class ModelRoute(Frozen):
    """Sends matching calls to another model than the one that the client named, or to some of its deployments.

    The first matching route decides.
    """

    name: Name | None = Field(None, description="Name of the route in receipts, for comparisons.")
    match: Match = Field(description="Conditions on the call. {} matches all calls.")
    to: Name | dict[Name, Weight] | None = Field(
        None,
        description="Model that answers, by name; or several, each with its weight, as in {chat: 90, chat-next: 10}. "
        "The caller need not be allowed to use it. A `*` in the name stands for what the named model's `*` stands for. "
        "Default: the named model.",
    )
    deployments: Names | None = Field(
        None, min_length=1, description="Only these deployments of the model answer. Default: all of them."
    )
    share: Share = Field(
        1.0,
        description="Share of the matching conversations, as in 5%. With a share or weights, all calls of a "
        "conversation go the same way: it is known by its session or prompt_cache_key, else by the end user, else by "
        "its first messages.",
    )
    hours: str | None = Field(
        None, pattern=_HOURS.pattern, description="Time of day (UTC), as in 22:00-06:00. Default: always."
    )
    days: Days | None = Field(
        None, description="Days of the week (UTC), as in [sat, sun]. Hours past midnight belong to the day they begin."
    )

    @model_validator(mode="after")
    def _has_no_token_condition(self) -> Self:
        if self.match.min_prompt_tokens is not None:
            raise ValueError("match: min_prompt_tokens is not possible here, because the model says how tokens count")
        if not self.to and self.deployments is None:
            raise ValueError("must name a model in `to`, or `deployments`")
        if self.hours is not None and self._minutes[1] > DAY_MINUTES:
            raise ValueError("hours: a day ends at 24:00")
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the models to which the route sends calls. Empty if it keeps the named one."""
        return (self.to,) if isinstance(self.to, str) else tuple(self.to or ())

    @cached_property
    def ends(self) -> tuple[tuple[str, float], ...]:
        """For each target, where its part of the conversations ends, from 0 to 1. Empty without weights."""
        if self.to is None or isinstance(self.to, str):
            return ()
        return parts_of(self.to)

    @cached_property
    def _minutes(self) -> tuple[int, int]:
        """Begin and end of the hours, in minutes of a day. The end may be before the begin."""
        found = _HOURS.fullmatch(self.hours or "00:00-24:00")
        assert found is not None
        numbers = [int(number) for number in found.groups()]
        return numbers[0] * 60 + numbers[1], numbers[2] * 60 + numbers[3]

    def applies_at(self, seconds: float) -> bool:
        """Whether the hours and days include a time, in seconds since the epoch."""
        if self.hours is None and self.days is None:
            return True
        moment = datetime.fromtimestamp(seconds, UTC)
        minute, day = _minute_of(moment.time()), moment.weekday()
        begin, end = self._minutes
        if begin < end:
            return begin <= minute < end and self._has_day(day)
        return (minute >= begin and self._has_day(day)) or (minute < end and self._has_day((day - 1) % 7))

    def _has_day(self, day: int) -> bool:
        return self.days is None or DAYS[day] in self.days


def _minute_of(moment: time) -> int:
    return moment.hour * 60 + moment.minute
