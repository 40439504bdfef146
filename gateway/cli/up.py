"""`warmpath up`: everything on one machine with one command, for a first look and for development."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from gateway.cli.common import MISUSE, fail, policy_or_exit, say, settings_or_exit, verb_app, warn
from gateway.cli.engine_process import EngineProcess, answers
from gateway.keys import hash_key, new_key, parse_key
from gateway.policy import Deployment, Policy
from gateway.policy_checks import IN_SERVICE
from gateway.policy_file import PolicyError
from gateway.server import listen, run, stop_signals
from gateway.settings import Settings
from gateway.storage import open_storage
from gateway.storage.base import KeyRecord

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
    are kept in WARMPATH_DATA_DIR (.warmpath); WARMPATH_DEV_KEY fixes the key.
    """
    settings = settings_or_exit(policy=policy, port=port)
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
    try:
        with stop_signals() as told_to_stop, _engine(model, local, settings, told_to_stop):
            started = run(
                settings, on_ready=lambda url: _greet(url, key, rules), json_logs=False, told_to_stop=told_to_stop
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
    kept = settings.data_dir / "dev-key"
    if not kept.exists():
        with os.fdopen(os.open(kept, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(new_key("dev") + "\n")
    return kept.read_text().strip()


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


def _greet(url: str, key: str, policy: Policy) -> None:
    model = policy.models[0].name
    say()
    say("Warmpath is up. Ctrl-C stops it.", style="bold green")
    say(f"""
  base URL  {url}/v1
  key       {key}
  model     {model}

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
