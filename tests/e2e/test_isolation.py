"""A tenant's prompts are invisible to other tenants: in token counts, in routing and in cached answers. Groups share.

The engine's number of computed tokens stands for response time, since computing takes the same time for every tenant.
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
    """Two deployments, one of which also has a model of its own. carol and dan share a cache group."""
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
    """Send a request. Returns the deployment and its cached tokens, equal in header, body and receipt."""
    messages = [{"role": "system", "content": content}, {"role": "user", "content": "Why?"}]
    body = {"model": model, "messages": messages, "max_tokens": 1, **fields}
    reply = started.post("chat/completions", body, who)
    assert reply.status_code == 200, reply.text
    cached = int(reply.headers["x-warmpath-cached-tokens"])
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert started.receipt(reply.headers["x-request-id"])["cache_read"] == cached
    return reply.headers["x-warmpath-deployment"], cached


def test_a_tenant_s_prompt_gives_no_other_tenant_a_cache_hit(shared_gateway: Gateway) -> None:
    content = prompt()
    assert ask(shared_gateway, "ada", content, "at-second") == ("second", 0)
    where, cached = ask(shared_gateway, "ada", content)
    assert (where, cached > 300) == ("second", True), "routed to the deployment that has its prompt in the cache"
    for stranger in ("bob", "carol"):
        assert ask(shared_gateway, stranger, content) == ("first", 0), "not routed by another tenant's cached prompt"


def test_a_cache_group_shares_prefixes(shared_gateway: Gateway) -> None:
    content = prompt()
    assert ask(shared_gateway, "carol", content, "at-second") == ("second", 0)
    where, cached = ask(shared_gateway, "dan", content)
    assert (where, cached > 300) == ("second", True)


@pytest.mark.parametrize(("first", "second"), [("ada", "bob"), ("carol", "dan")])
def test_cached_answers_are_not_shared_even_in_a_cache_group(shared_gateway: Gateway, first: str, second: str) -> None:
    body = {"model": DEMO, "messages": [{"role": "user", "content": prompt()}], "temperature": 0, "max_tokens": 1}
    kinds = [
        shared_gateway.post("chat/completions", body, who).headers.get("x-warmpath-cache")
        for who in (first, second, first, second)
    ]
    assert kinds == [None, None, "hit", "hit"]


def test_a_client_cannot_choose_its_cache_salt(shared_gateway: Gateway) -> None:
    content = prompt()
    ask(shared_gateway, "ada", content, cache_salt="x" * 16)
    assert ask(shared_gateway, "bob", content, cache_salt="x" * 16)[1] == 0
    assert ask(shared_gateway, "ada", content, cache_salt="y" * 16)[1] > 300


def test_the_key_order_of_tools_is_remembered_per_tenant_or_group(shared_gateway: Gateway) -> None:
    """A tool is passed on as sent, even if another tenant sent it with its keys in another order."""
    function = {"name": f"f{secrets.token_hex(4)}", "description": "Does it.", "parameters": {"type": "object"}}
    one = {"type": "function", "function": function}
    other = {"type": "function", "function": dict(reversed(function.items()))}
    hello = {"model": DEMO, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    steps = [
        shared_gateway.post("chat/completions", {**hello, "tools": [sent]}, who).headers["x-warmpath-canonical"]
        for who, sent in (("ada", one), ("bob", other), ("carol", one), ("dan", other))
    ]
    assert ["order_memo" in step for step in steps] == [False, False, False, True]
