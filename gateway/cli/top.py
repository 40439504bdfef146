"""`warmpath top`: a live view of a running gateway in the terminal.

The main thread draws and reads keys; a thread reads the admin API, so that keys work while the gateway is slow. The
thread leaves its last view or error in `_Reader`.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.cli.admin_client import AdminClient, AdminError, Url, client_or_exit
from gateway.cli.common import MISUSE, fail, printable, verb_app
from gateway.cli.gateway_view import Call, CallStats, GatewayView, read_view
from gateway.cli.status import DEPLOYMENT_COLUMNS, TENANT_COLUMNS, deployment_rows, milliseconds, tenant_rows
from gateway.cli.trace import waterfall

app = verb_app()

KEY_WAIT_SECONDS = 0.2  # between two drawings without a key
ROWS_MIN = 3  # of requests, on a small terminal
KEYS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\r": "enter", b"\n": "enter", b"\x1b": "escape"}

# Sort orders of deployments and tenants, in the order in which the key `s` selects them.
SORTS: dict[str, Callable[[CallStats], Any]] = {
    "name": lambda stats: stats.name,
    "requests": lambda stats: -stats.requests,
    "failed": lambda stats: -stats.failed,
    "hit rate": lambda stats: 2.0 if stats.hit_rate is None else stats.hit_rate,
    "ttft": lambda stats: -(stats.ttft_ms or 0.0),
}


@dataclass(frozen=True, slots=True)
class Screen:
    """What the user has selected. `opened`: the call whose waterfall is shown."""

    sort: str = "name"
    selected: int = 0
    errors_only: bool = False
    opened: Call | None = None
    is_closed: bool = False


@app.command(no_args_is_help=False)
def top(
    url: Url = None,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.2, max=60, help="Seconds between two readings.")
    ] = 2.0,
) -> None:
    """Watch deployments, tenants, queues and recent requests live.

    Keys: s sorts, up and down select a request, enter opens its waterfall, e shows errors only, escape goes back, q
    quits. Reads the admin API. Numbers are those of the last minute.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        fail("top needs a terminal; `warmpath status` prints the same once", code=MISUSE)
    client = client_or_exit(url)
    try:
        reader = _Reader(client, every)
    except AdminError as error:
        fail(str(error))
    console, screen = Console(), Screen()
    try:
        with _keys_unbuffered(), Live(console=console, screen=True, auto_refresh=False) as live:
            while not screen.is_closed:
                live.update(drawn(reader.view, reader.error, screen, console.size), refresh=True)
                if (key := _key()) is not None:
                    screen = after_key(key, screen, reader.view)
    except KeyboardInterrupt:
        pass
    finally:
        reader.stop()


class _Reader:
    """Reads the view of a gateway every few seconds, in a thread. Raises `AdminError` if the first time fails."""

    def __init__(self, client: AdminClient, every_seconds: float) -> None:
        self.view = read_view(client)
        self.error: str | None = None
        self._client = client
        self._every_seconds = every_seconds
        self._stopping = threading.Event()
        threading.Thread(target=self._run, name="top", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._every_seconds):
            try:
                self.view, self.error = read_view(self._client), None
            except AdminError as error:
                self.error = str(error)


def after_key(key: str, screen: Screen, view: GatewayView) -> Screen:
    """What is selected after a key."""
    calls = _calls(screen, view)
    match key:
        case "q":
            return replace(screen, is_closed=True)
        case "escape":
            return replace(screen, opened=None)
        case "s":
            names = [*SORTS]
            return replace(screen, sort=names[(names.index(screen.sort) + 1) % len(names)])
        case "e":
            return replace(screen, errors_only=not screen.errors_only, selected=0)
        case "up":
            return replace(screen, selected=max(0, screen.selected - 1))
        case "down":
            return replace(screen, selected=max(0, min(len(calls) - 1, screen.selected + 1)))
        case "enter" if screen.selected < len(calls):
            return replace(screen, opened=calls[screen.selected])
    return screen


def drawn(view: GatewayView, error: str | None, screen: Screen, size: tuple[int, int]) -> RenderableType:
    """The whole screen, for a terminal of (columns, rows)."""
    columns, rows = size
    if screen.opened is not None:
        lines = [*waterfall(screen.opened, columns)[: rows - 2], "", "escape: back   q: quit"]
        return Group(*(_line(line) for line in lines))
    sort = SORTS[screen.sort]
    view = replace(
        view,
        deployments=tuple(sorted(view.deployments, key=lambda one: sort(one.stats))),
        tenants=tuple(sorted(view.tenants, key=sort)),
    )
    queued = ", ".join(f"{name} {depth}" for name, depth in view.queued.items())
    head = f"{view.url}  {view.status}  in flight {view.in_flight}  queued {queued}"
    parts: list[RenderableType] = [
        _line(head, "bold green" if view.status == "ready" else "bold red"),
        *(_line(text, "red") for text in (*view.faults, *([error] if error else ()))),
        _line(""),
        _table(DEPLOYMENT_COLUMNS, deployment_rows(view)),
        _line(""),
        _table(TENANT_COLUMNS, tenant_rows(view.tenants)),
        _line(""),
    ]
    left = max(ROWS_MIN, rows - len(parts) - len(view.deployments) - len(view.tenants) - 4)
    first = max(0, screen.selected - left + 1)
    shown = _calls(screen, view)[first : first + left]
    parts.append(_table(("TIME", "REQUEST", "TENANT", "DEPLOYMENT", "OUTCOME", "TTFT", "TOTAL"),
                        [_call_row(call) for call in shown], selected=screen.selected - first))  # fmt: skip
    parts.append(_line(f"s: sort ({screen.sort})   e: {'all' if screen.errors_only else 'errors'}   "
                       "up, down, enter: open a request   q: quit", "dim"))  # fmt: skip
    return Group(*parts)


def _calls(screen: Screen, view: GatewayView) -> tuple[Call, ...]:
    return view.errors if screen.errors_only else view.calls


def _call_row(call: Call) -> tuple[str, ...]:
    outcome = call["error_code"] or call["outcome"] or f"status {call['status']}"
    return (
        call["time"][11:19],
        call["call_id"],
        call["tenant"] or "-",
        call["deployment"] or "-",
        outcome,
        milliseconds(call["ttft_ms"]),
        milliseconds(call["duration_ms"]),
    )


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]], *, selected: int | None = None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # In a narrow terminal, rich shortens the cells of columns that may wrap. A shortened id is of no use.
        table.add_column(column, no_wrap=column in ("TIME", "REQUEST"))
    for number, row in enumerate(rows):
        cells = [Text(printable(cell), no_wrap=True, overflow="ellipsis") for cell in row]
        table.add_row(*cells, style="reverse" if number == selected else "")
    return table


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


@contextmanager
def _keys_unbuffered() -> Iterator[None]:
    """Keys arrive one by one, and are not shown."""
    before = termios.tcgetattr(0)
    tty.setcbreak(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _key() -> str | None:
    """The next key, as in `KEYS` or as its character. None after `KEY_WAIT_SECONDS` without one."""
    if not select.select([0], [], [], KEY_WAIT_SECONDS)[0]:
        return None
    typed = os.read(0, 8)
    return KEYS.get(typed) or typed[:1].decode(errors="replace")


__all__ = ["app"]
