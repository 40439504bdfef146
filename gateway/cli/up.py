"""`warmpath up`: everything on one machine with one command, for a first look and for development."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlsplit

import typer
from pydantic import SecretStr

from gateway.cli.common import MISUSE, fail, policy_or_exit, say, settings_or_exit, verb_app, warn
from gateway.cli.engine_process import EngineProcess, answers
from gateway.core.api_keys import hash_key, new_admin_key, new_key, parse_key
from gateway.policy import Deployment, Policy
from gateway.policy.file import PolicyError
from gateway.server.listener import listen, run, stop_signals, url_of
from gateway.server.policy_checks import IN_SERVICE
from gateway.settings import ADMIN_KEY_CHARACTERS_MIN, Settings, UpSettings, variable
from gateway.storage import open_storage
from gateway.storage.base import KeyRecord

ADMIN_PORT = 8082  # of the dashboard, unless the settings say otherwise
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

app = verb_app()


@app.command(no_args_is_help=False)
def up(
    model: Annotated[
        str, typer.Option(help="What the engine serves: demo, a model directory, or an id on the Hub.")
    ] = "demo",
    policy: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="The policy file; else WARMPATH_POLICY.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="The gateway's port; else 8080.")] = None,
) -> None:
    """Start the bundled engine and the gateway, print how to call them, and stop both on Ctrl-C.

    The engine gets the port of the policy's first `warmpath` deployment on this machine. Keys, limits and the ledger
    are kept in WARMPATH_DATA_DIR (.warmpath); WARMPATH_DEV_KEY fixes the key, and WARMPATH_ADMIN_KEY the dashboard's,
    which is on port 8082 or WARMPATH_ADMIN_PORT.
    """
    settings = settings_or_exit(UpSettings, policy=policy, port=port)
    rules = policy_or_exit(settings.policy, checks=IN_SERVICE)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    if "storage" not in settings.model_fields_set:
        settings = settings.model_copy(
            update={"storage": f"sqlite:///{(settings.data_dir / 'warmpath.db').absolute()}"}
        )
    try:
        listen(settings.host, settings.port).close()  # `run` would say so too, but only after the engine's start
    except OSError as error:
        fail(str(error), code=MISUSE)
    local = _local_engine(rules)
    key = _dev_key(settings)
    asyncio.run(_keep(key, settings, rules))
    settings, admin_listener = _with_dashboard(settings, rules)
    dashboard = _dashboard_url(settings, admin_listener)
    try:
        with (
            admin_listener or contextlib.nullcontext(),
            stop_signals() as told_to_stop,
            _engine(model, local, settings, told_to_stop),
        ):
            started = run(
                settings,
                on_ready=lambda url: _greet(url, key, rules, dashboard),
                json_logs=False,
                told_to_stop=told_to_stop,
                admin_listener=admin_listener,
            )
    except PolicyError as error:
        fail(str(error))
    except (OSError, ValueError) as error:
        fail(str(error), code=MISUSE)
    if not started and not told_to_stop():
        fail("the gateway did not start; its log says why")
    say("stopped")


def _local_engine(policy: Policy) -> Deployment:
    ours = (d for d in policy.deployments if d.provider == "warmpath" and urlsplit(d.base_url).hostname in LOOPBACK)
    if (deployment := next(ours, None)) is None:
        why = "the policy has no deployment of provider `warmpath` on this machine; `warmpath serve` needs none"
        fail(why, code=MISUSE)
    return deployment


def _dev_key(settings: Settings) -> str:
    """The key of WARMPATH_DEV_KEY, or the one made at the first start and kept beside the data."""
    if settings.dev_key is not None:
        return settings.dev_key.get_secret_value()
    return _kept(settings.data_dir / "dev-key", lambda: new_key("dev"))


def _kept(file: Path, make: Callable[[], str]) -> str:
    """The secret in a file that only this user may read, made where there is none."""
    if not file.exists():
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as new:
            new.write(make() + "\n")
    return file.read_text().strip()


def _with_dashboard(settings: Settings, policy: Policy) -> tuple[Settings, socket.socket | None]:
    """The settings with an admin API, and its listener; without one where its usual port is wanted otherwise."""
    key = settings.admin_key or SecretStr(_kept(settings.data_dir / "admin-key", new_admin_key))
    if len(key.get_secret_value()) < ADMIN_KEY_CHARACTERS_MIN:
        fail(f"{settings.data_dir / 'admin-key'} holds no key; delete it, and a new one is made", code=MISUSE)
    asked = settings.admin_port
    try:
        if asked is None and ADMIN_PORT in _wanted_ports(settings, policy):
            raise OSError(f"port {ADMIN_PORT} is wanted otherwise")
        listener = listen(settings.admin_host, ADMIN_PORT if asked is None else asked)
        listener.listen()  # so that the port is taken while the engine starts
    except OSError as error:
        if asked is not None:
            fail(str(error), code=MISUSE)
        warn(f"{error}, so there is no dashboard; {variable('admin_port')} gives it another port")
        return settings, None
    port = listener.getsockname()[1]
    return settings.model_copy(update={"admin_port": port, "admin_key": key}), listener


def _wanted_ports(settings: Settings, policy: Policy) -> set[int | None]:
    """On this machine, by the gateway and by servers that may be started later."""
    servers = (urlsplit(deployment.base_url) for deployment in policy.deployments)
    return {settings.port, *(server.port for server in servers if server.hostname in LOOPBACK)}


def _dashboard_url(settings: Settings, listener: socket.socket | None) -> str | None:
    """With the key in it, which a browser sends to nobody."""
    if listener is None or settings.admin_key is None:
        return None
    return f"{url_of(listener)}/#key={quote(settings.admin_key.get_secret_value(), safe='')}"


async def _keep(key: str, settings: Settings, policy: Policy) -> None:
    """Put the key's hash into the storage, for the policy's first tenant."""
    parsed = parse_key(key)
    if parsed is None:
        fail(f"{settings.data_dir / 'dev-key'} holds no key; delete it, and a new one is made", code=MISUSE)
    storage = open_storage(settings.storage, owner="warmpath-up")
    await storage.open()
    try:
        digest = hash_key(key, settings.key_pepper.get_secret_value())
        await storage.put_key(
            KeyRecord(parsed[0], policy.tenants[0].name, digest, datetime.now(UTC).isoformat(timespec="seconds"))
        )
    finally:
        await storage.close()


@contextlib.contextmanager
def _engine(model: str, deployment: Deployment, settings: Settings, told_to_stop: Callable[[], bool]) -> Iterator[None]:
    """The engine as a process of its own, ready to answer and supervised; stopped on the way out."""
    address = urlsplit(deployment.base_url)
    root = f"{address.scheme}://{address.netloc}"
    if answers(f"{root}/health"):
        warn(f"an engine runs on {root} already, and is used")
        yield
        return
    if importlib.util.find_spec("torch") is None:
        fail("the engine is not installed: pip install 'warmpath[engine]'", code=MISUSE)
    command = [sys.executable, "-m", "backend", "--model", model, "--port", str(address.port or 80)]
    command += ["--served-model-name", deployment.model]
    command.append("--stop-with-stdin")
    if settings.otlp_endpoint is not None:
        command += ["--otlp-endpoint", settings.otlp_endpoint]
    log = settings.data_dir / "engine.log"
    log.unlink(missing_ok=True)
    with EngineProcess(command, root, log, told_to_stop):
        yield


def _greet(url: str, key: str, policy: Policy, dashboard: str | None) -> None:
    model = policy.models[0].name
    lines = {"base URL": f"{url}/v1", "key": key, "model": model}
    if dashboard is not None:
        lines["dashboard"] = dashboard
    told = "\n".join(f"  {name:<9}  {value}" for name, value in lines.items())
    say()
    say("Warmpath is up. Ctrl-C stops it.", style="bold green")
    say(f"""
{told}

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
""")


__all__ = ["app"]
