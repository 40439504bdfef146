"""`warmpath trace`: where the time of one recent request went, as a waterfall of phases and attempts."""

from __future__ import annotations

import shutil
import textwrap
from typing import Annotated

import typer

from gateway.cli.admin_client import AdminError, Url, client_or_exit
from gateway.cli.common import AsJson, fail, print_json, print_line, verb_app
from gateway.cli.gateway_view import CALLS_READ, Call, find_call

app = verb_app()

BAR_COLUMNS_MIN = 10
LABEL_COLUMNS_MIN = 10
LABEL_COLUMNS_MAX = 34
TIME_COLUMNS = 14  # the milliseconds of a span, and spaces


@app.command()
def trace(
    request_id: Annotated[
        str,
        typer.Argument(metavar="REQUEST_ID", help="The x-request-id of the reply, or the id of its trace or event."),
    ],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a request went: phases, attempts, tokens and the reason of its route.

    Reads the admin API, which has the last 500 requests of each latency class, and as many failed or retried ones.
    """
    client = client_or_exit(url)
    try:
        call = find_call(client, request_id)
    except AdminError as error:
        fail(str(error))
    if call is None:
        fail(
            f"{client.url} does not have request {request_id}: it keeps the last {CALLS_READ} of each class, once ended"
        )
    if as_json:
        print_json(call)
        return
    for line in waterfall(call, shutil.get_terminal_size().columns):
        print_line(line)


def waterfall(call: Call, columns: int) -> list[str]:
    """The call as lines that are at most as wide as the terminal: a summary, then a bar for each phase and attempt."""
    whole = max(call["duration_ms"], 0.001)
    spans = [(phase["name"], phase["start_ms"], phase["end_ms"]) for phase in call["phases"]]
    spans += [
        (f"  {attempt['deployment']}: {attempt['outcome']}", attempt["start_ms"], attempt["end_ms"])
        for attempt in call["attempts"]
    ]
    spans.sort(key=lambda span: (span[1], span[0].startswith(" ")))
    label_columns = min(LABEL_COLUMNS_MAX, max((len(name) for name, _, _ in spans), default=0))
    label_columns = min(label_columns, max(LABEL_COLUMNS_MIN, columns - TIME_COLUMNS - BAR_COLUMNS_MIN))
    bar_columns = max(BAR_COLUMNS_MIN, columns - label_columns - TIME_COLUMNS)
    lines = [part for line in _summary(call) for part in textwrap.wrap(line, columns, break_long_words=False) or [""]]
    for name, start, end in spans:
        end = whole if end is None else end
        first = min(bar_columns - 1, int(start / whole * bar_columns))
        length = max(1, min(bar_columns - first, round((end - start) / whole * bar_columns)))
        bar = " " * first + "█" * length
        lines.append(f"{name[:label_columns]:<{label_columns}} {end - start:>9.2f} ms {bar}")
    return lines


def _summary(call: Call) -> list[str]:
    usage, error = call["usage"], call["error_code"]
    lines = [
        f"{call['call_id']}  {call['time']}  {call['path']}  status {call['status']}  {call['outcome'] or 'rejected'}"
        + (f" ({error})" if error else ""),
        f"tenant {call['tenant'] or '-'}, key {call['key_id'] or '-'}, model {call['model'] or '-'}, "
        f"class {call['class'] or '-'}, trace {call['trace_id']}",
    ]
    if call["deployment"]:
        lines.append(f"deployment {call['deployment']}" + (f": {call['route_reason']}" if call["route_reason"] else ""))
    if usage:
        prompt = usage["input_uncached"] + usage["cache_read"] + usage["cache_write"]
        predicted = call["predicted_cached_tokens"]
        lines.append(
            f"{prompt} prompt tokens, {usage['cache_read']} cached"
            + (f" ({predicted} predicted)" if predicted is not None else "")
            + f", {usage['output']} output tokens"
        )
    ttft = "" if call["ttft_ms"] is None else f", first chunk after {call['ttft_ms']:.2f} ms"
    return [*lines, f"{call['duration_ms']:.2f} ms in all, {call['own_ms']:.2f} ms in the gateway{ttft}", ""]


__all__ = ["app"]
