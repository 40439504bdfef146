"""What one tenant has sent shows to no other: not in counts, not in routing, not in answers. A group shares by choice.

The engine's count of computed tokens stands for time: what has to be computed takes as long for everybody.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.processes import DEMO, Gateway, Running, deployment, gateway, simple_policy, tenant

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory, local_engine: Running) -> Iterator[Gateway]:
    """Two deployments, of which one can be asked for by itself; carol and dan are in one group."""
    policy = simple_policy(
        local_engine.url,
        deployments=[deployment(name, local_engine.url) for name in ("first", "second")],
        models=[
            {"name": DEMO, "deployments": ["first", "second"]},
            {"name": "at-second", "deployments": ["second"]},
        ],
        tenants=[tenant("ada"), tenant("bob"), *(tenant(name, cache_group="public") for name in ("carol", "dan"))],
    )
    with gateway(tmp_path_factory.mktemp("isolation"), policy) as started:
        yield started


def prompt() -> str:
    return f"Manual {secrets.token_hex(8)}. " + "Turn it off and on again. " * 60


def ask(started: Gateway, who: str, content: str, model: str = DEMO, **fields: Any) -> tuple[str, int]:
    """Which deployment answered, and how many tokens came from its cache: as header, body and receipt say."""
    messages = [{"role": "system", "content": content}, {"role": "user", "content": "Why?"}]
    body = {"model": model, "messages": messages, "max_tokens": 1, **fields}
    reply = started.post("chat/completions", body, who)
    assert reply.status_code == 200, reply.text
    cached = int(reply.headers["x-warmpath-cached-tokens"])
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert started.receipt(reply.headers["x-request-id"])["cache_read"] == cached
    return reply.headers["x-warmpath-deployment"], cached


def test_a_tenant_finds_nothing_of_anothers_prompt(shared_gateway: Gateway) -> None:
    content = prompt()
    assert ask(shared_gateway, "ada", content, "at-second") == ("second", 0)
    where, cached = ask(shared_gateway, "ada", content)
    assert (where, cached > 300) == ("second", True), "its own prompt is warm there, and it is sent there"
    for stranger in ("bob", "carol"):
        assert ask(shared_gateway, stranger, content) == ("first", 0), "no affinity to where another's prompt is warm"


def test_a_group_shares_prefixes_by_choice(shared_gateway: Gateway) -> None:
    content = prompt()
    assert ask(shared_gateway, "carol", content, "at-second") == ("second", 0)
    where, cached = ask(shared_gateway, "dan", content)
    assert (where, cached > 300) == ("second", True)


@pytest.mark.parametrize(("first", "second"), [("ada", "bob"), ("carol", "dan")])
def test_answers_are_a_tenants_own_in_a_group_as_well(shared_gateway: Gateway, first: str, second: str) -> None:
    body = {"model": DEMO, "messages": [{"role": "user", "content": prompt()}], "temperature": 0, "max_tokens": 1}
    kinds = [
        shared_gateway.post("chat/completions", body, who).headers.get("x-warmpath-cache")
        for who in (first, second, first, second)
    ]
    assert kinds == [None, None, "hit", "hit"]


def test_a_client_can_not_choose_its_salt(shared_gateway: Gateway) -> None:
    content = prompt()
    ask(shared_gateway, "ada", content, cache_salt="x" * 16)
    assert ask(shared_gateway, "bob", content, cache_salt="x" * 16)[1] == 0
    assert ask(shared_gateway, "ada", content, cache_salt="y" * 16)[1] > 300


def test_first_forms_of_schemas_do_not_show(shared_gateway: Gateway) -> None:
    """A tool whose keys another tenant has sent in another order goes on as it was sent."""
    function = {"name": f"f{secrets.token_hex(4)}", "description": "Does it.", "parameters": {"type": "object"}}
    one = {"type": "function", "function": function}
    other = {"type": "function", "function": dict(reversed(function.items()))}
    hello = {"model": DEMO, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    steps = [
        shared_gateway.post("chat/completions", {**hello, "tools": [sent]}, who).headers["x-warmpath-canonical"]
        for who, sent in (("ada", one), ("bob", other), ("carol", one), ("dan", other))
    ]
    assert ["order_memo" in step for step in steps] == [False, False, False, True]
