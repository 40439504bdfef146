"""A real Prometheus scrapes a running gateway: every Grafana panel has data, and every alert fires on its fault.

The alert rules run with short times (`tests/prometheus.py`); `tests/test_alerts.py` tests them with their own times.
"""

from __future__ import annotations

import itertools
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.e2e.faults.upstreams import HeldStreams, listening
from tests.e2e.processes import (
    DEMO,
    PATIENCE_SECONDS,
    Gateway,
    Running,
    chat,
    deployment,
    gateway,
    tenant,
    until,
)
from tests.otlp_collector import Collector
from tests.ports import free_port
from tests.prometheus import Prometheus, alert_names, panel_queries, prometheus, tool

pytestmark = [pytest.mark.e2e, pytest.mark.slow(seconds=12)]

RULES = "Answer briefly. " * 60  # about 250 tokens, cached after the first request
LEDGER_BYTES = 4096  # a limit below the ledger's size, so that no more row can be written
BUDGET = "0.0004"  # spent by some requests


class Traffic:
    """Clients that send requests until they are stopped. They share a prefix until `forget_prefix` is called.

    One of them asks for a model whose deployment is down. Its requests wait for retries, so it has its own thread.
    """

    def __init__(self, front: Gateway) -> None:
        self._front = front
        self._unique = threading.Event()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(model,)) for model in (DEMO, "dead")]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def forget_prefix(self) -> None:
        self._unique.set()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _run(self, model: str) -> None:
        for number in itertools.count():
            if self._stopped.is_set():
                return
            start = f"{number}. " if self._unique.is_set() else ""
            body = chat(f"{start}{RULES}{number}", model=model, max_tokens=4, stream=bool(number % 2))
            self._front.post("chat/completions", body, "search" if model == "dead" or number % 2 else "dev")


def test_every_panel_has_data_and_every_alert_fires(
    tmp_path: Path, local_engine: Running, collector: Collector
) -> None:
    tool("prometheus")
    hold = HeldStreams()
    with listening({"slow": hold}) as upstreams:
        policy = policy_of(local_engine.url, f"http://127.0.0.1:{upstreams.ports['slow']}")
        nowhere = f"redis://127.0.0.1:{free_port()}"
        settings: dict[str, Any] = {"otlp_endpoint": collector.url, "reconcile_seconds": "2", "ledger_ship": nowhere}
        with gateway(tmp_path / "gw", policy, **settings) as front:
            targets = {"gateway": urlsplit(front.url).netloc, "engine": urlsplit(local_engine.url).netloc}
            with prometheus(tmp_path / "prometheus", free_port(), targets) as seen, Traffic(front) as traffic:
                held = [hold_slot(front, prompt) for prompt in ("first", "second")]
                assert_every_panel_has_data(seen)
                assert_exemplars_are_traces(seen, collector)
                traffic.forget_prefix()
                bypass(local_engine)
                (tmp_path / "gw" / "policy.yaml").write_text("tenants: none\n")
                ends = {"WarmpathGatewayDown", "WarmpathLedgerUnwritable"}
                wait_for_alerts(seen, alert_names() - ends)
                hold.release()
                with full_disk(front):
                    wait_for_alerts(seen, alert_names() - {"WarmpathGatewayDown"})
                traffic.stop()
                for thread in held:
                    thread.join()
                front.kill()
                wait_for_alerts(seen, alert_names())


def hold_slot(front: Gateway, prompt: str) -> threading.Thread:
    """Send a request to the deployment with one slot, which does not answer before it is released."""
    body = chat(prompt, model="slow", stream=True)
    thread = threading.Thread(target=front.post, args=("chat/completions", body, "search"))
    thread.start()
    return thread


def policy_of(engine: str, slow: str) -> dict[str, Any]:
    return {
        "deployments": [
            deployment("local", engine),
            deployment("one-slot", slow, provider="openai", model="m", max_concurrency=1),
            deployment("down", f"http://127.0.0.1:{free_port()}"),
        ],
        "models": [
            {"name": DEMO, "deployments": ["local"]},
            {"name": "slow", "deployments": ["one-slot"]},
            {"name": "dead", "deployments": ["down"]},
        ],
        "tenants": [tenant("dev", limits={"budget": {"amount": BUDGET, "per": "total"}}), tenant("search")],
    }


def assert_every_panel_has_data(seen: Prometheus) -> None:
    empty = panel_queries()
    end = time.monotonic() + PATIENCE_SECONDS
    while empty := {name: query for name, query in empty.items() if not seen.values(query)}:
        assert time.monotonic() < end, empty
        time.sleep(0.2)


def assert_exemplars_are_traces(seen: Prometheus, collector: Collector) -> None:
    """The points of a latency panel link to traces that the collector has."""
    now = time.time()
    query = "warmpath_request_duration_seconds_bucket"
    found = seen.get("query_exemplars", query=query, start=now - 60, end=now + 60)
    linked = {each["labels"]["trace_id"] for series in found for each in series["exemplars"]}
    assert linked
    until(lambda: linked & {span.trace_id.hex() for span in collector.spans})


def bypass(engine: Running) -> None:
    """Use the engine directly, so that it counts tokens that no gateway bills."""
    body = {"model": DEMO, "prompt": [100] * 900, "max_tokens": 1}
    assert httpx2.post(f"{engine.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS).status_code == 200


@contextmanager
def full_disk(front: Gateway) -> Iterator[None]:
    """The gateway's files cannot grow beyond a size that its ledger has already."""
    pid = front.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (LEDGER_BYTES, before[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def wait_for_alerts(seen: Prometheus, names: set[str]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while missing := names - seen.fired():
        assert time.monotonic() < end, missing
        time.sleep(0.2)
