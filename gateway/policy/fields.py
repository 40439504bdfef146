"""Types and parsers of values in a policy: durations (`10s`), counts (`64k`), rates (`600/1m`), shares and names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

COUNT_MAX = 10**15  # every storage counts this exactly; doubles, as in Redis' Lua, do up to 9 * 10**15

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_DURATION_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKMG]?)")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_COUNT_FACTOR = {"": 1, "k": 1_000, "K": 1_000, "M": 1_000_000, "G": 1_000_000_000}


def parse_duration(value: Any) -> Any:
    """Parse a duration into seconds: `10s`, `250ms`, `5m`, `24h`, `7d`. A number is returned unchanged."""
    if not isinstance(value, str | bool):  # Python takes a bool for a number; in a policy it is a mistake
        return value
    match = _DURATION.fullmatch(str(value).strip())
    if match is None:
        raise ValueError("a duration is a number and a unit, as in 250ms, 10s, 5m, 24h or 7d")
    return float(match[1]) * _DURATION_SECONDS[match[2]]


def parse_off_or_duration(value: Any) -> Any:
    """Parse `off` or a duration. Pydantic would report an error for each alternative; this reports one."""
    if value == "off":
        return value
    try:
        return parse_duration(value)
    except ValueError:
        raise ValueError("must be off or a duration, as in 30d") from None


def parse_count(value: Any) -> Any:
    """Parse a count into an integer: `600`, `64k`, `1.5M` (decimal multiples). A number is returned unchanged."""
    if not isinstance(value, str | bool):
        return value
    match = _COUNT.fullmatch(str(value).strip())
    count = Decimal(match[1]) * _COUNT_FACTOR[match[2]] if match else None
    if count is None or count != int(count):
        raise ValueError("a count is a whole number with an optional k, M or G, as in 600, 64k or 1M")
    return int(count)


def parse_rate(value: Any) -> Any:
    """Parse a rate into amount and period: `600/1m` is `{amount: 600, period: 60.0}`."""
    if not isinstance(value, str | int | float):
        return value
    amount, slash, period = str(value).partition("/")
    if not slash:
        raise ValueError("a rate is a count per duration, as in 600/1m or 1M/1m")
    return {"amount": parse_count(amount), "period": parse_duration(period)}


def parse_share(value: Any) -> Any:
    """Parse a share into a number: `10%` is 0.1. A number is returned unchanged."""
    if not isinstance(value, str | bool):
        return value
    match = _PERCENT.fullmatch(str(value).strip())
    if match is None:
        raise ValueError("a share is a percentage or a number from 0 to 1, as in 10% or 0.1")
    return float(match[1]) / 100


def as_list(value: Any) -> Any:
    """Wrap a single name into a list: `flex` means `[flex]`."""
    return [value] if isinstance(value, str) else value


_Duration = Annotated[str, Field(pattern=r"^\d+(\.\d+)?\s*(ms|s|m|h|d)$")]
_Multiple = Annotated[str, Field(pattern=r"^\d+(\.\d+)?[kKMG]?$")]
_Percent = Annotated[str, Field(pattern=r"^\d+(\.\d+)?\s*%$")]

Seconds = Annotated[
    float,
    BeforeValidator(parse_duration, json_schema_input_type=_Duration | Annotated[float, Field(gt=0)]),
    Field(gt=0, allow_inf_nan=False),
]
Count = Annotated[
    int,
    BeforeValidator(parse_count, json_schema_input_type=_Multiple | Annotated[int, Field(gt=0, le=COUNT_MAX)]),
    Field(gt=0, le=COUNT_MAX),
]
CountOrZero = Annotated[
    int,
    BeforeValidator(parse_count, json_schema_input_type=_Multiple | Annotated[int, Field(ge=0, le=COUNT_MAX)]),
    Field(ge=0, le=COUNT_MAX),
]
Share = Annotated[
    float,
    BeforeValidator(parse_share, json_schema_input_type=_Percent | Annotated[float, Field(ge=0, le=1)]),
    Field(ge=0, le=1),
]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def parts_of(weights: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """For each name, where its part of the whole ends, from 0 to 1."""
    total, end, ends = sum(weights.values()), 0.0, []
    for name, weight in weights.items():
        end += weight
        ends.append((name, end / total))
    return tuple(ends)


# No control characters: some names are sent in headers.
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Names = Annotated[tuple[Name, ...], BeforeValidator(as_list, json_schema_input_type=Name | tuple[Name, ...])]


class Frozen(BaseModel):
    """Base of all policy models: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Secret(Frozen):
    """Where a secret is, so that policy files contain no secrets: exactly one of `env`, `file` and `command`."""

    env: Name | None = Field(None, description="Name of the environment variable that holds the secret.")
    file: Name | None = Field(None, description="File that holds the secret. A changed file is read again.")
    command: tuple[Name, ...] | None = Field(
        None, min_length=1, description="Program and arguments that print the secret. It runs without a shell."
    )
    expires: Seconds | None = Field(None, description="How long the command's output is used. Default: for ever.")

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if sum(source is not None for source in (self.env, self.file, self.command)) != 1:
            raise ValueError("must have exactly one of env, file and command")
        if self.expires is not None and self.command is None:
            raise ValueError("expires: only the output of a command expires")
        return self

    @property
    def source(self) -> str:
        """The source in words, for messages."""
        if self.env is not None:
            return f"the environment variable {self.env}"
        return f"the file {self.file}" if self.file is not None else f"the command {' '.join(self.command or ())!r}"
