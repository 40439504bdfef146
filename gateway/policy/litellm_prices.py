"""Reads LiteLLM's public price file (`model_prices_and_context_window.json`) as prices of a policy.

The file maps a model's name to prices per token, as JSON numbers. They are read as decimals, so a price is exactly what
the file says. Prices with a suffix are those of a service tier (`_flex`, `_priority`), of batches (`_batches`) or above
a context length (`_above_200k_tokens`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from pydantic import ValidationError

from gateway.core.money import PRICE_DECIMALS
from gateway.policy.prices import Price

_TOKEN_PRICES = {
    "input_cost_per_token": "input",
    "cache_read_input_token_cost": "cached_input",
    "cache_creation_input_token_cost": "cache_write",
    "cache_creation_input_token_cost_above_1hr": "cache_write_1h",
    "output_cost_per_token": "output",
    "output_cost_per_reasoning_token": "reasoning",
    "input_cost_per_audio_token": "audio_input",
    "output_cost_per_audio_token": "audio_output",
}
_UNIT_PRICES = {
    "input_cost_per_request": "request",
    "output_cost_per_image": "image",
    "input_cost_per_second": "second",
    "output_cost_per_second": "second",
}
_SEARCH = ("search_context_cost_per_query", "search_context_size_medium")
_CONDITIONS: dict[str, dict[str, str]] = {  # by suffix, in the order in which prices must be listed
    "_flex": {"service_tier": "flex"},
    "_priority": {"service_tier": "priority"},
    "_batches": {"class": "batch"},
    "": {},
}
_ABOVE = re.compile(r"_above_(\d+)k_tokens$")
_MILLION = 10**6


class UnreadablePrices(Exception):
    """The file is not LiteLLM's price file, or lacks a model. The message says which."""


def read_file(content: bytes) -> dict[str, Mapping[str, Any]]:
    """Parse the file. Raises `UnreadablePrices`."""
    try:
        models = json.loads(content, parse_float=Decimal, parse_int=Decimal)
    except (ValueError, RecursionError) as error:
        raise UnreadablePrices(f"is not JSON: {error}") from None
    if not isinstance(models, dict) or not all(isinstance(entry, dict) for entry in models.values()):
        raise UnreadablePrices("must be an object with an object for each model")
    return {name: entry for name, entry in models.items() if name != "sample_spec"}


def prices_of(entry: Mapping[str, Any], **common: Any) -> tuple[list[Price], list[str]]:
    """Return a model's prices in the order of a policy, and the names of its costs that a policy cannot express.

    `common` has fields of all prices, for example `version`. Raises `UnreadablePrices`.
    """
    ignored = {name for name, value in entry.items() if "cost" in name and isinstance(value, Decimal) and value}
    prices = []
    for suffix, conditions in _CONDITIONS.items():
        steps = filter(None, map(_ABOVE.search, entry))
        for above in [*sorted({int(step[1]) for step in steps}, reverse=True), None]:
            found, used = _token_prices(entry, suffix, above)
            ignored -= used
            if "input" not in found and "output" not in found:
                continue
            if above is not None or suffix:  # what the file does not repeat is as for all calls
                found = {**_token_prices(entry, suffix if above else "", None)[0], **found}
            units, unit_names = _unit_prices(entry)
            ignored -= unit_names
            step = {} if above is None else {"above": above * 1_000}
            try:
                prices.append(Price.model_validate({"input": 0, **found, **units, **conditions, **step, **common}))
            except ValidationError as error:
                first = error.errors()[0]
                raise UnreadablePrices(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return prices, sorted(ignored)


def _token_prices(entry: Mapping[str, Any], suffix: str, above: int | None) -> tuple[dict[str, Decimal], set[str]]:
    end = suffix if above is None else f"_above_{above}k_tokens{suffix}"
    names = {f"{name}{end}": field for name, field in _TOKEN_PRICES.items()}
    found = {field: _amount(name, entry[name], _MILLION) for name, field in names.items() if _is_price(entry, name)}
    return found, names.keys() & entry.keys()


def _unit_prices(entry: Mapping[str, Any]) -> tuple[dict[str, Decimal], set[str]]:
    found = {field: _amount(name, entry[name], 1) for name, field in _UNIT_PRICES.items() if _is_price(entry, name)}
    search = entry.get(_SEARCH[0])
    if isinstance(search, dict) and _is_price(search, _SEARCH[1]):
        found["search"] = _amount(_SEARCH[0], search[_SEARCH[1]], 1)
    return found, _UNIT_PRICES.keys() & entry.keys()


def _is_price(entry: Mapping[str, Any], name: str) -> bool:
    return isinstance(entry.get(name), Decimal)


def _amount(name: str, value: Decimal, tokens: int) -> Decimal:
    amount = (value * tokens).normalize()
    exponent = amount.as_tuple().exponent
    if not amount.is_finite() or amount < 0 or (isinstance(exponent, int) and -exponent > PRICE_DECIMALS):
        raise UnreadablePrices(f"{name}: {value} is no price with at most {PRICE_DECIMALS} decimals per million tokens")
    return amount


def as_policy(prices: list[Price]) -> list[dict[str, Any]]:
    """Return prices as a policy file has them: only the fields that are set, with decimals as text."""
    return [dict(_fields(price)) for price in prices]


def _fields(price: Price) -> Iterator[tuple[str, Any]]:
    for name, value in price.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True).items():
        if isinstance(getattr(price, name, None), Decimal):
            value = f"{getattr(price, name):f}"
        yield name, value[0] if isinstance(value, list) and len(value) == 1 else value
