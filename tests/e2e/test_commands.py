"""Commands next to a running gateway: explain, check, usage, keys, and a policy that changes while it runs."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.e2e.processes import (
    DEMO,
    Gateway,
    Running,
    chat,
    deployment,
    gateway,
    simple_policy,
    tenant,
    until,
    warmpath,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GENERATED = "vllm:generation_tokens_total"
FLEX = [{"match": {"tenant": "other"}, "class": "batch"}, {"match": {"service_tier": "flex"}, "class": "batch"}]


@pytest.fixture
def two_servers(tmp_path: Path) -> Path:
    """A policy with two deployments; the second one has the higher prefill speed."""
    file = tmp_path / "policy.yaml"
    policy = simple_policy(
        "http://127.0.0.1:9",
        deployments=[
            deployment("slow", "http://127.0.0.1:9", prefill_tokens_per_second="1k"),
            deployment("fast", "http://127.0.0.1:9", prefill_tokens_per_second="8k"),
        ],
        models=[{"name": DEMO, "aliases": ["demo"], "deployments": ["slow", "fast"]}],
        rules=FLEX,
        tenants=[tenant("dev"), tenant("other")],
    )
    file.write_text(yaml.safe_dump(policy))
    return file


def test_explain(tmp_path: Path, two_servers: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps(chat("Why? " * 2000, service_tier="flex") | {"model": "demo"}))
    result = warmpath("explain", str(two_servers), "--request", str(request), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "demo (alias of warmpath-demo)" in result.stdout
    assert 'rule 2 matches {"service_tier": ["flex"]}: class batch' in result.stdout
    assert "class   batch" in result.stdout
    assert "fast is predicted to cost" in result.stdout

    explanation = json.loads(
        warmpath("explain", str(two_servers), "--request", str(request), "--json", cwd=tmp_path).stdout
    )
    assert (explanation["rule"]["index"], explanation["rule"]["class"], explanation["class"]) == (1, "batch", "batch")
    costs = {candidate["deployment"]: candidate["cost_seconds"] for candidate in explanation["candidates"]}
    assert list(costs) == ["fast", "slow"]
    assert 0 < costs["fast"] < costs["slow"]
    assert all(candidate["reason"] for candidate in explanation["candidates"])
    assert explanation["why"].startswith("fast is predicted to cost")

    # The prompts of earlier requests are cached, and the tenant decides which rule matches.
    options = ("--request", str(request), "--after", str(request), "--tenant", "other", "--json")
    explanation = json.loads(warmpath("explain", str(two_servers), *options, cwd=tmp_path).stdout)
    assert explanation["rule"]["index"] == 0
    assert explanation["candidates"][0]["matched_tokens"] > 0
    assert explanation["candidates"][0]["cost_seconds"] < costs["fast"]


def test_explain_reports_an_invalid_request(tmp_path: Path, two_servers: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"model": "demo", "messages": [{"role": 1}]}))
    result = warmpath("explain", str(two_servers), "--request", str(request), cwd=tmp_path)
    assert result.returncode == 1
    assert "messages[0].role" in result.stderr


def test_check(tmp_path: Path, two_servers: Path) -> None:
    good = warmpath("check", str(two_servers), cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    policy = two_servers.read_text()
    two_servers.write_text(policy + "colour: green\n")
    bad = warmpath("check", str(two_servers), cwd=tmp_path)
    assert bad.returncode == 1
    assert f"{two_servers}:{policy.count(chr(10)) + 1}:1: colour: unknown key" in bad.stderr


def ask(front: Gateway, model: str = DEMO, **fields: Any) -> httpx2.Response:
    return front.post("chat/completions", chat(max_tokens=2, **fields) | {"model": model})


def test_a_policy_that_changes_while_the_gateway_runs(tmp_path: Path, local_engine: Running) -> None:
    policy = simple_policy(local_engine.url)
    with gateway(tmp_path, policy) as front:
        file = tmp_path / "policy.yaml"
        assert ask(front).status_code == 200
        assert ask(front, "new").status_code == 404
        in_force = httpx2.get(f"{front.url}/ready").json()["policy"]

        file.write_text(file.read_text() + "\ncolour: green\n")
        until(lambda: front.metric("warmpath_policy_reloads_total", result="rejected") >= 1)
        assert ask(front).status_code == 200
        assert httpx2.get(f"{front.url}/ready").json()["policy"] == in_force
        assert "colour" in front.log.read_text()

        more = [*policy["models"], {"name": "new", "deployments": ["local"]}]
        file.write_text(yaml.safe_dump(policy | {"models": more}))
        reply = until(lambda: (reply := ask(front, "new")).status_code == 200 and reply)
        assert httpx2.get(f"{front.url}/ready").json()["policy"] != in_force
        receipt = front.receipt(reply.headers["x-request-id"])
        assert receipt["policy_hash"] == httpx2.get(f"{front.url}/ready").json()["policy"]
        assert {row["policy_hash"] for row in front.receipts(model_asked=DEMO)} == {in_force}


def test_keys_created_while_the_gateway_runs(tmp_path: Path, local_engine: Running) -> None:
    storage = f"sqlite:///{tmp_path / 'state.db'}"
    with gateway(tmp_path, simple_policy(local_engine.url), storage=storage) as front:
        made = warmpath("keys", "create", "--tenant", "dev", "--json", cwd=tmp_path, storage=storage)
        assert made.returncode == 0, made.stderr
        created = json.loads(made.stdout)
        headers = {"authorization": f"Bearer {created['key']}"}

        def status() -> int:
            return httpx2.get(f"{front.url}/v1/models", headers=headers).status_code

        assert status() == 200
        revoked = warmpath("keys", "revoke", created["id"], cwd=tmp_path, storage=storage)
        assert revoked.returncode == 0, revoked.stderr
        until(lambda: status() == 401)
        kept = (tmp_path / "state.db").read_bytes() + (tmp_path / "state.db-wal").read_bytes()
        assert created["key"].encode() not in kept


def test_usage_equals_the_ledger(tmp_path: Path, local_engine: Running) -> None:
    policy = simple_policy(local_engine.url, tenants=[tenant("dev"), tenant("other")])
    data = str(tmp_path / "data")
    generated = local_engine.metric(GENERATED)
    with gateway(tmp_path, policy) as front:
        for who, body in (
            ("dev", chat("a", max_tokens=5, ignore_eos=True)),
            ("dev", chat("b", max_tokens=5, ignore_eos=True, stream=True)),
            ("dev", chat("c " * 200, max_tokens=3, temperature=0)),
            ("dev", chat("c " * 200, max_tokens=3, temperature=0)),
            ("other", chat("c " * 200, max_tokens=3)),
            ("other", chat("c " * 200, max_tokens=3)),
        ):
            assert front.post("chat/completions", body, who).status_code == 200
        rows = front.receipts()
        assert len(rows) == 6

        by_tenant = json.loads(warmpath("usage", "--by", "tenant", "--json", cwd=tmp_path, data_dir=data).stdout)
        assert [line["tenant"] for line in by_tenant] == ["dev", "other"]
        for line in by_tenant:
            mine = [row for row in rows if row["tenant"] == line["tenant"]]
            worked = [row for row in mine if row["source"] != "cache"]
            assert line["requests"] == len(mine)
            assert line["cache_hits"] == len(mine) - len(worked)
            for count in ("input_uncached", "cache_read", "output"):
                assert line[count] == sum(row[count] for row in worked)
            assert Decimal(line["cost"]["USD"]) == sum(Decimal(row["cost"]) for row in mine)
            assert (line["inexact"], line["unpriced"]) == (0, 0)
        assert by_tenant[0]["cache_hits"] == 1
        assert by_tenant[1]["cache_read"] > 0, "the second of two equal prompts was cached"
        assert Decimal(by_tenant[1]["saved"]["USD"]) > 0
        # The billed tokens equal the engine's own count.
        assert sum(line["output"] for line in by_tenant) == local_engine.metric(GENERATED) - generated

    whole = warmpath("usage", cwd=tmp_path, data_dir=data)
    assert whole.stdout.split("\n")[1].split()[0] == "6"
    (file,) = (tmp_path / "data" / "ledger" / "gw").glob("0*.jsonl")
    num_rows = len(file.read_bytes().splitlines())  # open-call rows included
    verified = warmpath("usage", "verify", cwd=tmp_path, data_dir=data).stdout
    assert verified.startswith(f"{num_rows} rows verified")
    file.write_bytes(file.read_bytes().replace(b'"output":5', b'"output":4', 1))
    tampered = warmpath("usage", "verify", cwd=tmp_path, data_dir=data)
    assert tampered.returncode == 1
    assert f"{file.name}" in tampered.stderr
