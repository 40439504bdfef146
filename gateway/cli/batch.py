"""`warmpath batch`: hand a file of calls to a gateway, watch it being worked through, and fetch the answers."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import httpx2
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.cli.common import MISUSE, PROBLEM, AsJson, fail, say, say_json, verb_app
from gateway.settings import SettingsError, load_client_settings

POLL_SECONDS = 0.5
TIMEOUT_SECONDS = 60.0  # of one request
UNREACHABLE_SECONDS_MAX = 60.0  # a gateway that restarts may be away so long
OVER = ("completed", "failed", "expired", "cancelled")
CHAT = "/v1/chat/completions"

app = verb_app(help="Run files of calls behind everybody else.")

Url = Annotated[str | None, typer.Option("--url", help="The gateway's base URL, /v1 included; else OPENAI_BASE_URL.")]
Key = Annotated[str | None, typer.Option("--key", help="The API key; else OPENAI_API_KEY.")]
Output = Annotated[Path | None, typer.Option(help="Write the answers there, as JSONL, when it is over.")]
Errors = Annotated[Path | None, typer.Option(help="Write there, as JSONL, what has failed.")]


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL as the Batch API has it.")],
    model: Annotated[
        str | None, typer.Option(help="The file has a prompt on each line; each becomes a chat with this model.")
    ] = None,
    window: Annotated[str, typer.Option(help="How long it may take, at most 24h.")] = "24h",
    detach: Annotated[bool, typer.Option("--detach", help="Print the batch's id, and do not wait.")] = False,
    output: Output = None,
    errors: Errors = None,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Upload a file, make a batch of it, and watch it to its end. The exit code is 0 where it was completed."""
    with _client(url, key) as client:
        with _requests(file, model) as content:
            endpoint = _endpoint(content)
            uploaded = _ask(client, "POST", "files", data={"purpose": "batch"}, files={"file": (file.name, content)})
        asked = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
        batch = _ask(client, "POST", "batches", json=asked)
        if detach:
            say_json(batch) if as_json else say(batch["id"])
            return
        _conclude(client, _follow(client, batch), output, errors, as_json)


@app.command()
def watch(
    batch_id: Annotated[str, typer.Argument(metavar="ID", help="The batch's id.")],
    output: Output = None,
    errors: Errors = None,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Watch a batch to its end. Ctrl-C stops the watching, and not the batch."""
    with _client(url, key) as client:
        _conclude(client, _follow(client, _ask(client, "GET", f"batches/{batch_id}")), output, errors, as_json)


def _client(url: str | None, key: str | None) -> httpx2.Client:
    try:
        account = load_client_settings(base_url=url, api_key=key)
    except SettingsError as error:
        fail(str(error), code=MISUSE)
    headers = {"authorization": f"Bearer {account.api_key.get_secret_value()}"}
    return httpx2.Client(base_url=account.base_url, headers=headers, timeout=TIMEOUT_SECONDS)


def _ask(client: httpx2.Client, method: str, path: str, **request: Any) -> dict[str, Any]:
    try:
        reply = client.request(method, path, **request)
    except httpx2.TransportError as error:
        fail(f"{client.base_url} can not be reached: {error}")
    if reply.status_code != 200:
        fail(_refusal(reply))
    answer: dict[str, Any] = reply.json()
    return answer


def _refusal(reply: httpx2.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {reply.status_code}, and not as a gateway does"


@contextlib.contextmanager
def _requests(file: Path, model: str | None) -> Iterator[IO[bytes]]:
    """The file as it is, or made of prompts."""
    with file.open("rb") as given:
        if model is None:
            yield given
            return
        with tempfile.TemporaryFile() as made:
            for number, prompt in enumerate(given, 1):
                if text := prompt.decode("utf-8", "replace").strip():
                    body = {"model": model, "messages": [{"role": "user", "content": text}]}
                    line = {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}
                    made.write(json.dumps(line).encode() + b"\n")
            made.seek(0)
            yield made


def _endpoint(content: IO[bytes]) -> str:
    """That of the first line; the gateway judges the rest."""
    first = content.readline()
    content.seek(0)
    try:
        return str(json.loads(first)["url"])
    except (ValueError, KeyError, TypeError):
        fail("line 1 is no request of a batch; for a file of prompts, give --model", code=MISUSE)


def _follow(client: httpx2.Client, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch at its end. The bar goes to stderr, and only where somebody watches."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
    )  # fmt: skip
    reached = time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(batch["status"], total=None, failed="")
        while True:
            counts = batch["request_counts"]
            failed = f"{counts['failed']} failed" if counts["failed"] else ""
            done = counts["completed"] + counts["failed"]
            progress.update(
                bar, description=batch["status"], total=counts["total"] or None, completed=done, failed=failed
            )
            if batch["status"] in OVER:
                return batch
            time.sleep(POLL_SECONDS)
            try:
                reply = client.get(f"batches/{batch['id']}")
            except httpx2.TransportError as error:
                if time.monotonic() - reached > UNREACHABLE_SECONDS_MAX:
                    fail(f"{client.base_url} can not be reached: {error}; the batch is {batch['id']}")
                continue
            if reply.status_code < 500:
                reached = time.monotonic()
                if reply.status_code != 200:
                    fail(_refusal(reply))
                batch = reply.json()


def _conclude(
    client: httpx2.Client, batch: dict[str, Any], output: Path | None, errors: Path | None, as_json: bool
) -> None:
    for file, kind in ((output, "output_file_id"), (errors, "error_file_id")):
        if file is not None:
            _fetch(client, batch.get(kind), file)
    if as_json:
        say_json(batch)
    else:
        counts = batch["request_counts"]
        say(f"{batch['id']} is {batch['status']}: {counts['completed']} answered, {counts['failed']} failed")
        for error in (batch.get("errors") or {}).get("data", []):
            say(f"line {error['line']}: {error['message']}" if error.get("line") else error["message"])
    if batch["status"] != "completed":
        raise typer.Exit(PROBLEM)


def _fetch(client: httpx2.Client, file_id: str | None, to: Path) -> None:
    """Without such a file, an empty one: nothing of an earlier batch is left there."""
    with to.open("wb") as written:
        if file_id is not None:
            with client.stream("GET", f"files/{file_id}/content") as reply:
                if reply.status_code != 200:
                    fail(f"{file_id} can not be fetched: the gateway answered {reply.status_code}")
                for chunk in reply.iter_bytes():
                    written.write(chunk)


__all__ = ["app"]
