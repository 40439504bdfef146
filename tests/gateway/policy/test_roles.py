"""Roles of deployments: which policies are rejected, and where their error is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.policy.file import PolicyError, load_policy

P = '{name: p, provider: vllm, base_url: "http://p/v1", model: m, role: prefill}'
D = '{name: d, provider: vllm, base_url: "http://d/v1", model: m, role: decode}'
BOTH = '{name: b, provider: vllm, base_url: "http://b/v1", model: m}'


def problems(folder: Path, *deployments: str, model: str = "", more: str = "") -> list[str]:
    names = ", ".join(each[len("{name: ")] for each in deployments)
    listed = "".join(f"  - {each}\n" for each in deployments)
    text = (
        f"deployments:\n{listed}models:\n  - {{name: m, deployments: [{names}]{model}}}\ntenants: [{{name: t}}]\n{more}"
    )
    path = folder / "p.yaml"
    path.write_text(text)
    try:
        load_policy(path)
    except PolicyError as error:
        return [line.removeprefix(f"{folder}/") for line in str(error).splitlines()]
    return []


def test_a_model_has_both_roles_or_none(tmp_path: Path) -> None:
    for valid in ((P, D), (BOTH,), (P, D, BOTH)):
        assert problems(tmp_path, *valid) == []
    assert problems(tmp_path, P) == [
        "p.yaml:4:15: models.0.deployments: 'p' has the role prefill, so 'm' needs a deployment with the role decode"
    ]
    assert problems(tmp_path, P, BOTH)[0].endswith("'m' needs a deployment with the role decode")
    assert problems(tmp_path, D, BOTH)[0].endswith(
        "'d' has the role decode, so 'm' needs a deployment with the role prefill"
    )


def test_a_role_needs_a_provider_that_hands_prompts_over(tmp_path: Path) -> None:
    (first, *_) = problems(tmp_path, P.replace("vllm", "sglang"), D)
    assert first.startswith("p.yaml:2:")
    assert first.endswith("role: the provider sglang cannot hand prompts over; only vllm and warmpath can")
    (first, *_) = problems(tmp_path, P.replace("vllm", "warmpath"), D)
    assert "'p' (warmpath) and 'd' (vllm) cannot load prompts from each other" in first
    secure = P.replace("vllm", "warmpath").replace("http:", "https:")
    assert "base_url must begin with http://" in problems(tmp_path, secure, D.replace("vllm", "warmpath"))[0]


def test_an_unknown_role_is_named_with_its_line(tmp_path: Path) -> None:
    problem, *_ = problems(tmp_path, P, D.replace("role: decode", "role: decoder"))
    assert problem == "p.yaml:3:66: deployments.1.role: should be 'prefill' or 'decode'"


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"model": ", weights: {p: 1, d: 1}"}, "models.0.weights: 'p' has the role prefill"),
        ({"model": ", mirror: {deployment: p}"}, "models.0.mirror.deployment: 'p' has the role prefill"),
        (
            {"more": "model_routes: [{name: r, match: {tenant: t}, deployments: [p]}]\n"},
            "model_routes.0.deployments: all of them have the role prefill",
        ),
    ],
)
def test_no_call_is_sent_to_a_prefill_deployment_by_name(tmp_path: Path, more: dict[str, Any], path: str) -> None:
    (problem,) = problems(tmp_path, P, D, **more)
    assert path in problem
