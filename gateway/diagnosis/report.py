"""Sums up the journal: what broken prefixes cost, most expensive first, and the policy line that fixes each of them."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, NamedTuple

from gateway.diagnosis.journal import CallSummary

ADVICE_BY_KIND = {  # for kinds of breaks that no policy line fixes
    "tool_set": "keep the list of tools unchanged within a conversation, and append new tools at its end",
    "dropped_reasoning": "return the assistant's reasoning unchanged (`reasoning_content`), or use a template that "
    "omits it from every turn",
    "history_rewritten": "append to a conversation, and do not change earlier messages",
    "history_cut": "shorten a conversation rarely and by many messages, not by one message per turn",
    "text": "put changing text behind stable text: at the end of the prompt, or in the last message",
    "evicted": "enlarge the cache, or add deployments to the model; see x-warmpath-cached-tokens of single calls",
}
_MOVABLE_KINDS = frozenset({"date", "uuid", "request_id", "cwd", "clock"})


class PrefixFinding(NamedTuple):
    """One way in which one application's prompts break. Sums are scaled from the sample to all calls."""

    tenant: str
    key_id: str
    agent: str
    model: str
    place: str
    kind: str
    calls: float
    lost_tokens: float
    lost_seconds: float
    lost_cost: Decimal | None
    currency: str | None
    within: bool  # most of the breaks are between turns of one conversation
    example: str  # the id of one of the calls
    before: str
    after: str

    @property
    def fix(self) -> str | None:
        """The policy line that fixes it, as YAML; None if there is none, and `advice` applies."""
        where = f"{{tenant: {_yaml(self.tenant)}, model: {_yaml(self.model)}, level: "
        system = self.place.startswith("system")
        match self.kind:
            case "noise" | "key_order" if system or self.place.startswith("tools"):
                change = "safe"
            case "tool_order":
                change = "full, opt_in: [tool_order]"
            case "template_date":
                change = "full, opt_in: [template_date], template_date: 26 Jul 2024"
            case kind if kind in _MOVABLE_KINDS and system:
                change = f"full, opt_in: [{'volatile_to_user' if self.within else 'volatile_to_end'}]"
            case _:
                return None
        return f"canonicalise: {{exceptions: [{where}{change}}}]}}"

    @property
    def advice(self) -> str:
        """What the client or operator can do, if no policy line fixes it."""
        if self.kind == "key_order":
            return "write the keys of JSON objects in a fixed order, as with `json.dumps(..., sort_keys=True)`"
        return ADVICE_BY_KIND.get(self.kind, ADVICE_BY_KIND["text"])


class DiagnosisReport(NamedTuple):
    """Totals over all calls, scaled from the sample, and the findings."""

    calls: float
    prompt_tokens: float
    cached_tokens: float
    findings: list[PrefixFinding]


def report(summaries: Iterable[CallSummary]) -> DiagnosisReport:
    """The findings of these summaries, by lost tokens, most first."""
    calls = prompt = cached = 0.0
    found: dict[tuple[str, ...], list[CallSummary]] = {}
    for row in summaries:
        calls += 1 / row.sample
        prompt += row.prompt_tokens / row.sample
        cached += row.cached_tokens / row.sample
        if row.broken is not None:
            group = (
                row.tenant,
                row.key_id,
                row.agent,
                row.model,
                stable_place_of(row),
                row.broken.kind,
                row.currency or "",
            )
            found.setdefault(group, []).append(row)
    findings = [_finding(rows) for rows in found.values()]
    return DiagnosisReport(calls, prompt, cached, sorted(findings, key=lambda f: (-f.lost_tokens, f)))


def report_json(found: DiagnosisReport) -> dict[str, Any]:
    """The report as `warmpath doctor --json` and the admin API return it. Money is decimal text."""
    return {
        "calls": round(found.calls),
        "prompt_tokens": round(found.prompt_tokens),
        "cached_tokens": round(found.cached_tokens),
        "findings": [
            {
                **finding._asdict(),
                "lost_cost": None if finding.lost_cost is None else str(finding.lost_cost),
                "fix": finding.fix,
                "advice": None if finding.fix else finding.advice,
            }
            for finding in found.findings
        ],
    }


def stable_place_of(row: CallSummary) -> str:
    """The place of a break, in terms that are the same for every turn of a conversation."""
    assert row.broken is not None
    place, role = row.broken.place, row.broken.role
    if not place:
        return "nowhere in the request"
    if role == "tools":
        return "tools"
    return f"system ({place})" if role in ("system", "developer") else f"{role} messages"


def _finding(rows: list[CallSummary]) -> PrefixFinding:
    breaks = [(row, row.broken) for row in rows if row.broken is not None]
    costs = [Decimal(row.lost_cost) / Decimal(row.sample) for row in rows if row.lost_cost is not None]
    last, broken = breaks[-1]
    return PrefixFinding(
        tenant=last.tenant, key_id=last.key_id, agent=last.agent, model=last.model,
        place=stable_place_of(last), kind=broken.kind,
        calls=sum(1 / row.sample for row in rows),
        lost_tokens=sum(b.lost_tokens / row.sample for row, b in breaks),
        lost_seconds=sum((row.lost_seconds or 0.0) / row.sample for row in rows),
        lost_cost=sum(costs, Decimal()) if costs else None,
        currency=last.currency,
        within=sum(b.within for _, b in breaks) * 2 > len(breaks),
        example=last.call_id, before=broken.before, after=broken.after,
    )  # fmt: skip


def _yaml(name: str) -> str:
    """A name as a YAML scalar within braces."""
    plain = name.replace("-", "").replace("_", "").replace(".", "").replace("/", "").isalnum()
    return name if plain and not name[0].isdigit() else "'" + name.replace("'", "''") + "'"
