"""Proposes policy lines: the transforms that the replay shows to save tokens, for each tenant and model.

A cause names the transforms that may fix it. All of a tenant's and a model's are replayed together, since one change
may only help once another is made: a clock in the system prompt does not matter while the order of the tools before it
changes. Then each transform without which nothing would be lost is taken out again. What is left, and saves more than
`MIN_SAVED_TOKENS` and `MIN_SAVED_SHARE`, is proposed. Models of one tenant with the same change share a line.

A line is one of `canonicalise.exceptions`, of which the first that matches decides. So it contains what the policy has
for this tenant and model already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from gateway.diagnosis.breaks import MIN_LOST_TOKENS
from gateway.diagnosis.candidate_forms import MOVES, SAFE, SWITCHES
from gateway.diagnosis.journal import CallSummary
from gateway.diagnosis.replay import TEMPLATE_DATE, Changes, Replay, Scope
from gateway.policy import Policy
from gateway.policy.edit import exception_fields

MIN_SAVED_TOKENS = MIN_LOST_TOKENS  # of the sampled calls, by which a transform must be better than none
MIN_SAVED_SHARE = 0.01  # of what all transforms together save, below which one of them is dropped
MOVE_ADVANTAGE = 1.02  # by which `volatile_to_user` must save more than `volatile_to_end`, which changes less
MAX_SCOPES = 20  # that are replayed: those that lose most
DEFAULT_TEMPLATE_DATE = "26 Jul 2024"  # that Llama's own template prints without the current date

_MOVABLE_KINDS = frozenset({"date", "uuid", "request_id", "cwd", "clock"})
_SYSTEM_ROLES = ("system", "developer")
_ORDER = (*SWITCHES, TEMPLATE_DATE)


class Proposal(NamedTuple):
    """One exception for the policy, and what it saves according to the replay.

    Tokens and costs are scaled from the sample to all calls of the period. `saved_share` is of the prompt tokens of
    this tenant's calls for these models. `saved_cost` is by currency.
    """

    tenant: str
    models: tuple[str, ...]
    level: str
    opt_in: tuple[str, ...]
    template_date: str | None
    adds: frozenset[str]  # the transforms that the policy has not yet
    replayed_calls: int
    saved_tokens: float
    saved_share: float
    saved_cost: dict[str, Decimal]

    @property
    def exception(self) -> dict[str, Any]:
        """The exception, as data of the policy file."""
        return exception_fields(self.tenant, self.models, self.level, self.opt_in, self.template_date)


class FormInForce(NamedTuple):
    """A canonical form of a policy (`CanonicalForm`), or of a recorded call, whose template date is not recorded."""

    level: str
    opt_in: tuple[str, ...]
    template_date: str | None


def transforms_for(row: CallSummary) -> tuple[str, ...]:
    """The transforms that may fix a call's break; empty if none does."""
    broken = row.broken
    match broken.kind if broken is not None else "":
        case "noise":
            return (SAFE,)
        case "key_order":
            return (SAFE, "property_order")
        case "tool_order" | "chunk_order" | "template_date" as kind:
            return (kind,)
        case kind if kind in _MOVABLE_KINDS and broken is not None and broken.role in _SYSTEM_ROLES:
            return MOVES
    return ()


def propose(rows: Sequence[CallSummary], replay: Replay, policy: Policy | None) -> list[Proposal]:
    """The proposals for these calls, those that save most first.

    `policy` is the policy in force, which may have changed since the calls. Then the calls are replayed as it would
    change them, and what is proposed comes in addition. Without it, the calls' own policy is assumed.
    """
    scopes = _scopes(rows)
    forms = {scope: form for scope in scopes if (form := form_in_force(rows, scope, policy)) is not None}
    in_force = {scope: switched_on(form.level, form.opt_in) for scope, form in forms.items()}
    trial = _Trial(rows, replay, in_force)
    chosen: dict[tuple[str, str, tuple[str, ...], str | None, frozenset[str]], list[str]] = {}
    for scope, form in forms.items():
        wanted = scopes[scope] - in_force[scope]
        if MOVES[1] in in_force[scope]:
            wanted -= {MOVES[0]}  # it would move nothing that is not moved further
        if switches := _best(trial, scope, wanted):
            opt_in = (*form.opt_in, *(name for name in _ORDER if name in switches))
            level = "full" if opt_in else SAFE
            date = form.template_date or (DEFAULT_TEMPLATE_DATE if TEMPLATE_DATE in opt_in else None)
            adds = switches | (wanted & {SAFE})  # every other transform implies level `safe`
            chosen.setdefault((scope[0], level, opt_in, date, adds), []).append(scope[1])
    proposals = [
        Proposal(tenant, tuple(sorted(models)), level, opt_in, date, adds, *trial.outcome(tenant, models, adds))
        for (tenant, level, opt_in, date, adds), models in chosen.items()
    ]
    return sorted(proposals, key=lambda proposal: -proposal.saved_tokens)


class _Trial:
    """Replays of the calls under the policy in force, and under changes of it."""

    def __init__(self, rows: Sequence[CallSummary], replay: Replay, in_force: Changes) -> None:
        self._rows = rows
        self._replay = replay
        self._in_force = in_force
        self._baseline = replay.cached_tokens(in_force)

    def _savings(self, scopes: Iterable[Scope], switches: frozenset[str]) -> list[float]:
        """How many tokens these transforms save in each replayed call.

        What the deployment reported as cached cannot be saved any more, even if the replay did not expect it.
        """
        changes = {scope: self._in_force[scope] | switches for scope in scopes}
        changed = self._replay.cached_tokens({**self._in_force, **changes})
        return [
            min(after - before, max(0.0, after - row.cached_tokens)) if row.exact else after - before
            for row, before, after in zip(self._replay.rows, self._baseline, changed, strict=True)
        ]

    def saved(self, scope: Scope, switches: frozenset[str]) -> float:
        """How many tokens of the replayed calls these transforms save."""
        return sum(self._savings([scope], switches)) if switches else 0.0

    def outcome(
        self, tenant: str, models: Sequence[str], switches: frozenset[str]
    ) -> tuple[int, float, float, dict[str, Decimal]]:
        """The last fields of a `Proposal`: calls, and what is saved. Scaled to all calls of the period."""
        savings = self._savings([(tenant, model) for model in models], switches)
        all_tokens, replayed_tokens = (_prompt_tokens(rows, tenant, models) for rows in (self._rows, self._replay.rows))
        scale = all_tokens / replayed_tokens if replayed_tokens else 1.0
        saved, costs = 0.0, dict[str, Decimal]()
        for row, saved_here in zip(self._replay.rows, savings, strict=True):
            tokens = saved_here / row.sample * scale  # of others' calls, too, whose prefixes may stay longer
            saved += tokens
            if row.miss_cost is not None and row.currency is not None:
                costs[row.currency] = costs.get(row.currency, Decimal()) + Decimal(row.miss_cost) * Decimal(tokens)
        calls = sum(row.tenant == tenant and row.model in models for row in self._replay.rows)
        return calls, saved, saved / all_tokens if all_tokens else 0.0, costs


def _scopes(rows: Iterable[CallSummary]) -> dict[Scope, frozenset[str]]:
    """The transforms that may fix a break, by tenant and model. Those with most lost tokens, most first.

    Besides those of the causes that were found, all that change these prompts: a cause hides those behind it.
    """
    wanted: dict[Scope, set[str]] = {}
    changing: dict[Scope, set[str]] = {}
    lost: dict[Scope, float] = {}
    for row in rows:
        scope = row.tenant, row.model
        changing.setdefault(scope, set()).update(name for name in SWITCHES if name in row.forms)
        if row.broken is not None and (transforms := transforms_for(row)):
            wanted.setdefault(scope, set()).update(transforms)
            lost[scope] = lost.get(scope, 0.0) + row.broken.lost_tokens / row.sample
    most = sorted(wanted, key=lambda scope: -lost[scope])[:MAX_SCOPES]
    return {scope: frozenset(wanted[scope] | changing[scope]) for scope in most}


def form_in_force(rows: Sequence[CallSummary], scope: Scope, policy: Policy | None) -> FormInForce | None:
    """The canonical form of a scope; None if the policy has no such tenant or model any more."""
    tenant, model = scope
    if policy is None:
        last = next(row for row in reversed(rows) if (row.tenant, row.model) == scope)
        return FormInForce(last.level, last.opt_in, None)
    if tenant not in policy.tenants_by_name or model not in {each.name for each in policy.models}:
        return None
    form = policy.canonicalise.form_for(tenant, model)
    return FormInForce(form.level, form.opt_in, form.template_date)


def switched_on(level: str, opt_in: tuple[str, ...]) -> frozenset[str]:
    """The transforms that a canonical form has already, as far as they may be proposed."""
    return frozenset(opt_in if level == "off" else (SAFE, *opt_in))


def _best(trial: _Trial, scope: Scope, wanted: frozenset[str]) -> frozenset[str]:
    """Those of the wanted transforms that save tokens; empty if none does."""
    others = wanted.difference(MOVES)
    variants = [others | {move} for move in MOVES if move in wanted] or [others]
    savings = [trial.saved(scope, switches) for switches in variants]
    best, most = variants[0], savings[0]
    if len(variants) > 1 and savings[1] > most * MOVE_ADVANTAGE:
        best, most = variants[1], savings[1]
    enough = max(MIN_SAVED_TOKENS, most * MIN_SAVED_SHARE)
    for switch in sorted(best):
        remaining = trial.saved(scope, best - {switch})
        if remaining > most - enough:
            best, most = best - {switch}, max(most, remaining)
    return best


def _prompt_tokens(rows: Iterable[CallSummary], tenant: str, models: Sequence[str]) -> float:
    """The prompt tokens of a tenant's calls for these models, scaled from the sample to all calls."""
    return sum(row.prompt_tokens / row.sample for row in rows if row.tenant == tenant and row.model in models)


def proposals_for(proposals: Sequence[Proposal], rows: Sequence[CallSummary]) -> list[int]:
    """The indices of the proposals that fix the breaks of these calls."""
    fixes: Mapping[Scope, int] = {
        (proposal.tenant, model): number for number, proposal in enumerate(proposals) for model in proposal.models
    }
    found = {
        number
        for row in rows
        if (number := fixes.get((row.tenant, row.model), -1)) >= 0
        and not proposals[number].adds.isdisjoint(transforms_for(row))
    }
    return sorted(found)
