"""`warmpath serve`: runs the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.common import MISUSE, fail, print_line, settings_or_exit, verb_app
from gateway.policy.file import PolicyError
from gateway.server import workers as worker_processes
from gateway.server.listener import run

app = verb_app()


@app.command(no_args_is_help=False)
def serve(
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Policy file. Default: WARMPATH_POLICY."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=65535, help="Port. 0: any free port. Default: WARMPATH_PORT, 8080."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on. Default: WARMPATH_HOST, 127.0.0.1.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="memory://, sqlite:///FILE or redis://HOST. Default: WARMPATH_STORAGE."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Processes that share the port. Default: WARMPATH_WORKERS, 1."),
    ] = None,
) -> None:
    """Run the gateway until it is stopped (Ctrl-C, SIGTERM). SIGHUP, or a change of the file, reloads the policy.

    On shutdown /ready fails, new calls are accepted for another WARMPATH_LAME_DUCK_SECONDS, and calls in flight then
    have WARMPATH_DRAIN_SECONDS to end.
    """
    settings = settings_or_exit(policy=policy, port=port, host=host, storage=storage, workers=workers)
    serve_all = run if settings.workers == 1 else worker_processes.serve
    try:
        started = serve_all(
            settings, on_ready=lambda url: print_line(f"warmpath ready on {url} policy {settings.policy}")
        )
    except PolicyError as error:
        fail(str(error))
    except (OSError, ValueError) as error:
        fail(str(error), code=MISUSE)
    if not started:
        fail("the gateway failed to start or to stop; its log has the reason")


__all__ = ["app"]
