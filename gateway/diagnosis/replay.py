"""Replays sampled calls through cache models: how much would have been cached under another policy.

The journal has each prompt as a chain, and the chains of the other forms that it could have (`candidate_forms.py`). A
replay sends the chains, in the order of the calls, to one `CacheModel` per deployment, the model that routing and the
simulator use. A call goes to the deployment of its model that has most of its prompt cached, and among equals to the
one that answered it, as routing by prefix does if no deployment is busier than the others.

The sample is a share of the conversations, so a cache has that share of its capacity, but room for the longest prompt.
Where a chat template prints the date, which is not in the request, prompts of different days have no common prefix.

A replay knows neither load nor calls in flight, so it says what a policy changes, and not what a server will report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, tzinfo

from gateway.diagnosis.candidate_forms import chain_under
from gateway.diagnosis.journal import CallSummary
from gateway.diagnosis.prompt_chain import UNIT_BITS, UNIT_TOKENS, unit_count, units_of
from gateway.prefix.cache_model import CacheModel
from gateway.prefix.fingerprint import BLOCK_TOKENS

MAX_REPLAYED_UNITS = 500_000  # of 16 tokens, of all prompts, the latest calls first; they take some 20 MB
TEMPLATE_DATE = "template_date"
DAY_SHIFT = UNIT_BITS  # above the bits of a unit

Scope = tuple[str, str]  # tenant and model
Changes = Mapping[Scope, frozenset[str]]  # the transforms that a policy would add for each scope
NO_CHANGES: Changes = {}


class Replay:
    """The latest calls of the journal that have a chain, to be replayed under several policies."""

    def __init__(self, rows: Sequence[CallSummary]) -> None:
        in_order = sorted((row for row in rows if row.chain and row.deployment), key=lambda row: row.time)
        self.rows = in_order[_first_replayed(in_order) :]
        self._units: dict[str, list[int]] = {}  # of the chains that every replay needs
        self._deployments: dict[str, dict[str, None]] = {}  # that answered calls, by model
        self._capacities: dict[str, int] = {}  # in units, by deployment
        for row in self.rows:
            deployment = row.deployment or ""
            units = self._units[row.chain] = units_of(row.chain)
            self._deployments.setdefault(row.model, {})[deployment] = None
            share = int(row.cache_tokens * row.sample) // UNIT_TOKENS
            self._capacities[deployment] = max(self._capacities.get(deployment, 1), share, len(units))
        dated = [row for row in self.rows if row.broken is not None and row.broken.kind == TEMPLATE_DATE]
        self._dated = {row.deployment for row in dated}
        by_id = {row.call_id: row for row in rows}
        against = ((row, by_id[row.against]) for row in dated if row.against in by_id)
        # A template prints the date in the engine's time zone: UTC, unless a date changed within a day of UTC.
        self._zone = UTC if all(_day(row, UTC) != _day(earlier, UTC) for row, earlier in against) else None

    def cached_tokens(self, changes: Changes = NO_CHANGES) -> list[float]:
        """How many tokens of each call's prompt would have been cached, with `changes` added to the policy."""
        caches = {name: CacheModel(units * BLOCK_TOKENS) for name, units in self._capacities.items()}
        cached = []
        for row in self.rows:
            units = self._units_under(row, changes.get((row.tenant, row.model), frozenset()))
            best = row.deployment or ""
            matched = caches[best].match(units)
            for name in self._deployments[row.model]:
                if name != best and (other := caches[name].match(units)) > matched:
                    best, matched = name, other
            caches[best].add(units)
            as_sent = len(self._units[row.chain])  # the engine counted the tokens of this form
            cached.append(row.prompt_tokens * min(1.0, matched / as_sent) if as_sent else 0.0)
        return cached

    def _units_under(self, row: CallSummary, switches: frozenset[str]) -> list[int]:
        chain = chain_under(row.chain, row.forms, switches)
        units = self._units.get(chain) or units_of(chain)
        if row.deployment in self._dated and TEMPLATE_DATE not in switches:
            day = _day(row, self._zone).toordinal() << DAY_SHIFT
            return [unit + day for unit in units]
        return units


def _first_replayed(rows: Sequence[CallSummary]) -> int:
    """The index of the first of the last rows that together have at most `MAX_REPLAYED_UNITS`."""
    units_left, first = MAX_REPLAYED_UNITS, len(rows)
    for row in reversed(rows):
        units_left -= unit_count(row.chain)
        if units_left < 0:
            break
        first -= 1
    return first


def _day(row: CallSummary, zone: tzinfo | None) -> date:
    """The day of a call in a time zone; None: the local one."""
    return datetime.fromisoformat(row.time).astimezone(zone).date()
