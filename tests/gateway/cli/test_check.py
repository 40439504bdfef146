import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.policy import located_yaml
from gateway.policy.file import load_policy, policy_schema
from tests.e2e.faults.upstreams import Request, listening
from tests.gateway.cli.conftest import Warmpath
from tests.gateway.providers.scripted_server import json_response
from tests.ports import free_port

POLICIES = Path(__file__).parents[3] / "policies"


def test_a_policy_is_summarised(warmpath: Warmpath) -> None:
    result = warmpath("check", str(POLICIES / "examples" / "vllm.yaml"))
    assert result.exit_code == 0
    assert result.stderr == ""
    policy = load_policy(POLICIES / "examples" / "vllm.yaml")
    for word in (policy.hash, "gpu-a", "http://10.0.0.6:8000/v1", "gpt-4o, gpt-4o-mini", "realtime (default)", "chat"):
        assert word in result.stdout
    assert "0.10 in, 0.01 cached" in result.stdout.replace("0.1 in", "0.10 in")
    assert "6000 requests per 60 s, 20000000 tokens per 60 s, 400 concurrent" in result.stdout


def test_the_default_is_the_policy_of_the_settings(warmpath: Warmpath) -> None:
    assert "default.yaml: OK (hash " in warmpath("check").stdout
    example = str(POLICIES / "examples" / "vllm.yaml")
    assert "vllm.yaml: OK (hash " in warmpath("check", WARMPATH_POLICY=example).stdout


@pytest.mark.parametrize("path", sorted((POLICIES / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_valid(warmpath: Warmpath, path: Path) -> None:
    keys = dict.fromkeys(re.findall(r"env: (\w+)", path.read_text()), "x")
    result = warmpath("check", str(path), **keys)
    assert result.exit_code == 0
    if path.name != "mixed.yaml":  # it warns: its tenants share OpenAI's caches
        assert result.stderr == ""


def test_problems_are_printed_to_stderr_with_lines(warmpath: Warmpath, tmp_path: Path) -> None:
    text = (POLICIES / "default.yaml").read_text()
    bad = tmp_path / "bad.yaml"
    bad.write_text(text.replace("provider: warmpath", "provider: vlm     ").replace("\ncache:", "\ncahce:"))
    result = warmpath("check", str(bad))
    assert result.exit_code == 1
    assert result.stdout == ""
    line = text.splitlines().index("cache:") + 1
    assert f"{bad}:{line}:1: cahce: unknown key 'cahce'; known: " in result.stderr
    assert result.stderr.endswith(f"{bad}: 2 problems\n")
    known = "known: anthropic, azure, gemini, llamacpp, ollama, openai, sglang, trtllm, vllm, warmpath"
    assert f"deployments.0.provider: there is no provider 'vlm'; {known}" in result.stderr


MISTAKES = """
deployments:
  - {name: a, provider: opnai, base_url: "http://127.0.0.1:1/v1", model: m}
  - {name: b, provider: vllm, base_url: "ftp:/x", model: m, models: red}
models:
  - {name: m, deployments: [a, c], fallbaks: [x]}
tenants:
  - {name: t, models: [mm], limits: {requests: often}}
"""


def test_every_mistake_is_told_in_one_pass(warmpath: Warmpath, tmp_path: Path) -> None:
    """Wrong values and keys hide neither unknown names nor unknown providers, and cause no further problems."""
    bad = tmp_path / "bad.yaml"
    bad.write_text(MISTAKES)
    told = warmpath("check", str(bad)).stderr
    assert [line.split(":")[1:4] for line in told.splitlines()[:-1]] == [
        ["3", "15", " deployments.0.provider"],
        ["4", "31", " deployments.1.base_url"],
        ["4", "61", " deployments.1.models"],
        ["6", "15", " models.0.deployments"],
        ["6", "36", " models.0.fallbaks"],
        ["8", "15", " tenants.0.models"],
        ["8", "38", " tenants.0.limits.requests"],
    ]
    for suggestion in ("openai", "model", "fallbacks", "m"):
        assert f"did you mean {suggestion!r}?" in told


def test_a_policy_is_parsed_once(warmpath: Warmpath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies have thousands of tenants. A second time only if a warning needs its line."""
    parsed = []
    load = located_yaml.load

    def counted(text: str) -> Any:
        parsed.append(text)
        return load(text)

    monkeypatch.setattr(located_yaml, "load", counted)
    assert warmpath("check", str(POLICIES / "default.yaml")).exit_code == 0
    assert len(parsed) == 1


def test_json_for_scripts(warmpath: Warmpath, tmp_path: Path) -> None:
    good = json.loads(warmpath("check", "--json").stdout)
    assert good["ok"] is True
    assert good["hash"] == load_policy(POLICIES / "default.yaml").hash
    assert good["models"] == [{"name": "warmpath-demo", "aliases": ["demo"]}]

    bad = tmp_path / "bad.yaml"
    bad.write_text("models: 1\n")
    result = warmpath("check", str(bad), "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["ok"] is False
    assert {
        "file": str(bad),
        "line": 1,
        "column": 1,
        "field": "models",
        "message": "must be a list, as in `[a, b]`",
    } in (answer["problems"])


def test_a_missing_secret_is_only_a_warning(warmpath: Warmpath) -> None:
    path = POLICIES / "examples" / "mixed.yaml"
    result = warmpath("check", str(path), OPENAI_API_KEY="")
    assert result.exit_code == 0
    assert "deployments.1.api_key.env: the environment variable OPENAI_API_KEY is not set here" in result.stderr
    assert "OPENAI_API_KEY" not in warmpath("check", str(path), OPENAI_API_KEY="sk-x").stderr


def test_the_schema_is_printed_byte_for_byte(warmpath: Warmpath) -> None:
    assert warmpath("check", "--schema").stdout == policy_schema()


@pytest.mark.parametrize(
    ("tenants", "provider", "warned"),
    [
        ([{"name": "a"}, {"name": "b"}], "openai", True),
        ([{"name": "a"}, {"name": "b"}], "vllm", False),
        ([{"name": "a"}], "openai", False),
        ([{"name": "a", "cache_group": "g"}, {"name": "b", "cache_group": "g"}], "openai", False),
        ([{"name": "a", "cache_group": "g"}, {"name": "g"}], "openai", True),
    ],
)
def test_a_prefix_cache_that_tenants_share_is_a_warning(
    warmpath: Warmpath, tmp_path: Path, tenants: list[dict[str, str]], provider: str, warned: bool
) -> None:
    deployment = {"name": "s", "provider": provider, "base_url": "http://s.invalid/v1", "model": "m"}
    policy = {"deployments": [deployment], "models": [{"name": "m", "deployments": ["s"]}], "tenants": tenants}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(policy))
    result = warmpath("check", "p.yaml")
    assert result.exit_code == 0
    assert ("deployments.0.provider: this provider does not salt every call" in result.stderr) is warned


def test_a_missing_file_is_wrong_usage(warmpath: Warmpath) -> None:
    result = warmpath("check", "nope.yaml")
    assert result.exit_code == 2
    assert "'nope.yaml' does not exist" in result.stderr


def test_live_names_what_a_gateway_would_eject(warmpath: Warmpath, tmp_path: Path) -> None:
    """Real sockets: a good server, a wrong key, a wrong model name, a wrong path, and a port without a listener."""
    models = json.dumps({"object": "list", "data": [{"id": "served"}]}).encode()

    async def server(request: Request) -> None:  # answers the chats, without cached tokens
        assert request.path == "/v1/chat/completions"
        await request.head()
        await request.tokens(0, 2)
        await request.finish(tokens=2)

    replies = {
        "good": json_response(models),
        "wrong-key": json_response(b'{"error": {"message": "Incorrect API key: sk-1"}}', "401 Unauthorized"),
        "wrong-path": json_response(b'{"detail": "Not Found"}', "404 Not Found"),
        "wrong-model": json_response(models),
    }
    with listening(dict.fromkeys(replies, server), replies_to_get=replies) as upstreams:
        deployments = [
            {"name": name, "base_url": f"http://127.0.0.1:{port}/v1", "model": "served"}
            for name, port in upstreams.ports.items()
        ]
        deployments[-1]["model"] = "sreved"
        deployments.append({"name": "down", "base_url": f"http://127.0.0.1:{free_port()}/v1", "model": "served"})
        policy = {
            "deployments": deployments,
            "models": [{"name": "m", "deployments": [each["name"] for each in deployments]}],
            "tenants": [{"name": "t"}],
        }
        path = tmp_path / "policy.yaml"
        path.write_text(yaml.safe_dump(policy))
        assert warmpath("check", str(path)).exit_code == 0
        result = warmpath("check", str(path), "--live", "--json")
        table = warmpath("check", str(path), "--live")
    assert result.exit_code == table.exit_code == 1 and "good" in table.stdout and "sk-1" not in table.stdout
    assert json.loads(result.stdout)["live"]["good"] == {
        "usage": "reported",
        "cached_tokens": "none for a repeated prompt: not cached, or not reported",
        "cache_salt": "-",
        "priority": "-",
        "kv_events": "-",
    }
    unusable = json.loads(result.stdout)["unusable"]
    assert sorted(unusable) == ["down", "wrong-key", "wrong-model", "wrong-path"]
    assert unusable["wrong-key"] == "status 401: the deployment rejected the gateway's key"
    assert unusable["wrong-model"] == "it does not list the model 'sreved', but served"
    assert unusable["wrong-path"].startswith("status 404") and unusable["down"].startswith("connection failed")
