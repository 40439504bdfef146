"""Bodies on the wires that are translated: whatever is in them, they are refused by the name of a field, or every kind
of server can be asked, or says which field it has no words for.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import BadRequest, ModelNotFound
from gateway.endpoints.base import Endpoint
from gateway.endpoints.messages import CountTokensEndpoint, MessagesEndpoint
from gateway.endpoints.responses import ResponsesEndpoint
from gateway.providers import PROVIDERS, make_provider
from gateway.providers.base import Fault, ProviderFailure
from gateway.providers.transport import HTTPTransport
from gateway.settings import resolve_secret
from tests.gateway.calls import a_call, a_policy
from tests.gateway.endpoints.bodies import messages_bodies, responses_bodies, with_something_wrong

POLICY = a_policy(
    deployments=[
        {"name": name, "provider": name, "base_url": f"http://{name}.invalid/v1", "model": "served"}
        for name in PROVIDERS
    ],
    models=[{"name": "m", "deployments": list(PROVIDERS)}],
)
SERVERS = [make_provider(deployment, HTTPTransport(), resolve_secret) for deployment in POLICY.deployments]
CASES: list[tuple[Endpoint, st.SearchStrategy[Any]]] = [
    (MessagesEndpoint(), messages_bodies),
    (CountTokensEndpoint(), messages_bodies),
    (ResponsesEndpoint(), responses_bodies),
]  # fmt: skip


@pytest.mark.parametrize(("endpoint", "bodies"), CASES, ids=["messages", "count_tokens", "responses"])
@settings(max_examples=150)
@given(data=st.data())
def test_a_body_is_refused_by_name_or_can_be_asked_of_every_server(
    endpoint: Endpoint, bodies: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    body = data.draw(with_something_wrong(bodies))
    try:
        call = a_call(body, POLICY, endpoint=endpoint)
    except (BadRequest, ModelNotFound) as refusal:
        assert refusal.param or "not valid JSON" in refusal.message
        return
    for server in SERVERS:
        refused = server.unsupported_error(call)
        try:
            assert json.loads(server.render(call))["model"] == "served" and refused is None
        except ProviderFailure as failure:
            assert failure.fault is Fault.REFUSED and json.loads(failure.body)["error"]["param"]


@pytest.mark.parametrize(("endpoint", "bodies"), [CASES[0], CASES[2]], ids=["messages", "responses"])
@settings(max_examples=100)
@given(data=st.data())
def test_a_body_that_is_right_is_taken(
    endpoint: Endpoint, bodies: st.SearchStrategy[dict[str, object]], data: st.DataObject
) -> None:
    a_call(json.dumps(data.draw(bodies)).encode(), POLICY, endpoint=endpoint)
