"""The ledger of a real gateway, compared with the counters of a real engine."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.processes import (
    DEMO,
    Gateway,
    Wire,
    chat,
    clean_environment,
    deployment,
    endless,
    engine,
    gateway,
    simple_policy,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow(seconds=8)]


def test_the_ledger_equals_the_engines_counters(tmp_path: Path) -> None:
    with engine(tmp_path / "engine") as local_engine:
        policy = simple_policy(local_engine.url)
        policy_file = tmp_path / "policy-of-reconcile.yaml"
        policy_file.write_text(yaml.safe_dump(policy))
        with gateway(tmp_path / "gateway", policy) as local_gateway:
            reconcile = partial(_reconcile, local_gateway, policy_file)
            reconcile()
            for number in range(3):
                local_gateway.post("chat/completions", chat(f"Say {number}.", max_tokens=5 + number, ignore_eos=True))
            local_gateway.post("embeddings", {"model": DEMO, "input": "Some words."})
            with Wire(local_gateway, "chat/completions", endless()) as client:
                client.read_until(b"data: ", times=5)
                call_id = client.header("x-request-id")
            assert local_gateway.receipt(call_id)["outcome"] == "client_gone"
            until(lambda: local_engine.metric("vllm:num_requests_running") == 0)
            code, found = reconcile()
            (whole,) = found["total"]
            assert code == 0 and whole["drift"] == {"input": 0, "output": 0}
            assert whole["engine"] == whole["ledger"] and whole["engine"]["output"] > 5 + 6 + 7

            # A request that bypasses the gateway.
            subprocess.run(
                [
                    sys.executable,
                    "-c",
                    _SEND,
                    f"{local_engine.url}/v1/chat/completions",
                    json.dumps(chat(max_tokens=4, ignore_eos=True)),
                ],
                check=True,
            )
            code, found = reconcile()
            assert code == 1 and found["total"][0]["drift"]["output"] == 4


def test_choices_disconnects_preemptions_and_stop_strings_do_not_drift(tmp_path: Path) -> None:
    blocks = ("--num-blocks", "130")  # a little more than one answer may need
    with engine(tmp_path / "a", *blocks) as a, engine(tmp_path / "b", *blocks) as b:
        engines = (a, b)
        policy = simple_policy(a.url)
        policy["deployments"] = [deployment("a", a.url), deployment("b", b.url)]
        policy["models"][0]["deployments"] = ["a", "b"]
        policy_file = tmp_path / "policy-of-reconcile.yaml"
        policy_file.write_text(yaml.safe_dump(policy))
        with gateway(tmp_path / "gateway", policy) as local_gateway, ThreadPoolExecutor(9) as clients:
            rng = random.Random(20261123)

            def send(**fields: Any) -> None:
                body = chat(f"Continue from {rng.random()}.", temperature=1.0, **fields)
                local_gateway.post("chat/completions", body).raise_for_status()

            def disconnect(frames: int) -> None:
                with Wire(local_gateway, "chat/completions", endless(f"Count from {frames}.")) as client:
                    client.read_until(b"data: ", times=frames)

            def drift() -> tuple[int, int]:
                until(lambda: not any(each.metric("vllm:num_requests_running") for each in engines))
                _, found = _reconcile(local_gateway, policy_file)
                drifts = [each["drift"] for each in found["total"]]
                return sum(each["input"] for each in drifts), sum(each["output"] for each in drifts)

            _reconcile(local_gateway, policy_file)
            requests = [clients.submit(disconnect, rng.randint(100, 500)) for _ in range(3)]
            requests += [
                clients.submit(send, max_tokens=600, ignore_eos=True, n=2, stream=n % 3 == 0) for n in range(6)
            ]
            for each in requests:
                each.result()
            assert sum(each.metric("vllm:num_preemptions_total") for each in engines) > 0
            assert len(local_gateway.receipts()) == len(requests)
            assert drift() == (0, 0)

            stops = [rng.sample("aeinorst", 2) for _ in range(6)]
            stopping = [clients.submit(send, max_tokens=60, stop=stop, n=1 + n % 3) for n, stop in enumerate(stops)]
            for each in stopping:
                each.result()
            assert drift() == (0, 0)
            assert sum(each.metric("warmpath:unwanted_tokens_total") for each in engines) > 0


def _reconcile(local_gateway: Gateway, policy_file: Path) -> tuple[int, Any]:
    command = [sys.executable, "-m", "gateway", "usage", "reconcile", "--json"]
    options = ["--ledger", str(local_gateway.ledger), "--policy", str(policy_file)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=clean_environment())
    return done.returncode, json.loads(done.stdout)


_SEND = (
    "import sys, httpx2; "
    "httpx2.post(sys.argv[1], content=sys.argv[2], headers={'content-type': 'application/json'}).raise_for_status()"
)
