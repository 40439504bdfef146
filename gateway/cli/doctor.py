"""`warmpath doctor`: reports what breaks prefixes, what that costs, and the policy line that fixes it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
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
    usage_error,
    verb_app,
)
from gateway.diagnosis import DiagnosisReport, PrefixFinding, read_summaries, report, report_json
from gateway.policy.fields import parse_duration

app = verb_app(no_args_is_help=False)

_RANKINGS = {
    "tokens": lambda finding: finding.lost_tokens,
    "seconds": lambda finding: finding.lost_seconds,
    "money": lambda finding: finding.lost_cost or 0,
}


def _ranking(name: str) -> str:
    if name not in _RANKINGS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(_RANKINGS)}")
    return name


def _duration(text: str | None) -> str | None:
    if text is not None:
        with usage_error():
            parse_duration(text)
    return text


@app.command()
def doctor(
    folder: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="The gateway's data folder. Default: WARMPATH_DATA_DIR."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(callback=_duration, metavar="DURATION", help="Only calls of the last DURATION, as in 24h."),
    ] = None,
    by: Annotated[
        str, typer.Option(callback=_ranking, metavar="WHAT", help=f"Rank by {', '.join(_RANKINGS)}.")
    ] = "tokens",
    as_json: AsJson = False,
) -> None:
    """Rank the causes of broken prefixes, which make engines compute prompts again instead of reading their cache.

    Reads the summaries of calls that the gateway records if the policy has `diagnosis: {sample: 10%}` or another share.
    Summaries describe the structure of prompts, not their text. LOST is what was computed again: tokens, the time that
    took, and the cost above the price of cached tokens, extrapolated from the sample to all calls.
    """
    summaries = settings_or_exit(data_dir=folder).data_dir / "diagnosis"
    if not summaries.is_dir():
        fail(f"no summaries in {summaries}: enable them in the policy, as in `diagnosis: {{sample: 10%}}`")
    earliest = ""
    if since is not None:
        earliest = (datetime.now(UTC) - timedelta(seconds=parse_duration(since))).isoformat(timespec="milliseconds")
    found = report(row for row in read_summaries(summaries) if row.time >= earliest)
    found.findings.sort(key=_RANKINGS[by], reverse=True)
    if as_json:
        print_json(report_json(found))
    else:
        _print_report(found)


def _print_report(found: DiagnosisReport) -> None:
    share = found.cached_tokens / found.prompt_tokens if found.prompt_tokens else 0.0
    print_line(f"{found.calls:.0f} calls, {found.prompt_tokens:.0f} prompt tokens, {share:.0%} of them cached")
    if not found.findings:
        print_line("no broken prefixes found")
        return
    print_line()
    print_table(
        ("", "LOST TOKENS", "SECONDS", "MONEY", "CALLS", "TENANT", "KEY", "PROGRAM", "MODEL", "WHERE", "WHAT"),
        [
            (
                f"{number}.", f"{f.lost_tokens:.0f}", f"{f.lost_seconds:.1f}", _money(f), f"{f.calls:.0f}",
                f.tenant, f.key_id, f.agent, f.model, f.place, f.kind,
            )
            for number, f in enumerate(found.findings, 1)
        ],
    )  # fmt: skip
    print_line()
    for number, finding in enumerate(found.findings, 1):
        print_line(f"{number}. {finding.fix or finding.advice}")
        if finding.before or finding.after:
            print_line(f"   before: {finding.before!r}")
            print_line(f"   after:  {finding.after!r}")
        print_line(f"   last seen in {finding.example}")


def _money(finding: PrefixFinding) -> str:
    return "unpriced" if finding.lost_cost is None else f"{finding.lost_cost:.4f} {finding.currency}"


__all__ = ["app"]
