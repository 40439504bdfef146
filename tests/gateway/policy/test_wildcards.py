"""Names of models with a `*`: which entry a name stands for, what is sent upstream, and who may use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.policy import Policy
from gateway.policy.wildcards import star_part
from gateway.providers import make_provider
from gateway.providers.transport import HTTPTransport
from tests.gateway.harness import Client, a_rig, answer, chat, policy_of, tenant

HOSTED = [
    {"name": "a", "base_url": "http://a.invalid/v1", "model": "*"},
    {"name": "b", "base_url": "http://b.invalid/v1", "model": "accounts/x/*"},
]
MODELS = [
    {"name": "openai/*", "deployments": ["a"]},
    {"name": "openai/gpt-5*", "deployments": ["b"]},
    {"name": "openai/dear", "aliases": ["dear"], "deployments": ["a"]},
]


def wild(**changes: Any) -> dict[str, Any]:
    return {"deployments": HOSTED, "models": MODELS, **changes}


@pytest.mark.parametrize(
    ("pattern", "name", "part"),
    [
        ("openai/*", "openai/gpt-4o", "gpt-4o"),
        ("openai/*", "openai/", None),
        ("*-latest", "small-latest", "small"),
        ("a*a", "aa", None),
        ("a*a", "aba", "b"),
        ("gpt-4o", "gpt-4o", None),
    ],
)
def test_what_the_star_stands_for(pattern: str, name: str, part: str | None) -> None:
    assert star_part(pattern, name) == part


async def test_the_longest_pattern_decides_and_the_server_gets_the_rest_of_the_name(tmp_path: Path) -> None:
    names = ["openai/gpt-4o", "openai/gpt-5-mini", "openai/dear", "dear"]
    async with a_rig(tmp_path, **wild()) as rig, HTTPTransport() as transport:
        rig.script(answer())
        sent = []
        for name in names:
            assert (await rig.ask(chat(model=name))).status == 200
        for receipt in rig.receipts():
            deployment = rig.components.policies.current.deployments_by_name[receipt["deployment"]]
            reply = next(one for one in rig.servers[deployment.name].replies if one.call.id == receipt["call_id"])
            rendered = make_provider(deployment, transport, lambda _: "").render(reply.call)
            assert json.loads(rendered)["model"] == receipt["model_served"]
            sent.append((receipt["model_asked"], receipt["deployment"], receipt["model_served"]))
        assert sent == [
            ("openai/gpt-4o", "a", "gpt-4o"),
            ("openai/gpt-5-mini", "b", "accounts/x/-mini"),
            ("openai/dear", "a", "dear"),
            ("dear", "a", "dear"),
        ]
        for name in ("openai/", "openai/*", "openai/a\nb", "openai/" + 200 * "x", "anthropic/x"):
            assert (await rig.ask(chat(model=name))).status == 404


async def test_models_behind_one_pattern_share_neither_answers_nor_prefixes(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **wild()) as rig:
        rig.script(answer())
        for name in ("openai/a", "openai/b"):
            assert (
                await rig.ask(chat(model=name, temperature=0, messages=[{"role": "user", "content": 999 * "x "}]))
            ).status == 200
        first, second = (reply.call for reply in rig.servers["a"].replies)
        assert set(first.fingerprint).isdisjoint(second.fingerprint) and first.fingerprint


async def test_who_may_use_which_names(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **wild(tenants=[{**tenant(), "models": ["openai/gpt-4*", "openai/dear"]}])) as rig:
        rig.script(answer())
        asked = ["openai/gpt-4o", "openai/gpt-5-mini", "openai/other", "dear"]
        assert [(await rig.ask(chat(model=name))).status for name in asked] == [200, 404, 404, 200]


async def test_routes_take_patterns(tmp_path: Path) -> None:
    routes = [{"match": {"model": "openai/*", "header": {"x-to": "next"}}, "to": "next/*"}]
    models = [*MODELS, {"name": "next/*", "deployments": ["b"]}]
    async with a_rig(tmp_path, **wild(models=models, model_routes=routes)) as rig:
        rig.script(answer())
        assert (await rig.ask(Client(chat(model="openai/gpt-4o"), headers=[(b"x-to", b"next")]))).status == 200
        (receipt,) = rig.receipts()
        assert (receipt["model_routed"], receipt["model_served"]) == ("next/gpt-4o", "accounts/x/gpt-4o")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": [{"name": "a/*/*", "deployments": ["a"]}]}, "more than one"),
        ({"models": [{"name": "plain", "deployments": ["a"]}]}, "which 'plain' gives no meaning"),
        ({"models": [{"name": "a/*", "aliases": ["b/*"], "deployments": ["a"]}]}, "an alias cannot have"),
        ({"tenants": [{"name": "t", "models": ["azure/x"]}]}, "there is no model 'azure/x'"),
    ],
)
def test_contradictions_are_found_in_the_policy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy.model_validate({**policy_of(), **wild(), **changes})
