"""`warmpath doctor`: what breaks prefixes, what it costs, and the line of policy that mends it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.common import AsJson, fail, say, say_json, say_table, settings_or_exit, verb_app, well_formed
from gateway.diagnosis import DiagnosisReport, Finding, read_summaries, report, report_json
from gateway.policy.fields import parse_duration

app = verb_app(no_args_is_help=False)

_BY = {
    "tokens": lambda finding: finding.lost_tokens,
    "seconds": lambda finding: finding.lost_seconds,
    "money": lambda finding: finding.lost_cost or 0,
}


def _order(name: str) -> str:
    if name not in _BY:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(_BY)}")
    return name


def _duration(text: str | None) -> str | None:
    if text is not None:
        with well_formed():
            parse_duration(text)
    return text


@app.command()
def doctor(
    folder: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="The gateway's data folder; WARMPATH_DATA_DIR.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(callback=_duration, metavar="DURATION", help="Calls of this long ago and later, as 24h."),
    ] = None,
    by: Annotated[str, typer.Option(callback=_order, metavar="WHAT", help=f"Rank by {', '.join(_BY)}.")] = "tokens",
    as_json: AsJson = False,
) -> None:
    """Rank what breaks prefixes, so that prompts are computed again which a cache could have given.

    It reads the summaries that the gateway keeps of calls while the policy has `diagnosis: {sample: 10%}`, or another
    share. They say how prompts are built, and not what they say. LOST is what was computed again: tokens, the seconds
    that took, and the money above the price of cached tokens; scaled from the sample to all calls.
    """
    place = settings_or_exit(data_dir=folder).data_dir / "diagnosis"
    if not place.is_dir():
        fail(f"there are no summaries at {place}: switch them on in the policy, as in `diagnosis: {{sample: 10%}}`")
    earliest = ""
    if since is not None:
        earliest = (datetime.now(UTC) - timedelta(seconds=parse_duration(since))).isoformat(timespec="milliseconds")
    found = report(row for row in read_summaries(place) if row.time >= earliest)
    found.findings.sort(key=_BY[by], reverse=True)
    if as_json:
        say_json(report_json(found))
    else:
        _tell(found)


def _tell(found: DiagnosisReport) -> None:
    share = found.cached_tokens / found.prompt_tokens if found.prompt_tokens else 0.0
    say(f"{found.calls:.0f} calls, {found.prompt_tokens:.0f} prompt tokens, {share:.0%} of them cached")
    if not found.findings:
        say("nothing breaks prefixes")
        return
    say()
    say_table(
        ("", "LOST TOKENS", "SECONDS", "MONEY", "CALLS", "TENANT", "KEY", "PROGRAM", "MODEL", "WHERE", "WHAT"),
        [
            (
                f"{number}.", f"{f.lost_tokens:.0f}", f"{f.lost_seconds:.1f}", _money(f), f"{f.calls:.0f}",
                f.tenant, f.key_id, f.agent, f.model, f.place, f.kind,
            )
            for number, f in enumerate(found.findings, 1)
        ],
    )  # fmt: skip
    say()
    for number, finding in enumerate(found.findings, 1):
        say(f"{number}. {finding.fix or finding.advice}")
        if finding.before or finding.after:
            say(f"   was {finding.before!r}")
            say(f"   is  {finding.after!r}")
        say(f"   seen last in {finding.example}")


def _money(finding: Finding) -> str:
    return "unpriced" if finding.lost_cost is None else f"{finding.lost_cost:.4f} {finding.currency}"


__all__ = ["app"]
