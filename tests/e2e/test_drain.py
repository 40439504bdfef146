"""SIGTERM drains the gateway: requests in flight are completed, new ones are rejected, and the process exits with 0.

The streams in flight wait for the test, so none of them ends before the test has looked at the drain.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.faults.upstreams import TOKENS, HeldStreams, listening
from tests.e2e.processes import IdleConnection, Wire, chat, deployment, gateway, simple_policy, tenant, until

pytestmark = pytest.mark.e2e


@pytest.fixture
def held() -> HeldStreams:
    return HeldStreams()


@pytest.fixture
def policy(held: HeldStreams) -> Iterator[dict[str, Any]]:
    """One deployment of two slots, whose streams end when `held` is released."""
    with listening({"held": held}) as upstreams:
        url = f"http://127.0.0.1:{upstreams.ports['held']}"
        yield simple_policy(
            url,
            deployments=[deployment("local", url, provider="openai", max_concurrency=2)],
            tenants=[tenant("dev", limits={"concurrency": 8})],
        )


def test_streams_in_flight_are_completed(tmp_path: Path, policy: dict[str, Any], held: HeldStreams) -> None:
    storage = f"sqlite:///{tmp_path / 'state.db'}"
    with gateway(tmp_path, policy, storage=storage, drain_seconds="60") as front, IdleConnection(front):
        streams = [Wire(front, "chat/completions", chat(stream=True)) for _ in "ab"]
        for stream in streams:
            stream.read_until(b"data: ", times=2)
        waiting = Wire(front, "chat/completions", chat())
        until(lambda: front.metric("warmpath_queue_depth") == 1)
        front.process.send_signal(signal.SIGTERM)
        status, refused = waiting.read_reply()
        assert (status, refused["error"]["code"]) == (503, "overloaded")
        waiting.leave()
        held.release()
        for stream in streams:
            assert b"data: [DONE]" in stream.read_to_end()
            assert front.receipt(stream.header("x-request-id"))["outcome"] == "complete"
            stream.leave()
        assert front.process.wait(60) == 0
    assert [receipt["output"] for receipt in front.receipts()] == [TOKENS, TOKENS]


def test_idle_connections_are_closed_and_new_ones_refused(
    tmp_path: Path, policy: dict[str, Any], held: HeldStreams
) -> None:
    with gateway(tmp_path, policy, drain_seconds="60") as front:
        with IdleConnection(front) as idle, Wire(front, "chat/completions", chat(stream=True)) as stream:
            stream.read_until(b"data: ", times=2)
            front.process.send_signal(signal.SIGTERM)
            idle.wait_until_closed()  # the listener is closed before
            with pytest.raises(httpx2.ConnectError):
                httpx2.get(f"{front.url}/health")
            held.release()
            assert b"data: [DONE]" in stream.read_to_end()
        assert front.process.wait(60) == 0


def test_streams_longer_than_the_drain_time_end_with_an_error(tmp_path: Path, policy: dict[str, Any]) -> None:
    with gateway(tmp_path, policy, drain_seconds="0.2") as front:
        with Wire(front, "chat/completions", chat(stream=True)) as stream:
            stream.read_until(b"data: ", times=2)
            front.process.send_signal(signal.SIGTERM)
            received = stream.read_to_end()
            call_id = stream.header("x-request-id")
        assert front.process.wait(60) == 0
        assert b"[DONE]" not in received
        assert b'"error"' in received.split(b"data: ")[-1]
        receipt = front.receipt(call_id)
        assert receipt["outcome"] == "upstream_cut"
        assert 0 < receipt["output"] < TOKENS


def test_a_second_ctrl_c_exits_at_once_and_loses_no_receipt(tmp_path: Path, policy: dict[str, Any]) -> None:
    with gateway(tmp_path, policy, drain_seconds="60") as front:
        with IdleConnection(front) as idle, Wire(front, "chat/completions", chat(stream=True)) as stream:
            stream.read_until(b"data: ", times=2)
            front.process.send_signal(signal.SIGINT)
            idle.wait_until_closed()
            front.process.send_signal(signal.SIGINT)
            received = stream.read_to_end()
            call_id = stream.header("x-request-id")
        assert front.process.wait(60) == 0
        assert b"[DONE]" not in received and b'"error"' in received.split(b"data: ")[-1]
        assert "CancelledError" not in front.log.read_text()
        assert front.receipt(call_id)["outcome"] == "upstream_cut"
