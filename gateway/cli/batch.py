"""`warmpath batch`: submits a file of requests to the Batch API, shows the progress and downloads the results."""

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

from gateway.cli.common import MISUSE, PROBLEM, AsJson, fail, print_json, print_line, verb_app
from gateway.settings import SettingsError, load_client_settings

POLL_SECONDS = 0.5
TIMEOUT_SECONDS = 60.0  # per HTTP request
UNREACHABLE_SECONDS_MAX = 60.0  # tolerated while watching: a gateway may be restarting
FINAL_STATUSES = ("completed", "failed", "expired", "cancelled")
CHAT = "/v1/chat/completions"

app = verb_app(help="Run files of requests in batch.")

Url = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="The gateway's base URL, with /v1. Default: OPENAI_BASE_URL.")
]
Key = Annotated[str | None, typer.Option("--key", metavar="KEY", help="API key. Default: OPENAI_API_KEY.")]
Output = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File for the answers, as JSONL, written at the end.")
]
Errors = Annotated[Path | None, typer.Option(metavar="FILE", help="File for failed requests, as JSONL.")]


@app.command()
def submit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Input file, JSONL as in the Batch API.")
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Treat each line of the file as a prompt for a chat with this model."),
    ] = None,
    window: Annotated[str, typer.Option(metavar="TIME", help="Completion window, at most 24h.")] = "24h",
    detach: Annotated[bool, typer.Option("--detach", help="Print the batch's id and do not wait.")] = False,
    output: Output = None,
    errors: Errors = None,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Upload a file, create a batch and wait for its end. The exit code is 0 if the batch was completed."""
    with _client(url, key) as client:
        with _input_file(file, model) as content:
            endpoint = _endpoint(content)
            uploaded = _request(
                client, "POST", "files", data={"purpose": "batch"}, files={"file": (file.name, content)}
            )
        fields = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
        batch = _request(client, "POST", "batches", json=fields)
        if detach:
            print_json(batch) if as_json else print_line(batch["id"])
            return
        _report(client, _follow(client, batch), output, errors, as_json)


@app.command()
def watch(
    batch_id: Annotated[str, typer.Argument(metavar="ID", help="The batch's id.")],
    output: Output = None,
    errors: Errors = None,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Wait for the end of a batch and show its progress. Ctrl-C stops watching, not the batch."""
    with _client(url, key) as client:
        _report(client, _follow(client, _request(client, "GET", f"batches/{batch_id}")), output, errors, as_json)


def _client(url: str | None, key: str | None) -> httpx2.Client:
    try:
        account = load_client_settings(base_url=url, api_key=key)
    except SettingsError as error:
        fail(str(error), code=MISUSE)
    headers = {"authorization": f"Bearer {account.api_key.get_secret_value()}"}
    return httpx2.Client(base_url=account.base_url, headers=headers, timeout=TIMEOUT_SECONDS)


def _request(client: httpx2.Client, method: str, path: str, **request: Any) -> dict[str, Any]:
    try:
        reply = client.request(method, path, **request)
    except httpx2.TransportError as error:
        fail(f"cannot reach {client.base_url}: {error}")
    if reply.status_code != 200:
        fail(_error_message(reply))
    answer: dict[str, Any] = reply.json()
    return answer


def _error_message(reply: httpx2.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server returned status {reply.status_code} without an error object; is this a gateway?"


@contextlib.contextmanager
def _input_file(file: Path, model: str | None) -> Iterator[IO[bytes]]:
    """The batch input file: the given file, or one made from its prompts."""
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
    """The endpoint of the first line. The gateway checks the other lines."""
    first = content.readline()
    content.seek(0)
    try:
        return str(json.loads(first)["url"])
    except (ValueError, KeyError, TypeError):
        fail("line 1 is not a batch request; for a file of prompts, use --model", code=MISUSE)


def _follow(client: httpx2.Client, batch: dict[str, Any]) -> dict[str, Any]:
    """Poll a batch until it ends. The progress bar goes to stderr, if that is a terminal."""
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
            if batch["status"] in FINAL_STATUSES:
                return batch
            time.sleep(POLL_SECONDS)
            try:
                reply = client.get(f"batches/{batch['id']}")
            except httpx2.TransportError as error:
                if time.monotonic() - reached > UNREACHABLE_SECONDS_MAX:
                    fail(f"cannot reach {client.base_url}: {error}; the batch is {batch['id']}")
                continue
            if reply.status_code < 500:
                reached = time.monotonic()
                if reply.status_code != 200:
                    fail(_error_message(reply))
                batch = reply.json()


def _report(
    client: httpx2.Client, batch: dict[str, Any], output: Path | None, errors: Path | None, as_json: bool
) -> None:
    for file, kind in ((output, "output_file_id"), (errors, "error_file_id")):
        if file is not None:
            _download(client, batch.get(kind), file)
    if as_json:
        print_json(batch)
    else:
        counts = batch["request_counts"]
        print_line(f"{batch['id']}: {batch['status']}, {counts['completed']} answered, {counts['failed']} failed")
        for error in (batch.get("errors") or {}).get("data", []):
            print_line(f"line {error['line']}: {error['message']}" if error.get("line") else error["message"])
    if batch["status"] != "completed":
        raise typer.Exit(PROBLEM)


def _download(client: httpx2.Client, file_id: str | None, to: Path) -> None:
    """Download a file of the batch. If it has none, `to` becomes empty, so that no earlier results remain there."""
    with to.open("wb") as written:
        if file_id is not None:
            with client.stream("GET", f"files/{file_id}/content") as reply:
                if reply.status_code != 200:
                    fail(f"cannot download {file_id}: the gateway returned status {reply.status_code}")
                for chunk in reply.iter_bytes():
                    written.write(chunk)


__all__ = ["app"]
