"""`warmpath status`: the health of a running gateway, its deployments and queues."""

from __future__ import annotations

from dataclasses import asdict

import typer

from gateway.cli.admin_client import AdminError, Url, client_or_exit
from gateway.cli.common import PROBLEM, AsJson, fail, print_json, print_line, print_table, verb_app
from gateway.cli.gateway_view import WINDOW_SECONDS, CallStats, GatewayView, read_view

app = verb_app()

DEPLOYMENT_COLUMNS = ("DEPLOYMENT", "STATE", "SLOTS", "REQUESTS", "FAILED", "HIT RATE", "TTFT")
TENANT_COLUMNS = ("TENANT", "REQUESTS", "FAILED", "PROMPT", "OUTPUT", "HIT RATE", "TTFT")


@app.command(no_args_is_help=False)
def status(url: Url = None, as_json: AsJson = False) -> None:
    """Show the health of a running gateway, its deployments, queues and tenants.

    Reads the admin API. Requests, hit rates and times are those of the last minute, of at most 500 requests. The exit
    code is 1 if the gateway is not ready or a deployment is unavailable.
    """
    try:
        view = read_view(client_or_exit(url))
    except AdminError as error:
        fail(str(error))
    if as_json:
        print_json({name: value for name, value in asdict(view).items() if name not in ("calls", "errors")})
    else:
        _print(view)
    if view.status != "ready" or any(one.state != "ok" for one in view.deployments):
        raise typer.Exit(PROBLEM)


def _print(view: GatewayView) -> None:
    print_line(f"{view.url}: {view.status} (policy {view.policy})", style="green" if view.status == "ready" else "red")
    for fault in view.faults:
        print_line(f"  {fault}", style="red")
    queued = ", ".join(f"{name} {depth}" for name, depth in view.queued.items())
    print_line(f"in flight: {view.in_flight}, queued: {queued}, last {WINDOW_SECONDS} s:")
    print_line()
    print_table(DEPLOYMENT_COLUMNS, deployment_rows(view))
    if view.tenants:
        print_line()
        print_table(TENANT_COLUMNS, tenant_rows(view.tenants))


def deployment_rows(view: GatewayView) -> list[tuple[str, ...]]:
    """The rows of the deployments' table."""
    return [
        (
            one.stats.name,
            one.state,
            f"{one.in_flight}/{one.slots}",
            str(one.stats.requests),
            str(one.stats.failed),
            share(one.stats.hit_rate),
            milliseconds(one.stats.ttft_ms),
        )
        for one in view.deployments
    ]


def tenant_rows(tenants: tuple[CallStats, ...]) -> list[tuple[str, ...]]:
    """The rows of the tenants' table."""
    return [
        (
            one.name,
            str(one.requests),
            str(one.failed),
            str(one.prompt_tokens),
            str(one.output_tokens),
            share(one.hit_rate),
            milliseconds(one.ttft_ms),
        )
        for one in tenants
    ]


def share(value: float | None) -> str:
    """A share in percent; `-` for None."""
    return "-" if value is None else f"{value:.0%}"


def milliseconds(value: float | None) -> str:
    """A duration with its unit; `-` for None."""
    return "-" if value is None else f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"


__all__ = ["app"]
