"""`warmpath prices`: what is imported is a policy's price, and every receipt's cost can be computed again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from gateway.policy import Policy
from gateway.policy.history import record
from tests.gateway.billing.ledger.receipts import a_receipt, write_chain
from tests.gateway.cli.conftest import Warmpath


def policy(*prices: dict[str, Any]) -> dict[str, Any]:
    return {
        "deployments": [{"name": "h200-a", "base_url": "http://a/v1", "model": "m", "price": list(prices)}],
        "models": [{"name": "qwen3", "aliases": ["gpt-4o"], "deployments": ["h200-a"]}],
        "tenants": [{"name": "acme"}],
    }


def test_imported_prices_are_valid_in_a_policy(warmpath: Warmpath, tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    entry = {"input_cost_per_token": 2.5e-06, "output_cost_per_token": 1e-05, "ocr_cost_per_page": 0.001}
    file.write_text(json.dumps({"one": entry, "two": {"mode": "chat"}}))
    result = warmpath(
        "prices", "import", "litellm", str(file), "--model", "one", "--version", "v", "--from", "2026-12-01"
    )
    (price,) = yaml.safe_load(result.stdout)["one"]["price"]
    assert price["input"] == "2.5" and price["version"] == "v" and "2026-12-01" in str(price["from"])
    assert Policy.model_validate(policy(price)).deployments[0].price[0].output == 10
    assert "ocr_cost_per_page" in result.stderr
    assert warmpath("prices", "import", "litellm", str(file), "--model", "three").exit_code == 1


def test_the_difference_of_two_policies(warmpath: Warmpath, tmp_path: Path) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(yaml.safe_dump(policy({"input": "1", "output": "2"})))
    new.write_text(yaml.safe_dump(policy({"input": "1", "output": "2.5"}, {"input": "3", "class": "batch"})))
    changes = json.loads(warmpath("prices", "diff", str(old), str(new), "--json").stdout)
    assert {"model": "qwen3", "deployment": "h200-a", "applies_to": "all calls", "field": "output", "old": "2",
            "new": "2.5"} in changes  # fmt: skip
    assert {change["applies_to"] for change in changes} == {"all calls", "latency_class batch"}
    assert "same" in warmpath("prices", "diff", str(old), str(old)).stdout


def test_every_receipt_is_checked_against_the_policy_that_was_in_force(warmpath: Warmpath, tmp_path: Path) -> None:
    known = Policy.model_validate(policy({"input": "1", "output": "10"}))
    record(known, tmp_path / "policies")
    counts = {"input_uncached": 1_000_000, "cache_read": 0, "output": 1_000_000, "reasoning": 0}
    right, wrong, unknown = (
        a_receipt(**counts, cost=cost, policy_hash=policy_hash)
        for cost, policy_hash in (("11", known.hash), ("10", known.hash), ("11", "0" * 16))
    )
    write_chain(tmp_path / "ledger" / "replica", [right, wrong, unknown])
    options = ("--ledger", str(tmp_path / "ledger"), "--history", str(tmp_path / "policies"), "--json")
    result = warmpath("prices", "check", *options)
    found = json.loads(result.stdout)
    assert (result.exit_code, found["right"], found["without_policy"]) == (1, 1, 1)
    assert found["wrong"] == [{"event_id": wrong.event_id, "stated": "10", "computed": "11"}]
