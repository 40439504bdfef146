"""Sums up the journal: the causes of broken prefixes, what they cost, and the policy lines that the replay proposes.

A cause is what breaks the prompts of one application (tenant, key and program) at one place in one way. It is one
finding, whatever models the application calls. `proposals.py` proposes; a finding refers to the proposals that fix it.
If there are none, `advice` says what the client or the operator can do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from gateway.core.money import plain_text
from gateway.diagnosis.journal import CallSummary
from gateway.diagnosis.proposals import Proposal, form_in_force, proposals_for, propose, switched_on, transforms_for
from gateway.diagnosis.replay import Replay
from gateway.policy import Policy
from gateway.policy.edit import exception_line

MONEY_DECIMALS = 12
BEHIND_STABLE_TEXT = "put changing text behind stable text: at the end of the prompt, or in the last message"
ADVICE_BY_KIND = {  # for kinds of breaks that no policy line fixes
    "tool_set": "keep the list of tools unchanged within a conversation, and append new tools at its end",
    "dropped_reasoning": "return the assistant's reasoning unchanged (`reasoning_content`), or use a template that "
    "omits it from every turn",
    "history_rewritten": "append to a conversation, and do not change earlier messages",
    "history_cut": "shorten a conversation rarely and by many messages, not by one message per turn",
    "evicted": "enlarge the cache, or add deployments to the model; see x-warmpath-cached-tokens of single calls",
    "key_order": "write the keys of JSON objects in a fixed order, as with `json.dumps(..., sort_keys=True)`",
    "tool_order": "send tools in a fixed order, for example sorted by name",
    "chunk_order": 'sort retrieved chunks by their ids, or mark each with its id as `<document id="...">` so that the '
    "transform `chunk_order` can order them",
    "example_order": "send examples in a fixed order, or put those that change behind the others",
    "git_status": "put the state of the repository behind stable text, or read it with a tool when it is needed",
    "memory": "put memories behind stable text, in a fixed order, and append new ones at their end",
    "template_date": "pass a fixed date to the chat template",
    "noise": "do not send this header in the system prompt",
}
IN_TOOLS = "remove what changes from the descriptions of tools, which come first in a prompt"
CHANGED_SINCE = "the policy has a transform against it since these calls; see whether later ones still break"
GONE = "the policy has no such tenant or model any more"
NOT_RECORDED = "these calls were recorded by an earlier release and cannot be replayed; wait for new ones"
MOVES_NOTHING = (
    "no transform moves it, or moving it saves nothing: write it as a short line of its own that says what it is, as "
    "in `Current time: 09:41`, or put it behind stable text"
)


class PrefixFinding(NamedTuple):
    """One way in which one application's prompts break. Sums are scaled from the sample to all calls."""

    tenant: str
    key_id: str
    agent: str
    models: tuple[str, ...]
    place: str
    kind: str
    calls: float
    lost_tokens: float
    lost_seconds: float
    lost_cost: dict[str, Decimal]  # by currency; empty if unpriced
    within: bool  # most of the breaks are between turns of one conversation
    example: str  # the id of one of the calls
    before: str
    after: str
    proposals: tuple[int, ...]  # indices of the proposals that fix it
    advice: str  # if there are none


class DiagnosisReport(NamedTuple):
    """Totals over all calls, scaled from the sample, the findings, and what to change.

    `predicted_share` and `reported_share` compare the replay with the deployments: the shares of cached tokens in the
    prompts of the replayed calls, as the replay predicts and as the deployments reported.
    """

    calls: float
    prompt_tokens: float
    cached_tokens: float
    findings: list[PrefixFinding]
    proposals: list[Proposal]
    replayed_calls: int
    predicted_share: float
    reported_share: float


def report(summaries: Iterable[CallSummary], policy: Policy | None = None) -> DiagnosisReport:
    """The findings of these summaries, by lost tokens, most first, and the proposals for this policy.

    Without a policy, the proposals are for the one under which the calls were made.
    """
    rows = list(summaries)
    replay = Replay(rows)
    predicted = replay.cached_tokens()
    proposals = propose(rows, replay, policy)
    found: dict[tuple[str, ...], list[CallSummary]] = {}
    for row in rows:
        if row.broken is not None:
            cause = row.tenant, row.key_id, row.agent, stable_place_of(row), row.broken.kind
            found.setdefault(cause, []).append(row)
    findings = [_finding(broken, replay, proposals, policy) for broken in found.values()]
    replayed_tokens = sum(row.prompt_tokens for row in replay.rows) or 1
    return DiagnosisReport(
        calls=sum(1 / row.sample for row in rows),
        prompt_tokens=sum(row.prompt_tokens / row.sample for row in rows),
        cached_tokens=sum(row.cached_tokens / row.sample for row in rows),
        findings=sorted(findings, key=lambda f: (-f.lost_tokens, f[:6])),
        proposals=proposals,
        replayed_calls=len(replay.rows),
        predicted_share=sum(predicted) / replayed_tokens,
        reported_share=sum(row.cached_tokens for row in replay.rows) / replayed_tokens,
    )


def report_json(found: DiagnosisReport) -> dict[str, Any]:
    """The report as `warmpath doctor --json` and the admin API return it. Money is decimal text by currency."""
    return {
        "calls": round(found.calls),
        "prompt_tokens": round(found.prompt_tokens),
        "cached_tokens": round(found.cached_tokens),
        "replayed_calls": found.replayed_calls,
        "predicted_share": round(found.predicted_share, 4),
        "reported_share": round(found.reported_share, 4),
        "findings": [
            {**finding._asdict(), "lost_cost": _money(finding.lost_cost), "advice": finding.advice or None}
            for finding in found.findings
        ],
        "proposals": [
            {
                "tenant": proposal.tenant,
                "models": proposal.models,
                "exception": proposal.exception,
                "line": policy_line(proposal),
                "replayed_calls": proposal.replayed_calls,
                "saved_tokens": round(proposal.saved_tokens),
                "saved_share": round(proposal.saved_share, 4),
                "saved_cost": _money(proposal.saved_cost),
            }
            for proposal in found.proposals
        ],
    }


def policy_line(proposal: Proposal) -> str:
    """A proposal as a line of a policy that has no other exceptions."""
    return f"canonicalise: {{exceptions: [{exception_line(proposal.exception)}]}}"


def stable_place_of(row: CallSummary) -> str:
    """The place of a break, in terms that are the same for every turn of a conversation."""
    assert row.broken is not None
    place, role = row.broken.place, row.broken.role
    if not place:
        return "nowhere in the request"
    if role == "tools":
        return "tools"
    return f"system ({place})" if role in ("system", "developer") else f"{role} messages"


def _finding(
    rows: Sequence[CallSummary], replay: Replay, proposals: Sequence[Proposal], policy: Policy | None
) -> PrefixFinding:
    breaks = [(row, row.broken) for row in rows if row.broken is not None]
    costs: dict[str, Decimal] = {}
    for row in rows:
        if row.lost_cost is not None and row.currency is not None:
            lost = Decimal(row.lost_cost) / Decimal(row.sample)
            costs[row.currency] = costs.get(row.currency, Decimal()) + lost
    last, broken = breaks[-1]
    fixes = tuple(proposals_for(proposals, rows))
    return PrefixFinding(
        tenant=last.tenant, key_id=last.key_id, agent=last.agent, models=tuple(sorted({row.model for row in rows})),
        place=stable_place_of(last), kind=broken.kind,
        calls=sum(1 / row.sample for row in rows),
        lost_tokens=sum(b.lost_tokens / row.sample for row, b in breaks),
        lost_seconds=sum((row.lost_seconds or 0.0) / row.sample for row in rows),
        lost_cost=costs,
        within=sum(b.within for _, b in breaks) * 2 > len(breaks),
        example=last.call_id, before=broken.before, after=broken.after,
        proposals=fixes,
        advice="" if fixes else _advice(last, replay, policy),
    )  # fmt: skip


def _advice(row: CallSummary, replay: Replay, policy: Policy | None) -> str:
    """What the client or operator can do, if no policy line fixes it."""
    assert row.broken is not None
    kind, role = row.broken.kind, row.broken.role
    if transforms_for(row) and not replay.rows:
        return NOT_RECORDED
    if policy is not None and transforms_for(row):
        if (form := form_in_force([row], (row.tenant, row.model), policy)) is None:
            return GONE
        added = switched_on(form.level, form.opt_in) - switched_on(row.level, row.opt_in)
        if not added.isdisjoint(transforms_for(row)):
            return CHANGED_SINCE
    if kind in ADVICE_BY_KIND:
        return ADVICE_BY_KIND[kind]
    if role == "tools":
        return IN_TOOLS
    return MOVES_NOTHING if transforms_for(row) else BEHIND_STABLE_TEXT


def _money(amounts: dict[str, Decimal]) -> dict[str, str]:
    return {currency: plain_text(round(amount, MONEY_DECIMALS)) for currency, amount in amounts.items()}
