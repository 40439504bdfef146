"""`warmpath serve --workers N`: processes on one port behave as one gateway, and survive each other's crashes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gateway.billing.ledger.chain import segments
from gateway.deployments.evidence import SAME_CRASH_SECONDS
from tests.e2e.processes import (
    Gateway,
    Running,
    Wire,
    chat,
    complete_lines,
    endless,
    engine,
    gateway,
    simple_policy,
    tenant,
    until,
    warmpath,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORKERS = 2


@pytest.fixture
def front(tmp_path: Path, local_engine: Running) -> Iterator[Gateway]:
    policy = simple_policy(local_engine.url, tenants=[tenant("dev"), tenant("few", limits={"requests": "5/1h"})])
    with gateway(tmp_path, policy, storage=f"sqlite:///{tmp_path / 'state.db'}", workers=str(WORKERS)) as started:
        yield started


def pids(front: Running) -> list[int]:
    """Process ids of the workers."""
    pid = front.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # empty for a zombie
    except FileNotFoundError:
        return False


def calls_of(front: Gateway, worker: int, kind: str) -> set[str]:
    """Ids of the calls that have a row of this kind in the worker's chain."""
    files = segments(front.ledger / f"gw.w{worker}")
    rows = [json.loads(line) for file in files for line in complete_lines(file)]
    return {row["call_id"] for row in rows if row["kind"] == kind}


def streams_on_all_workers(front: Gateway, stack: ExitStack, body: dict[str, Any]) -> dict[str, Wire]:
    """Start streams until each worker has one, since the kernel distributes connections. Returns them by call id.

    Before the engine is full, the oldest stream is closed and not returned.
    """
    streams: dict[str, Wire] = {}
    for _ in range(60):  # the chance that one of two workers gets none of them is below 1e-17
        if all(calls_of(front, worker, "opened") & streams.keys() for worker in range(WORKERS)):
            return streams
        if len(streams) == 6:
            streams.pop(next(iter(streams))).leave()
        stream = stack.enter_context(Wire(front, "chat/completions", body))
        stream.read_until(b"data: ")
        streams[stream.header("x-request-id")] = stream
    raise AssertionError("one worker got all streams")


def test_workers_share_limits_and_their_metrics_and_usage_add_up(front: Gateway, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as callers:
        replies = [callers.submit(front.post, "chat/completions", chat(max_tokens=2), "few") for _ in range(16)]
        statuses = [each.result().status_code for each in replies]
    assert sorted(statuses) == [200] * 5 + [429] * 11
    until(lambda: front.metric("warmpath_requests_total", status="200") == 5)
    until(lambda: front.metric("warmpath_requests_total", status="429") == 11)
    until(lambda: [front.metric("warmpath_worker_up", worker=str(n)) for n in range(WORKERS)] == [1, 1])
    receipts = until(lambda: receipts if len(receipts := front.receipts(tenant="few")) == 5 else None)
    usage = warmpath("usage", "--by", "tenant", "--json", cwd=tmp_path, ledger_dir=str(front.ledger))
    assert usage.returncode == 0, usage.stderr
    (line,) = json.loads(usage.stdout)
    assert (line["requests"], line["output"]) == (5, sum(receipt["output"] for receipt in receipts))


def test_a_killed_worker_loses_its_own_streams_and_nothing_else(front: Gateway, tmp_path: Path) -> None:
    with ExitStack() as stack:
        streams = streams_on_all_workers(front, stack, chat(stream=True, max_tokens=400, ignore_eos=True))
        lost = calls_of(front, 0, "opened") & streams.keys()
        os.kill(pids(front)[0], signal.SIGKILL)
        for call_id, stream in streams.items():
            if call_id in lost:
                with pytest.raises((AssertionError, ConnectionError)):
                    stream.read_until(b"[DONE]")
            else:
                assert b"data: [DONE]" in stream.read_to_end()
        # Its successor closes its open calls, and accepts new ones.
        until(lambda: calls_of(front, 0, "receipt") >= lost)
        until(lambda: front.metric("warmpath_worker_up") == WORKERS)
        assert front.post("chat/completions", chat(max_tokens=2)).status_code == 200
    assert {front.receipt(call_id)["outcome"] for call_id in lost} == {"gateway_lost"}
    assert {front.receipt(call_id)["outcome"] for call_id in streams.keys() - lost} == {"complete"}
    assert len(pids(front)) == WORKERS
    assert "worker 0 was ended by SIGKILL" in front.log.read_text()
    assert front.stop() == 0
    verified = warmpath("usage", "verify", cwd=tmp_path, ledger_dir=str(front.ledger))
    assert verified.returncode == 0, verified.stdout


@pytest.mark.slow(seconds=20)
def test_all_workers_quarantine_a_request_that_crashed_an_engine_twice(tmp_path: Path) -> None:
    """An engine is killed during its answer, and so is its successor. Then no worker sends it to an engine again."""
    with ExitStack() as engines:
        mortal = engines.enter_context(engine(tmp_path / "one"))
        port, storage = urlsplit(mortal.url).port, f"sqlite:///{tmp_path / 'state.db'}"
        assert port is not None
        with gateway(tmp_path, simple_policy(mortal.url), storage=storage, workers=str(WORKERS)) as front:
            for successor in ("two", "three"):
                with Wire(front, "chat/completions", endless()) as deadly:
                    deadly.read_until(b"data: ")
                    mortal.kill()
                    assert b'"upstream_cut"' in deadly.read_to_end()
                mortal = engines.enter_context(engine(tmp_path / successor, port=port))
                time.sleep(SAME_CRASH_SECONDS)  # connections that are lost within it count as one crash
                until(lambda: front.post("chat/completions", chat(max_tokens=2)).status_code == 200)

            def code_of_retry() -> str:
                with Wire(front, "chat/completions", endless()) as again:
                    if (status := again.read_status()) == 200:
                        return "answered"
                    return f"{status}"

            # The other worker learns of it a moment later. The kernel distributes connections.
            until(lambda: {code_of_retry() for _ in range(8)} == {"422"})


def test_each_batch_line_is_processed_once_if_a_worker_is_killed(front: Gateway) -> None:
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": chat(f"Say {n}.", max_tokens=4)}
        for n in range(400)
    ]
    client = front.client(max_retries=5)  # its connection may be to the killed worker
    file = client.files.create(file="\n".join(map(json.dumps, lines)).encode(), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    workers = until(
        lambda: [n for n in range(WORKERS) if calls_of(front, n, "receipt")]
    )  # one worker processes the batch
    assert len(workers) == 1
    os.kill(pids(front)[workers[0]], signal.SIGKILL)
    assert len(front.receipts()) < len(lines)
    ended = until(lambda: done if (done := client.batches.retrieve(batch.id)).status == "completed" else None)
    assert (ended.request_counts.completed, ended.request_counts.failed) == (400, 0)
    assert len({receipt["call_id"].rpartition("-")[0] for receipt in front.receipts()}) == len(front.receipts()) == 400


def test_all_workers_complete_their_streams_on_sigterm(front: Gateway) -> None:
    with ExitStack() as stack:
        streams = streams_on_all_workers(front, stack, chat(stream=True, max_tokens=150, ignore_eos=True))
        front.process.send_signal(signal.SIGTERM)
        for stream in streams.values():
            assert b"data: [DONE]" in stream.read_to_end()
    assert front.process.wait(60) == 0


def test_sighup_reloads_the_policy_of_all_workers(front: Gateway, tmp_path: Path) -> None:
    def all_rejected(times: int) -> bool:
        name = "warmpath_policy_reloads_total"
        return all(front.metric(name, worker=str(n), result="rejected") == times for n in range(WORKERS))

    (tmp_path / "policy.yaml").write_text("no: policy")  # each worker notices the change once
    until(lambda: all_rejected(1))
    front.process.send_signal(signal.SIGHUP)  # each worker reloads again
    until(lambda: all_rejected(2))
    assert front.post("chat/completions", chat(max_tokens=2)).status_code == 200


def test_open_calls_of_former_workers_are_closed_by_a_gateway_with_fewer(tmp_path: Path, local_engine: Running) -> None:
    policy, storage = simple_policy(local_engine.url), f"sqlite:///{tmp_path / 'state.db'}"
    with gateway(tmp_path, policy, storage=storage, workers=str(WORKERS)) as front, ExitStack() as stack:
        streams = streams_on_all_workers(front, stack, endless())
        workers = pids(front)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)  # no worker restarts in the meantime
        front.kill()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
    with gateway(tmp_path, policy, storage=storage) as alone:
        receipts = [alone.receipt(call_id) for call_id in streams]
    assert {receipt["outcome"] for receipt in receipts} == {"gateway_lost"}


def test_workers_exit_if_their_supervisor_is_killed(front: Gateway) -> None:
    workers = pids(front)
    front.kill()
    for pid in workers:
        until(
            lambda pid=pid: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()
        )


def test_a_failed_start_is_reported_once(tmp_path: Path, local_engine: Running) -> None:
    policy = simple_policy(local_engine.url)
    refused = warmpath("serve", "--workers", "2", "--port", "0", cwd=tmp_path)
    assert refused.returncode == 2
    assert "WARMPATH_STORAGE must be sqlite:///FILE or redis://HOST" in refused.stderr
    with gateway(tmp_path, policy, workers="1") as other:
        port = other.url.rpartition(":")[2]
        taken = warmpath(
            "serve", "--workers", "2", "--port", port, cwd=tmp_path, storage=f"sqlite:///{tmp_path / 'state.db'}"
        )
    assert taken.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in taken.stderr
