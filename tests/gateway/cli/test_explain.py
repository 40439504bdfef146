import json
from pathlib import Path

import pytest
import yaml

from tests.gateway.calls import a_policy
from tests.gateway.cli.conftest import Warmpath
from tests.gateway.prompts.media.samples import image_part, png, text_part

STABLE = "You are an airline agent.\n" + "Be brief. " * 60


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    file = tmp_path / "policy.yaml"
    form = {"level": "full", "opt_in": ["volatile_to_end"]}
    content = json.loads(a_policy(canonicalise=form).model_dump_json(exclude_defaults=True, by_alias=True))
    file.write_text(yaml.safe_dump(content))
    return file


def request(folder: Path, **body: object) -> Path:
    file = folder / "request.json"
    file.write_text(json.dumps({"model": "m", **body}))
    return file


def test_the_diff_of_body_and_prefix(warmpath: Warmpath, policy: Path, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": f"Current time: 09:41\n{STABLE}"}, {"role": "user", "content": "hi"}]
    file = request(tmp_path, messages=messages)
    told = warmpath("explain", str(policy), "--request", str(file))
    assert told.exit_code == 0, told.stderr
    assert "json_form, volatile_to_end" in told.stdout
    lines = told.stdout.splitlines()
    assert "-messages[0].content: Current time: 09:41" in lines
    assert "+messages[0].content: Current time: 09:41" in lines
    assert any(line.startswith("prefix  block 1 of 2: ") for line in lines)

    prompt = json.loads(warmpath("explain", str(policy), "--request", str(file), "--json").stdout)["prompt"]
    prints = prompt["fingerprint"]
    assert prints["equal_blocks"] == 0
    assert len(prints["as_sent"]) == len(prints["canonical"]) == prompt["blocks"] == 2
    assert prompt["diff"][0] == "--- as sent"


def test_equal_content_in_different_bytes(warmpath: Warmpath, policy: Path, tmp_path: Path) -> None:
    file = request(tmp_path, messages=[{"role": "user", "content": STABLE}])
    told = warmpath("explain", str(policy), "--request", str(file)).stdout
    assert "body    same content as sent, different bytes" in told
    assert "prefix  same as sent" in told


def test_the_rule_is_printed_as_json(warmpath: Warmpath, policy: Path, tmp_path: Path) -> None:
    rules = "rules:\n  - {match: {service_tier: [flex, batch]}, class: batch}\n"
    policy.write_text(policy.read_text() + rules)
    file = request(tmp_path, messages=[{"role": "user", "content": "hi"}], service_tier="flex")
    told = warmpath("explain", str(policy), "--request", str(file)).stdout
    assert 'rule 1 matches {"service_tier": ["flex", "batch"]}: class batch' in told


def test_a_canonical_request_has_no_diff(warmpath: Warmpath, policy: Path, tmp_path: Path) -> None:
    file = tmp_path / "compact.json"
    file.write_text('{"model":"m","messages":[{"role":"user","content":"hi"}]}')
    told = warmpath("explain", str(policy), "--request", str(file)).stdout
    assert "already canonical" in told
    assert "prefix" not in told


def test_a_long_diff_is_cut(warmpath: Warmpath, policy: Path, tmp_path: Path) -> None:
    clocks = "\n".join(f"Current time: 09:{i % 60:02d}\nline {i}" for i in range(500))
    file = request(tmp_path, messages=[{"role": "system", "content": clocks}])
    diff = json.loads(warmpath("explain", str(policy), "--request", str(file), "--json").stdout)["prompt"]["diff"]
    assert len(diff) == 201
    assert diff[-1].endswith("more lines")


def test_deployments_that_cannot_serve_a_call_are_no_candidates(warmpath: Warmpath, tmp_path: Path) -> None:
    speaks = {"base_url": "https://a.invalid/v1", "model": "served", "api_key": {"env": "NOT_SET_HERE"}}
    servers = [{"name": "claude", "provider": "anthropic", **speaks}, {"name": "other", **speaks}]
    file = request(tmp_path, messages=[{"role": "user", "content": "hi"}], seed=7)
    both, one = tmp_path / "both.yaml", tmp_path / "one.yaml"
    for policy, names in ((both, ["claude", "other"]), (one, ["claude"])):
        models = [{"name": "m", "deployments": names}]
        policy.write_text(yaml.safe_dump({"deployments": servers, "models": models, "tenants": [{"name": "t"}]}))
    assert "other is the only candidate" in warmpath("explain", str(both), "--request", str(file)).stdout
    refused = warmpath("explain", str(one), "--request", str(file))
    assert refused.exit_code != 0
    assert "rejected with status 400 invalid_request_error: seed: " in refused.stderr


def test_the_prefill_deployment_of_a_long_prompt(warmpath: Warmpath, tmp_path: Path) -> None:
    file, common = tmp_path / "roles.yaml", {"provider": "vllm", "model": "served"}
    servers = [
        {"name": name, "base_url": f"http://{name}.invalid/v1", "role": name, **common}
        for name in ("prefill", "decode")
    ]
    models = [{"name": "m", "deployments": ["prefill", "decode"]}]
    file.write_text(yaml.safe_dump({"deployments": servers, "models": models, "tenants": [{"name": "t"}]}))
    for words, expected in ((10, None), (4000, "prefill")):
        body = request(tmp_path, messages=[{"role": "user", "content": "word " * words}])
        explained = json.loads(warmpath("explain", str(file), "--request", str(body), "--json").stdout)
        assert [each["deployment"] for each in explained["candidates"]] == ["decode"]
        assert (explained["prefill"] and explained["prefill"]["deployment"]) == expected
    assert "prefill computes the prompt before" in warmpath("explain", str(file), "--request", str(body)).stdout
    checked = warmpath("check", str(file), "--json")
    assert json.loads(checked.stdout)["roles"] == {"prefill": "prefill", "decode": "decode"}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("messages", {"system": STABLE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
        ("responses", {"instructions": STABLE, "input": "hi", "max_output_tokens": 9}),
    ],
)
def test_every_endpoint_has_the_prefix_of_the_equivalent_chat(
    warmpath: Warmpath, policy: Path, tmp_path: Path, endpoint: str, body: dict[str, object]
) -> None:
    messages = [{"role": "system", "content": STABLE}, {"role": "user", "content": "hi"}]
    file = request(tmp_path, messages=messages)
    chat = json.loads(warmpath("explain", str(policy), "--request", str(file), "--json").stdout)
    file = request(tmp_path, **body)
    asked = warmpath("explain", str(policy), "--request", str(file), "--endpoint", endpoint, "--json")
    assert asked.exit_code == 0, asked.stderr
    told = json.loads(asked.stdout)
    assert told["prompt"]["fingerprint"]["canonical"] == chat["prompt"]["fingerprint"]["canonical"] != []
    assert told["candidates"] == chat["candidates"]


def test_the_tokens_of_media(warmpath: Warmpath, policy: Path, tmp_path: Path) -> None:
    content = [text_part("hi"), image_part(png(280, 280)), image_part("https://example.com/cat.png")]
    file = request(tmp_path, messages=[{"role": "user", "content": content}])
    assert (
        "tokens, 100 of image, 1024 of unknown image, "
        in warmpath("explain", str(policy), "--request", str(file)).stdout
    )
    prompt = json.loads(warmpath("explain", str(policy), "--request", str(file), "--json").stdout)["prompt"]
    assert prompt["media_tokens"] == {"image": 100, "unknown_image": 1024}
