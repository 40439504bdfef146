"""`warmpath doctor`: reports what breaks prefixes, what that costs, and the policy lines that the replay proposes."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.common import (
    AsJson,
    fail,
    print_json,
    print_line,
    print_table,
    settings_or_exit,
    verb_app,
    warn,
)
from gateway.cli.times import Since, Until
from gateway.diagnosis import DiagnosisReport, PrefixFinding, Proposal, policy_line, read_summaries, report, report_json
from gateway.policy import Policy
from gateway.policy.edit import PolicyEditError, edit_policy
from gateway.policy.file import PolicyError, load_policy
from gateway.server.policy_checks import ANYWHERE

app = verb_app(no_args_is_help=False)

_RANKINGS = {
    "tokens": lambda finding: finding.lost_tokens,
    "seconds": lambda finding: finding.lost_seconds,
    "money": lambda finding: sum(finding.lost_cost.values()),
}


def _ranking(name: str) -> str:
    if name not in _RANKINGS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(_RANKINGS)}")
    return name


@app.command()
def doctor(
    folder: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="The gateway's data folder. Default: WARMPATH_DATA_DIR."),
    ] = None,
    since: Since = None,
    until: Until = None,
    by: Annotated[
        str, typer.Option(callback=_ranking, metavar="WHAT", help=f"Rank by {', '.join(_RANKINGS)}.")
    ] = "tokens",
    policy_file: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="Policy file. Default: WARMPATH_POLICY."),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Show the change of the policy file, ask, and write it.")
    ] = False,
    only: Annotated[
        list[int] | None,
        typer.Option("--only", metavar="NUMBER", min=1, help="With --apply: only this proposal. May be repeated."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --apply: write without a question.")] = False,
    as_json: AsJson = False,
) -> None:
    """Rank the causes of broken prefixes, which make engines compute prompts again instead of reading their cache.

    Reads the summaries of calls that the gateway records if the policy has `diagnosis: {sample: 10%}` or another share.
    Summaries describe the structure of prompts, not their text. LOST is what was computed again: tokens, the time that
    took, and the cost above the price of cached tokens, extrapolated from the sample to all calls.

    Policy lines are proposed only if a replay of the sampled calls shows that they save tokens. With --apply, they are
    written into the policy file, in which everything else stays as it is.
    """
    if not apply and (only or yes):
        raise typer.BadParameter("--only and --yes need --apply")
    if apply and as_json:
        raise typer.BadParameter("--apply prints a diff, and not JSON: leave out --json")
    settings = settings_or_exit(data_dir=folder, policy=policy_file)
    summaries = settings.data_dir / "diagnosis"
    if not summaries.is_dir():
        fail(f"no summaries in {summaries}: enable them in the policy, as in `diagnosis: {{sample: 10%}}`")
    is_chosen = apply or "policy" in settings.model_fields_set
    policy = _policy(settings.policy, needed=apply or policy_file is not None) if is_chosen else None
    found = report(
        (row for row in read_summaries(summaries) if (since or "") <= row.time and (until is None or row.time < until)),
        policy,
    )
    found.findings.sort(key=_RANKINGS[by], reverse=True)
    if as_json:
        print_json(report_json(found))
        return
    _print_report(found)
    if apply:
        _apply(settings.policy, found.proposals, only or (), ask=not yes)


def _policy(path: Path, *, needed: bool) -> Policy | None:
    """The policy that the proposals are for. Without one, that of the recorded calls is assumed."""
    try:
        return load_policy(path, checks=ANYWHERE)
    except PolicyError as error:
        if needed:
            fail(f"{error}\nthe policy is not valid, so it is not changed; `warmpath check` lists its problems")
        warn(f"{path} is not a valid policy; the proposals assume the policy of the recorded calls")
        return None


def _apply(path: Path, proposals: Sequence[Proposal], only: Sequence[int], *, ask: bool) -> None:
    """Show the diff of the policy file, ask, and write it. Exits with an error if that cannot be done."""
    if unknown := [number for number in only if number > len(proposals)]:
        fail(f"there is no proposal {unknown[0]}; there are {len(proposals)}")
    chosen = [proposal for number, proposal in enumerate(proposals, 1) if not only or number in only]
    print_line()
    if not chosen:
        print_line("nothing to apply")
        return
    try:
        edit = edit_policy(path, [proposal.exception for proposal in chosen], checks=ANYWHERE)
        for line in edit.diff().splitlines():
            print_line(line, style="green" if line[:1] == "+" else "red" if line[:1] == "-" else "")
        if ask and not _confirmed(path):
            fail(f"{path} is unchanged")
        edit.write()
    except (PolicyError, PolicyEditError) as error:
        fail(str(error))
    print_line(f"{path}: written (hash {edit.policy.hash})", style="green")


def _confirmed(path: Path) -> bool:
    print_line()
    try:
        return typer.confirm(f"Write this to {path}?")
    except typer.Abort:  # no terminal, or an interrupt
        return False


def _print_report(found: DiagnosisReport) -> None:
    share = found.cached_tokens / found.prompt_tokens if found.prompt_tokens else 0.0
    print_line(f"{found.calls:.0f} calls, {found.prompt_tokens:.0f} prompt tokens, {share:.0%} of them cached")
    if not found.findings:
        print_line("no broken prefixes found")
        return
    print_line()
    print_table(
        ("", "LOST TOKENS", "SECONDS", "MONEY", "CALLS", "TENANT", "KEY", "PROGRAM", "MODELS", "WHERE", "WHAT"),
        [
            (
                f"{number}.", f"{f.lost_tokens:.0f}", f"{f.lost_seconds:.1f}", _money(f.lost_cost), f"{f.calls:.0f}",
                f.tenant, f.key_id, f.agent, ",".join(f.models), f.place, f.kind,
            )
            for number, f in enumerate(found.findings, 1)
        ],
    )  # fmt: skip
    print_line()
    for number, finding in enumerate(found.findings, 1):
        print_line(f"{number}. {_remedy(finding)}")
        if finding.before or finding.after:
            print_line(f"   before: {finding.before!r}")
            print_line(f"   after:  {finding.after!r}")
        print_line(f"   last seen in {finding.example}")
    _print_proposals(found)


def _remedy(finding: PrefixFinding) -> str:
    if not finding.proposals:
        return finding.advice
    numbers = " and ".join(str(number + 1) for number in finding.proposals)
    return f"fixed by proposal {numbers}"


def _print_proposals(found: DiagnosisReport) -> None:
    print_line()
    if not found.proposals:
        print_line("no policy line is proposed: none would save tokens")
        return
    print_line(
        f"Proposals for the policy, by a replay of {found.replayed_calls} calls "
        f"(replayed as they were: {found.predicted_share:.0%} cached; reported: {found.reported_share:.0%})"
    )
    for number, proposal in enumerate(found.proposals, 1):
        cost = f", {_money(proposal.saved_cost)}" if proposal.saved_cost else ""
        print_line(f"{number}. {policy_line(proposal)}")
        print_line(
            f"   saves {proposal.saved_tokens:.0f} computed prompt tokens ({proposal.saved_share:.0%} of those of its "
            f"calls){cost}"
        )


def _money(amounts: dict[str, Decimal]) -> str:
    return " + ".join(f"{amount:.4f} {currency}" for currency, amount in amounts.items()) or "unpriced"


__all__ = ["app"]
