"""What the dashboard is given, by several workers as real processes: the calls of all of them, whichever is silent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.processes import PATIENCE_SECONDS, Gateway, Running, chat, gateway, key, simple_policy, until

pytestmark = pytest.mark.e2e

ADMIN_KEY = "an-admin-key-of-some-length"
WORKERS = 2
ASKED = "wherefore-art-thou"


@pytest.fixture
def front(tmp_path: Path, local_engine: Running) -> Iterator[Gateway]:
    with gateway(
        tmp_path,
        simple_policy(local_engine.url),
        storage=f"sqlite:///{tmp_path / 'state.db'}",
        workers=str(WORKERS),
        admin_port="0",
        admin_key=ADMIN_KEY,
    ) as started:
        yield started


def look(front: Gateway, path: str) -> httpx2.Response:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    return httpx2.get(f"{front.admin_url}{path}", headers=headers, timeout=PATIENCE_SECONDS)


def last_calls(front: Gateway, limit: int = 100) -> dict[str, Any]:
    reply = look(front, f"/admin/calls?limit={limit}")
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def call_until_all_have_worked(front: Gateway) -> dict[str, httpx2.Response]:
    """By call id. The kernel deals connections out to the workers."""
    replies = {}
    with ThreadPoolExecutor(4) as callers:
        while {call["worker"] for call in last_calls(front, 500)["data"]} != set(range(WORKERS)):
            assert len(replies) < 400, "one worker gets no calls"
            asked = [callers.submit(front.post, "chat/completions", chat(ASKED, max_tokens=2)) for _ in range(4)]
            replies |= {each.result().headers["x-request-id"]: each.result() for each in asked}
    return replies


def test_the_calls_of_all_workers_are_told(front: Gateway) -> None:
    replies = call_until_all_have_worked(front)
    # A call is kept right behind its reply.
    told = until(lambda: found if len((found := last_calls(front, 500))["data"]) == len(replies) else None)
    assert told["workers"] == {"asked": WORKERS, "answered": WORKERS}
    assert {call["call_id"] for call in told["data"]} == replies.keys()
    assert [call["time"] for call in told["data"]] == sorted((call["time"] for call in told["data"]), reverse=True)
    for call in told["data"]:
        receipt, reply = front.receipt(call["call_id"]), replies[call["call_id"]]
        assert (call["event_id"], call["trace_id"]) == (receipt["event_id"], receipt["trace_id"])
        assert call["usage"]["output"] == receipt["output"] == reply.json()["usage"]["completion_tokens"]
        assert 0 < call["own_ms"] < call["duration_ms"] and 0 < call["ttft_ms"] <= call["duration_ms"]
        whole = [phase for phase in call["phases"] if not phase["within_chat"]]
        assert (whole[0]["start_ms"], whole[-1]["end_ms"]) == (0, call["duration_ms"])
    shown = look(front, "/admin/calls?limit=500").text
    assert ASKED not in shown and key("dev") not in shown


def test_a_worker_that_hangs_hides_nobody_else(front: Gateway) -> None:
    call_until_all_have_worked(front)
    supervisor = front.process.pid
    workers = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    hanging = int(workers[-1])  # the first one has the admin API
    os.kill(hanging, signal.SIGSTOP)
    try:
        told = last_calls(front)
        metrics = look(front, "/admin/metrics").text
    finally:
        os.kill(hanging, signal.SIGCONT)
    assert told["workers"] == {"asked": WORKERS, "answered": WORKERS - 1}
    assert {call["worker"] for call in told["data"]} == {0}
    assert 'warmpath_worker_up{worker="1"} 0' in metrics and 'warmpath_worker_up{worker="0"} 1' in metrics
    assert last_calls(front)["workers"]["answered"] == WORKERS


def test_the_pages_are_served_to_anyone_and_nothing_else_is(front: Gateway) -> None:
    home = httpx2.get(f"{front.admin_url}/")
    assert (home.status_code, home.headers["location"]) == (307, "/dashboard/")
    page = httpx2.get(f"{front.admin_url}/dashboard/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    again = httpx2.get(f"{front.admin_url}/dashboard/", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx2.head(f"{front.admin_url}/dashboard/").status_code == 200
    for path in ("/admin/calls", "/admin/policy", "/admin/diagnosis", "/admin/metrics", "/dashboard/../admin/calls"):
        reply = httpx2.get(f"{front.admin_url}{path}")
        assert reply.status_code in (401, 404) and set(reply.json()) == {"error"}, path
    for path in ("/dashboard/", "/"):
        assert httpx2.get(f"{front.url}{path}").status_code == 404  # clients' listener has none
