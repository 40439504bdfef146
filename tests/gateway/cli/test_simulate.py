from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.simulator.compare import STRATEGIES
from tests.gateway.cli.conftest import Warmpath

POLICIES = Path(__file__).parents[3] / "policies"
ROWS = [{"timestamp": 100 * n, "input_length": 2048, "output_length": 9, "hash_ids": [0, 1, 2, 3 + n % 5]}
        for n in range(40)]  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return str(path)


def test_strategies_are_compared(warmpath: Warmpath, trace: str, tmp_path: Path) -> None:
    result = warmpath(
        "simulate", "--trace", trace, "--deployments", "2", "--capacity", "64k", "--plot", "chart.svg",
        "--policy", str(POLICIES / "default.yaml"),
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "chats: 40 requests, 2 deployments, caches of 64,000 tokens" in result.stdout
    for name in STRATEGIES:
        assert f"\n{name} " in result.stdout
    assert (tmp_path / "chart.svg").read_text().startswith("<svg ")
    assert f"{len(STRATEGIES)} of {len(STRATEGIES)}" in result.stderr


def test_roles_are_ignored_and_that_is_said(warmpath: Warmpath, trace: str, tmp_path: Path) -> None:
    (tmp_path / "roles.yaml").write_text(json.dumps({
        "deployments": [
            {"name": name, "base_url": f"http://{name}.invalid/v1", "provider": "vllm", "model": "m", "role": role}
            for name, role in (("p", "prefill"), ("d", "decode"))
        ],
        "models": [{"name": "m", "deployments": ["p", "d"]}],
        "tenants": [{"name": "t"}],
    }))  # fmt: skip
    result = warmpath("simulate", "--trace", trace, "--capacity", "64k", "--only", "warmpath", "--policy", "roles.yaml")
    assert result.exit_code == 0, result.stderr
    assert "`role` is ignored" in result.stderr
    assert "40 requests" in result.stdout


def test_json_and_a_single_strategy(warmpath: Warmpath, trace: str) -> None:
    result = warmpath(
        "simulate", "--trace", trace, "--capacity", "64k", "--only", "warmpath", "--gateways", "2", "--json"
    )
    (ours,) = json.loads(result.stdout)["strategies"]
    assert ours["requests"] == 40
    assert ours["hit_rate"] == pytest.approx(39 * 1536 / (40 * 2048), abs=0.25)


def test_sessions_can_be_batch_and_real_time(warmpath: Warmpath, tmp_path: Path) -> None:
    rows = [{"s": f"s{n % 4}", "in": 640 * (n // 4 + 1), "out": 9, "think": 2, "rl": [[1, 10 * (n // 4 + 1)]]}
            for n in range(24)]  # fmt: skip
    (tmp_path / "agents.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = warmpath(
        "simulate", "--trace", "agents.jsonl", "--capacity", "4k", "--realtime-every", "2", "--only", "warmpath"
    )
    assert result.exit_code == 0, result.stderr
    assert "REALTIME CACHED" in result.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "either --trace FILE or --generate"),
        (("--generate", "agents", "--load", "0.5"), "--load sets the prefill speed in an open loop"),
        (("--generate", "conversation", "--only", "magic"), "there is no strategy 'magic'; known: warmpath, round"),
        (("--generate", "conversation", "--capacity", "many"), "a count is a whole number"),
        (("--generate", "agents", "--capacity", "10k"), "--capacity: a request of"),
        (("--generate", "agents", "--quick"), "--quick and --row need --suite"),
        (("--suite", "--row", "magic"), "there is no row 'magic'; known: one prompt, 90 %, short"),
    ],
)
def test_invalid_options_are_rejected(warmpath: Warmpath, options: tuple[str, ...], said: str) -> None:
    result = warmpath("simulate", *options)
    assert result.exit_code != 0
    assert said in " ".join(result.stderr.split())


def test_an_invalid_trace_is_reported_with_its_line(warmpath: Warmpath, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"hash_ids": [1], "timestamp": 0, "input_length": 5, "output_length": -1}\n')
    result = warmpath("simulate", "--trace", "bad.jsonl")
    assert result.exit_code == 1
    assert "bad.jsonl:1: output_length: a whole number of at least 0 is needed, not -1" in result.stderr


@pytest.mark.slow
def test_the_suite_prints_one_table(warmpath: Warmpath, trace: str) -> None:
    options = ("--suite", "--quick", "--row", "images", "--row", "chats.jsonl", "--trace", trace, "--only", "warmpath")
    result = warmpath("simulate", *options, "--only", "round robin")
    assert result.exit_code == 0, result.stderr
    assert "WORKLOAD" in result.stdout and "ROUND ROBIN" in result.stdout
    assert "\nimages " in result.stdout and "\nchats.jsonl " in result.stdout
    assert "rows are flagged" in result.stdout
    (row,) = json.loads(warmpath("simulate", *options[:4], "--only", "warmpath", "--json").stdout)
    assert (row["workload"], row["best"]) == ("images", "warmpath")
    assert isinstance(row["flags"], list)
