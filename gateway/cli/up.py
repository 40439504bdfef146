"""`warmpath up`: runs gateway and engine on one machine with one command, for a first look and for development.

It creates what is missing in the data folder: an API key (`dev-key`), an admin key (`admin-key`) and a SQLite storage.
Then it starts the engine under supervision (`engine_process.py`), unless one runs already, and the gateway in this
process. The dashboard is optional: if its default port is taken, `up` prints a warning and runs without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlsplit

import typer
from pydantic import SecretStr

from gateway.auth.keyring import rfc3339_seconds
from gateway.cli.common import MISUSE, fail, policy_or_exit, print_line, settings_or_exit, verb_app, warn
from gateway.cli.engine_process import EngineProcess
from gateway.cli.port_owner import next_free_port, port_owner
from gateway.core.api_keys import hash_key, new_admin_key, new_key, parse_key
from gateway.policy import Deployment, Policy
from gateway.policy.file import PolicyError
from gateway.server.listener import listen, run, stop_signals, url_of
from gateway.server.policy_checks import IN_SERVICE
from gateway.settings import ADMIN_KEY_CHARACTERS_MIN, Settings, UpSettings, variable
from gateway.storage import open_storage
from gateway.storage.base import KeyRecord

ADMIN_PORT = 8082  # the dashboard's port, unless it is set
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

# Room for 86,000 tokens, some forty of the demo model's longest contexts. The engine writes all of it when it starts,
# and the GiB that it would choose takes three seconds of CPU where the memory was never used before.
DEMO_CACHE_MIB = 256

app = verb_app()


@app.command(no_args_is_help=False)
def up(
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Model of the engine: demo, a model directory, or an id on the Hub.")
    ] = "demo",
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Policy file. Default: WARMPATH_POLICY."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", min=0, max=65535, help="The gateway's port. Default: 8080.")
    ] = None,
) -> None:
    """Start the bundled engine and the gateway, print how to call them, and stop both on Ctrl-C.

    The engine listens on the port of the policy's first `warmpath` deployment on this machine. Keys, limits and the
    ledger are stored in WARMPATH_DATA_DIR (.warmpath). WARMPATH_DEV_KEY sets the API key, WARMPATH_ADMIN_KEY the
    dashboard's key, and WARMPATH_ADMIN_PORT the dashboard's port (8082).
    """
    settings = settings_or_exit(UpSettings, policy=policy, port=port)
    rules = policy_or_exit(settings.policy, checks=IN_SERVICE)
    _make_data_folder(settings.data_dir)
    if "storage" not in settings.model_fields_set:
        settings = settings.model_copy(
            update={"storage": f"sqlite:///{(settings.data_dir / 'warmpath.db').absolute()}"}
        )
    try:
        listen(settings.host, settings.port).close()  # fail before the engine starts, not after
    except OSError as error:
        fail(str(error), code=MISUSE)
    local = _local_engine(rules)
    key = _dev_key(settings)
    asyncio.run(_store_key(key, settings, rules))
    settings, admin_listener = _with_dashboard(settings, rules)
    dashboard = _dashboard_url(settings, admin_listener)
    try:
        with (
            admin_listener or contextlib.nullcontext(),
            stop_signals() as should_stop,
            _engine(model, local, settings, should_stop),
        ):
            started = run(
                settings,
                on_ready=lambda url: _print_instructions(url, key, rules, dashboard),
                json_logs=False,
                should_stop=should_stop,
                admin_listener=admin_listener,
            )
    except PolicyError as error:
        fail(str(error))
    except (OSError, ValueError) as error:
        fail(str(error), code=MISUSE)
    if not started and not should_stop():
        fail("the gateway failed to start; its log has the reason")
    print_line("stopped")


def _make_data_folder(folder: Path) -> None:
    """Make the data folder. Exits if it cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fail(
            f"cannot write to the data folder {folder}: {error.strerror or error}; "
            f"set {variable('data_dir')} to another folder",
            code=MISUSE,
        )


def _local_engine(policy: Policy) -> Deployment:
    local = (d for d in policy.deployments if d.provider == "warmpath" and urlsplit(d.base_url).hostname in LOOPBACK)
    if (deployment := next(local, None)) is None:
        fail("the policy has no local deployment of provider `warmpath`; `warmpath serve` needs none", code=MISUSE)
    return deployment


def _dev_key(settings: Settings) -> str:
    """The API key: WARMPATH_DEV_KEY, or the one that the first start created in the data folder."""
    if settings.dev_key is not None:
        return settings.dev_key.get_secret_value()
    return _stored_secret(settings.data_dir / "dev-key", lambda: new_key("dev"))


def _stored_secret(file: Path, make: Callable[[], str]) -> str:
    """The secret in a file that only this user may read. Creates the file if it does not exist."""
    if not file.exists():
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as new:
            new.write(make() + "\n")
    return file.read_text().strip()


def _with_dashboard(settings: Settings, policy: Policy) -> tuple[Settings, socket.socket | None]:
    """The settings with an admin API, and its listener. None, without an admin API, if its default port is taken."""
    key = settings.admin_key or SecretStr(_stored_secret(settings.data_dir / "admin-key", new_admin_key))
    if len(key.get_secret_value()) < ADMIN_KEY_CHARACTERS_MIN:
        fail(f"{settings.data_dir / 'admin-key'} does not contain a key; delete it to create a new one", code=MISUSE)
    port = settings.admin_port
    try:
        if port is None and ADMIN_PORT in _reserved_ports(settings, policy):
            raise OSError(f"port {ADMIN_PORT} is used by the gateway or a deployment")
        listener = listen(settings.admin_host, ADMIN_PORT if port is None else port)
        listener.listen()  # reserves the port while the engine starts
    except OSError as error:
        if port is not None:
            fail(str(error), code=MISUSE)
        warn(f"no dashboard: {error}; set {variable('admin_port')} to another port")
        return settings, None
    return settings.model_copy(update={"admin_port": listener.getsockname()[1], "admin_key": key}), listener


def _reserved_ports(settings: Settings, policy: Policy) -> set[int | None]:
    """Ports on this machine that the gateway uses, and local deployments, which may be started later."""
    servers = (urlsplit(deployment.base_url) for deployment in policy.deployments)
    return {settings.port, *(server.port for server in servers if server.hostname in LOOPBACK)}


def _dashboard_url(settings: Settings, listener: socket.socket | None) -> str | None:
    """The dashboard's URL with the admin key in its fragment, which browsers do not send to servers."""
    if listener is None or settings.admin_key is None:
        return None
    return f"{url_of(listener)}/#key={quote(settings.admin_key.get_secret_value(), safe='')}"


async def _store_key(key: str, settings: Settings, policy: Policy) -> None:
    """Write the key's hash to the storage, for the policy's first tenant."""
    parsed = parse_key(key)
    if parsed is None:
        fail(f"{settings.data_dir / 'dev-key'} does not contain a key; delete it to create a new one", code=MISUSE)
    storage = open_storage(settings.storage, owner="warmpath-up")
    await storage.open()
    try:
        digest = hash_key(key, settings.key_pepper.get_secret_value())
        await storage.put_key(KeyRecord(parsed[0], policy.tenants[0].name, digest, rfc3339_seconds(time.time())))
    finally:
        await storage.close()


@contextlib.contextmanager
def _engine(model: str, deployment: Deployment, settings: Settings, should_stop: Callable[[], bool]) -> Iterator[None]:
    """Run the engine as a supervised process, healthy on entry and stopped on exit. Uses a running engine if any."""
    address = urlsplit(deployment.base_url)
    root = f"{address.scheme}://{address.netloc}"
    if (owner := port_owner(root, deployment.model)) is not None:
        if owner.is_our_engine:
            warn(f"using the engine that already runs on {root}")
            yield
            return
        fail(
            f"port {address.port or 80} of the engine is taken by {owner.description}. Stop it, or set the base_url of "
            f"deployment {deployment.name} in {settings.policy} to port {next_free_port(address.port or 80)}, "
            "which is free",
            code=MISUSE,
        )
    if importlib.util.find_spec("torch") is None:
        fail("the engine is not installed: pip install 'warmpath[engine]'", code=MISUSE)
    command = [sys.executable, "-m", "backend", "--model", model, "--port", str(address.port or 80)]
    command += ["--served-model-name", deployment.model]
    if model == "demo":
        command += ["--kv-cache-memory-mib", str(DEMO_CACHE_MIB)]
    command.append("--stop-with-stdin")
    if settings.otlp_endpoint is not None:
        command += ["--otlp-endpoint", settings.otlp_endpoint]
    log = settings.data_dir / "engine.log"
    log.unlink(missing_ok=True)  # an error message shows the log's end, which must be of this start
    with EngineProcess(command, root, log, should_stop):
        yield


def _print_instructions(url: str, key: str, policy: Policy, dashboard: str | None) -> None:
    model = policy.models[0].name
    lines = {"base URL": f"{url}/v1", "key": key, "model": model}
    if dashboard is not None:
        lines["dashboard"] = dashboard
    shown = "\n".join(f"  {name:<9}  {value}" for name, value in lines.items())
    print_line()
    print_line("Warmpath is up. Ctrl-C stops it.", style="bold green")
    instructions = f"""
{shown}

  curl {url}/v1/chat/completions \\
    -H 'authorization: Bearer {key}' \\
    -H 'content-type: application/json' \\
    -d '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "What is prefix caching?"}}]}}'

  from openai import OpenAI

  client = OpenAI(base_url="{url}/v1", api_key="{key}")
  for chunk in client.chat.completions.create(
      model="{model}",
      messages=[{{"role": "user", "content": "What is prefix caching?"}}],
      stream=True,
  ):
      print(chunk.choices[0].delta.content or "", end="", flush=True)
"""
    for line in instructions.split("\n"):
        print_line(line)


__all__ = ["app"]
