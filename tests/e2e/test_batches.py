"""The Batch API through real processes: OpenAI's client, and gateways that are killed in the middle of a batch."""

from __future__ import annotations

import io
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.processes import (
    DEMO,
    Gateway,
    Running,
    chat,
    gateway,
    simple_policy,
    tenant,
    until,
    warmpath,
)
from tests.openai_spec import Validate
from tests.ports import free_port
from tests.redis_server import RedisServer

pytestmark = pytest.mark.e2e

ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, local_engine: Running) -> Iterator[Gateway]:
    policy = simple_policy(local_engine.url, tenants=[tenant("dev"), tenant("other")])
    with gateway(tmp_path_factory.mktemp("batches"), policy) as started:
        yield started


def lines_completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def line(number: int, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    given = body or chat(f"Say {number}.", max_tokens=2)
    return {"custom_id": f"c-{number}", "method": "POST", "url": url, "body": given}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def submit(client: openai.OpenAI, lines: list[dict[str, Any]], **fields: Any) -> Any:
    file = client.files.create(file=("in.jsonl", io.BytesIO(jsonl(lines))), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=lines[0]["url"], completion_window=fields.pop("window", "24h"), **fields
    )


def wait(client: openai.OpenAI, batch_id: str) -> Any:
    return until(lambda: (batch := client.batches.retrieve(batch_id)).status in ENDED and batch)


def answers(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of an output or error file, by their custom ids. Checks that no id occurs twice."""
    if file_id is None:
        return {}
    rows = [json.loads(row) for row in client.files.content(file_id).text.splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


def test_openais_client_runs_a_batch(front: Gateway, validate: Validate) -> None:
    with front.client() as client:
        lines = [line(number) for number in range(8)]
        lines.append(line(8, **{**chat(), "messages": "no list"}))
        batch = submit(client, lines, metadata={"job": "nightly"})
        validate("Batch", batch.to_dict())
        assert (batch.status, batch.metadata) == ("validating", {"job": "nightly"})
        ended = wait(client, batch.id)
        validate("Batch", ended.to_dict())
        assert (ended.status, ended.model) == ("completed", DEMO)
        assert ended.request_counts.to_dict() == {"total": 9, "completed": 8, "failed": 1}
        output, errors = answers(client, ended.output_file_id), answers(client, ended.error_file_id)
        assert list(output) == [f"c-{number}" for number in range(8)]
        assert list(errors) == ["c-8"]
        for row in output.values():
            assert row["response"]["status_code"] == 200
            validate("CreateChatCompletionResponse", row["response"]["body"])
        assert errors["c-8"]["response"]["status_code"] == 400
        assert errors["c-8"]["response"]["body"]["error"]["param"] == "messages"
        receipts = [
            receipt for row in output.values() for receipt in front.receipts(call_id=row["response"]["request_id"])
        ]
        assert [receipt["latency_class"] for receipt in receipts] == ["batch"] * 8
        assert all(receipt["call_id"].startswith(f"{batch.id}-") for receipt in receipts)
        assert sum(receipt["output"] for receipt in receipts) == ended.usage.output_tokens
        assert ended.created_at <= ended.in_progress_at <= ended.finalizing_at <= ended.completed_at


def test_lines_may_be_responses(front: Gateway, validate: Validate) -> None:
    given = {"model": DEMO, "max_output_tokens": 2}
    lines = [line(number, "/v1/responses", input=f"Say {number}.", **given) for number in range(3)]
    lines.append(line(3, "/v1/responses", input="x", background=True, **given))
    with front.client() as client:
        ended = wait(client, submit(client, lines).id)
        output, errors = answers(client, ended.output_file_id), answers(client, ended.error_file_id)
    assert (ended.status, sorted(output), list(errors)) == ("completed", ["c-0", "c-1", "c-2"], ["c-3"])
    for row in output.values():
        validate("Response", row["response"]["body"])
    assert errors["c-3"]["response"]["body"]["error"]["param"] == "background"
    assert ended.usage.output_tokens == sum(
        row["response"]["body"]["usage"]["output_tokens"] for row in output.values()
    )


def test_files_are_visible_to_their_tenant_only_and_listed_in_pages(front: Gateway, validate: Validate) -> None:
    with front.client("other") as client, front.client() as stranger:
        content = jsonl([line(1)])
        files = [client.files.create(file=(f"{number}.jsonl", content), purpose="batch") for number in range(3)]
        for file in files:
            validate("OpenAIFile", file.to_dict())
        assert client.files.wait_for_processing(files[0].id).status == "processed"
        assert client.files.content(files[0].id).content == content
        page = client.files.list(limit=2)
        validate("ListFilesResponse", page.to_dict())
        assert [file.id for file in page] == [file.id for file in reversed(files)]
        assert [file.id for file in client.files.list(order="asc", after=files[1].id)] == [files[2].id]
        for forbidden in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
            with pytest.raises(openai.NotFoundError):
                forbidden(files[0].id)
        deleted = client.files.delete(files[0].id)
        validate("DeleteFileResponse", deleted.to_dict())
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(files[0].id)


@pytest.mark.parametrize(
    ("content", "purpose", "errors"),
    [
        (b'{"custom_id": "a"}\nnot json\n', "batch", ["line 1: ", "line 2: "]),
        (jsonl([line(1), line(2), line(1)]), "batch", ["line 3: custom_id: 'c-1' is already the id of line 1"]),
        (jsonl([line(1, url="/v1/nothing")]), "batch", ["line 1: url: must be one of /v1/chat/completions"]),
        (jsonl([{**line(1), "method": "GET"}]), "batch", ["line 1: method: must be POST"]),
        (jsonl([{**line(1), "body": "text"}]), "batch", ["line 1: body: must be a JSON object"]),
        (b"\n\n", "batch", ["the file has no lines"]),
        (jsonl([line(1)]), "fine-tune", ["purpose: must be batch, not 'fine-tune'"]),
    ],
)
def test_an_invalid_file_is_rejected_with_line_numbers(
    front: Gateway, content: bytes, purpose: Any, errors: list[str]
) -> None:
    with front.client() as client, pytest.raises(openai.BadRequestError) as rejected:
        client.files.create(file=("in.jsonl", content), purpose=purpose)
    assert all(error in rejected.value.message for error in errors)


def test_lines_that_are_invalid_for_their_batch_fail_it_with_line_numbers(front: Gateway, validate: Validate) -> None:
    with front.client() as client:
        strange = line(2, **{**chat(), "model": "unknown"})
        other = line(3, url="/v1/completions", model=DEMO, prompt="a")
        streamed = line(4, **chat(stream=True))
        failed = wait(client, submit(client, [line(1), strange, other, streamed]).id)
        validate("Batch", failed.to_dict())
        assert failed.status == "failed"
        assert [(error.line, error.code, error.param) for error in failed.errors.data] == [
            (2, "model_not_found", "body.model"),
            (3, "mismatched_endpoint", "url"),
            (4, "invalid_request", "body.stream"),
        ]


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/embeddings"])
def test_other_endpoints(front: Gateway, endpoint: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "A token", "max_tokens": 2}, "/v1/embeddings": {"input": "A token"},
    }  # fmt: skip
    with front.client() as client:
        ended = wait(client, submit(client, [line(1, endpoint, model="demo", **bodies[endpoint])]).id)
        assert (ended.status, ended.model, ended.request_counts.completed) == ("completed", "demo", 1)
        (row,) = answers(client, ended.output_file_id).values()
        assert row["response"]["body"]["usage"]["prompt_tokens"] > 0


def test_a_cancelled_batch_keeps_its_finished_lines(front: Gateway, validate: Validate) -> None:
    with front.client() as client:
        long = [line(number, **chat(f"Count to {number}.", max_tokens=500, ignore_eos=True)) for number in range(40)]
        batch = submit(client, [line(99), *long])
        with pytest.raises(openai.ConflictError):
            client.files.delete(batch.input_file_id)
        until(lambda: lines_completed(client, batch.id) > 0)
        cancelled = client.batches.cancel(batch.id)
        validate("Batch", cancelled.to_dict())
        ended = wait(client, batch.id)
        validate("Batch", ended.to_dict())
        output, errors = answers(client, ended.output_file_id), answers(client, ended.error_file_id)
        assert ended.status == "cancelled"
        assert len(output) == ended.request_counts.completed > 0
        assert len(errors) == ended.request_counts.failed == 41 - len(output)
        assert {row["error"]["code"] for row in errors.values()} == {"batch_cancelled"}
        assert client.batches.cancel(batch.id).status == "cancelled"
        page = client.batches.list(limit=1)
        validate("ListBatchesResponse", page.to_dict())
        assert page.data[0].id == batch.id
        done = wait(client, submit(client, [line(1)]).id)
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(done.id)


@pytest.mark.slow
def test_a_batch_expires_if_its_window_is_too_short(front: Gateway, validate: Validate) -> None:
    with front.client() as client:
        long = [line(number, **chat(f"Count to {number}.", max_tokens=500, ignore_eos=True)) for number in range(40)]
        ended = wait(client, submit(client, [line(99), *long], window="2s").id)
        validate("Batch", ended.to_dict())
        errors = answers(client, ended.error_file_id)
        assert (ended.status, len(errors)) == ("expired", ended.request_counts.failed)
        assert {row["error"]["code"] for row in errors.values()} == {"batch_expired"}
        assert len(answers(client, ended.output_file_id)) + len(errors) == 41


def usage_rows(front: Gateway) -> list[dict[str, Any]]:
    """The ledger rows that record what deployments have generated, billed or not."""
    return [*front.rows(kind="receipt"), *front.rows(kind="unbilled")]


LINES = 60
KILLS = 4


def check_receipts(batch_id: str, receipts: list[dict[str, Any]], done: Mapping[str, Any]) -> None:
    """Check that every line was answered once, and billed once, for the answer that is in the output file."""
    events = defaultdict(set)
    for receipt in receipts:
        if receipt["call_id"].startswith(batch_id):
            events[receipt["call_id"].split("-")[1]].add((receipt["event_id"], receipt["call_id"]))
    assert set(done) == {f"c-{number}" for number in range(LINES)}
    assert {len(each) for each in events.values()} == {1}
    billed = {call_id for each in events.values() for _, call_id in each}
    assert billed == {row["response"]["request_id"] for row in done.values()}


@pytest.mark.slow
def test_repeated_kills_lose_no_line_and_bill_none_twice(tmp_path: Path, local_engine: Running) -> None:
    policy = simple_policy(local_engine.url, batches={"concurrency": 6})
    chance, port, batch_id = random.Random(8), free_port(), ""
    generated = local_engine.metric("vllm:generation_tokens_total")
    for kill in range(KILLS + 1):
        with ExitStack() as stack:
            front = stack.enter_context(gateway(tmp_path, policy, port=port))
            client = stack.enter_context(front.client())
            if not batch_id:
                batch_id = submit(client, [line(number) for number in range(LINES)]).id
            if kill == KILLS:
                ended = wait(client, batch_id)
                break
            enough = kill * LINES // KILLS
            until(lambda: lines_completed(client, batch_id) >= enough)  # noqa: B023
            time.sleep(chance.random() * 0.05)  # to kill it at a random moment after that
            front.kill()
    with gateway(tmp_path, policy, port=port) as front, front.client() as client:
        assert ended.request_counts.to_dict() == {"total": LINES, "completed": LINES, "failed": 0}
        receipts = front.receipts(outcome="complete")
        assert len({receipt["event_id"] for receipt in receipts}) == len(receipts)
        check_receipts(batch_id, receipts, answers(client, ended.output_file_id))
        # The ledger also has what the engine generated for lost calls, as unbilled.
        generated = local_engine.metric("vllm:generation_tokens_total") - generated
        until(lambda: sum(row["output"] for row in usage_rows(front)) == generated)
        assert sum(receipt["output"] for receipt in receipts) == ended.usage.output_tokens
    verified = warmpath("usage", "verify", "--json", cwd=tmp_path, data_dir=str(tmp_path / "data"))
    assert verified.returncode == 0, verified.stderr


@pytest.mark.slow
def test_another_replica_takes_over_the_batch_of_a_killed_one(
    tmp_path: Path, local_engine: Running, redis_server: RedisServer
) -> None:
    policy = simple_policy(local_engine.url, batches={"concurrency": 4})
    with ExitStack() as stack:
        fronts = [
            stack.enter_context(gateway(tmp_path / name, policy, storage=redis_server.url, replica=name))
            for name in ("left", "right")
        ]
        clients = [stack.enter_context(front.client()) for front in fronts]
        lines = [line(number, **chat(f"Count to {number}.", max_tokens=16, ignore_eos=True)) for number in range(LINES)]
        batch_id = submit(clients[0], lines).id
        until(lambda: lines_completed(clients[1], batch_id) >= LINES // 6)
        owner = 0 if fronts[0].receipts(outcome="complete") else 1
        fronts[owner].kill()
        ended = wait(clients[1 - owner], batch_id)
        assert (ended.status, ended.request_counts.completed) == ("completed", LINES)
        receipts = [receipt for front in fronts for receipt in front.receipts(outcome="complete")]
        assert fronts[1 - owner].receipts(outcome="complete")
        check_receipts(batch_id, receipts, answers(clients[1 - owner], ended.output_file_id))


@pytest.mark.slow
def test_the_batch_command_submits_watches_and_fetches(front: Gateway, tmp_path: Path) -> None:
    where = ("--url", f"{front.url}/v1", "--key", "wp-dev-0123456789abcdef")
    (tmp_path / "prompts.txt").write_text("What is a token?\n\nWhat is a KV cache?\n")
    submit_prompts = ("batch", "submit", "prompts.txt", "--model", DEMO, *where)
    done = warmpath(*submit_prompts, "--output", "answers.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(": completed, 2 answered, 0 failed\n")
    rows = [json.loads(row) for row in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == ["line-1", "line-3"]

    (tmp_path / "lines.jsonl").write_bytes(jsonl([line(1, **{**chat(), "model": "unknown"})]))
    detached = warmpath("batch", "submit", "lines.jsonl", "--detach", *where, cwd=tmp_path)
    assert detached.returncode == 0, detached.stderr
    watched = warmpath("batch", "watch", detached.stdout.strip(), *where, cwd=tmp_path)
    assert watched.returncode == 1
    assert ": failed, 0 answered, 0 failed\nline 1: the model 'unknown' does not exist" in watched.stdout

    rejected = warmpath("batch", "submit", "prompts.txt", *where, cwd=tmp_path)
    assert (rejected.returncode, "use --model" in rejected.stderr) == (2, True)
    nowhere = warmpath(
        "batch", "watch", "batch_1", "--url", f"http://127.0.0.1:{free_port()}/v1", *where[2:], cwd=tmp_path
    )
    assert (nowhere.returncode, "cannot reach" in nowhere.stderr) == (1, True)
