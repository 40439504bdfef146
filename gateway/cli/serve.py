"""`warmpath serve`: the gateway, by a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.common import MISUSE, fail, say, settings_or_exit, verb_app
from gateway.policy.file import PolicyError
from gateway.server import workers as workers_of_one_machine
from gateway.server.listener import run

app = verb_app()


@app.command(no_args_is_help=False)
def serve(
    policy: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="The policy file; else WARMPATH_POLICY.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0 takes any free one. Else WARMPATH_PORT, 8080.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; else WARMPATH_HOST, 127.0.0.1.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="memory://, sqlite:///FILE or redis://HOST; else WARMPATH_STORAGE.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that share the port; else WARMPATH_WORKERS, 1.")
    ] = None,
) -> None:
    """Serve the gateway until it is stopped (Ctrl-C, SIGTERM). SIGHUP, or a change of the file, reloads the policy.

    On shutdown /ready says no, calls are taken for WARMPATH_LAME_DUCK_SECONDS more, and those under way then have
    WARMPATH_DRAIN_SECONDS to end.
    """
    settings = settings_or_exit(policy=policy, port=port, host=host, storage=storage, workers=workers)
    serve_all = run if settings.workers == 1 else workers_of_one_machine.serve
    try:
        started = serve_all(settings, on_ready=lambda url: say(f"warmpath ready on {url} policy {settings.policy}"))
    except PolicyError as error:
        fail(str(error))
    except (OSError, ValueError) as error:
        fail(str(error), code=MISUSE)
    if not started:
        fail("the gateway did not start, or not stop; its log says why")


__all__ = ["app"]
