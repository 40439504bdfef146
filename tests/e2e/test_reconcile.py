"""The ledger of a real gateway held against the counters of a real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.processes import DEMO, Wire, chat, clean_environment, endless, engine, gateway, simple_policy, until

pytestmark = pytest.mark.e2e


def test_what_the_engine_did_is_what_was_billed(tmp_path: Path) -> None:
    with engine(tmp_path / "engine") as local_engine:
        policy = simple_policy(local_engine.url)
        policy_file = tmp_path / "policy-of-reconcile.yaml"
        policy_file.write_text(yaml.safe_dump(policy))
        with gateway(tmp_path / "gateway", policy) as local_gateway:

            def reconcile() -> tuple[int, Any]:
                command = [sys.executable, "-m", "gateway", "usage", "reconcile", "--json"]
                options = ["--ledger", str(local_gateway.ledger), "--policy", str(policy_file)]
                done = subprocess.run([*command, *options], capture_output=True, text=True, env=clean_environment())
                return done.returncode, json.loads(done.stdout)

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

            # Work that the gateway knows nothing of.
            subprocess.run(
                [
                    sys.executable,
                    "-c",
                    _ASK,
                    f"{local_engine.url}/v1/chat/completions",
                    json.dumps(chat(max_tokens=4, ignore_eos=True)),
                ],
                check=True,
            )
            code, found = reconcile()
            assert code == 1 and found["total"][0]["drift"]["output"] == 4


_ASK = (
    "import sys, httpx2; "
    "httpx2.post(sys.argv[1], content=sys.argv[2], headers={'content-type': 'application/json'}).raise_for_status()"
)
