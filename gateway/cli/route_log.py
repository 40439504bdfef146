"""`warmpath route-log`: shows what was predicted when calls were routed, and what came of it."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec
import typer

from gateway.cli.common import AsJson, fail, print_json, print_line, print_table, settings_or_exit, verb_app
from gateway.routing.route_log import RouteRow, read_routes

app = verb_app(no_args_is_help=False)

LAST = 20


@app.command()
def route_log(
    folder: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="The gateway's data folder. Default: WARMPATH_DATA_DIR."),
    ] = None,
    last: Annotated[int, typer.Option(metavar="N", min=1, max=100_000, help="Show the newest N calls.")] = LAST,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Only calls of this model.")] = None,
    call: Annotated[str | None, typer.Option(metavar="ID", help="Show all candidates of one call.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show routing decisions: what was predicted of the chosen deployment, and what it then reported.

    Reads the log that the gateway writes if the policy has `routing: {log: true}`. It is bounded: the oldest calls are
    dropped. COST is what deployments were ranked by, and NEXT BEST is the cost of the second candidate.
    """
    settings = settings_or_exit(data_dir=folder)
    routes = settings.data_dir / "routes"
    if not routes.is_dir():
        fail(f"no route log in {routes}: enable it in the policy, as in `routing: {{log: true}}`")
    rows = (row for row in read_routes(routes) if model in (None, row.model) and call in (None, row.call_id))
    newest = sorted(deque(sorted(rows, key=lambda row: row.time), maxlen=last), key=lambda row: row.time)
    if as_json:
        print_json(msgspec.to_builtins(newest))
        return
    if not newest:
        fail("the route log has no such calls")
    if call is not None:
        _print_call(newest[-1])
        return
    print_table(
        ("TIME", "CALL", "MODEL", "DEPLOYMENT", "COST", "NEXT BEST", "PROMPT", "PREDICTED", "CACHED", "TTFT EXPECTED",
         "TTFT"),
        [_cells(row) for row in newest],
    )  # fmt: skip
    print_line()
    _print_errors(newest)


def _cells(row: RouteRow) -> tuple[str, ...]:
    chosen = next((one for one in row.candidates if one.deployment == row.deployment), None)
    next_best = min((one.cost_seconds for one in row.candidates if one is not chosen), default=None)
    return (
        row.time[11:19],
        row.call_id,
        row.model,
        row.deployment if row.prefill is None else f"{row.deployment} after {row.prefill}",
        _seconds(None if chosen is None else chosen.cost_seconds),
        _seconds(next_best),
        str(row.reported_prompt_tokens or row.prompt_tokens),
        str(row.predicted_cached_tokens),
        "-" if row.reported_cached_tokens is None else str(row.reported_cached_tokens),
        _seconds(None if chosen is None else chosen.ttft_seconds),
        _seconds(row.ttft_seconds),
    )


def _print_call(row: RouteRow) -> None:
    print_line(f"{row.call_id}: {row.prompt_tokens} prompt tokens, {row.candidates_in_all} candidates")
    print_table(
        ("DEPLOYMENT", "COST", "CACHED", "QUEUED TOKENS", "IN FLIGHT", "TTFT EXPECTED", ""),
        [
            (
                one.deployment,
                _seconds(one.cost_seconds),
                str(one.cached_tokens),
                str(one.queued_tokens),
                str(one.in_flight),
                _seconds(one.ttft_seconds),
                "answered" if one.deployment == row.deployment else "",
            )
            for one in row.candidates
        ],
    )
    if row.prefill is not None:
        print_line(f"{row.prefill} computed the prompt")


def _print_errors(rows: list[RouteRow]) -> None:
    """How far the predictions were off, over all shown calls."""
    reported = [row for row in rows if row.reported_cached_tokens is not None]
    if reported:
        cached = sum(row.reported_cached_tokens or 0 for row in reported)
        wrong = sum(abs(row.predicted_cached_tokens - (row.reported_cached_tokens or 0)) for row in reported)
        print_line(f"cached tokens: {cached} reported, predictions off by {wrong} in all")
    pairs = [
        (one.ttft_seconds, row.ttft_seconds)
        for row in rows
        for one in row.candidates
        if one.deployment == row.deployment and row.ttft_seconds is not None
    ]
    if pairs:
        expected, measured = fmean(pair[0] for pair in pairs), fmean(pair[1] for pair in pairs)
        print_line(f"time to the first chunk: {_seconds(expected)} expected, {_seconds(measured)} measured, on average")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


__all__ = ["app"]
