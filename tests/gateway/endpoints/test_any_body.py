"""Any body of a translated wire is rejected by the name of a field, or every provider can render it, or the provider
names the field that its dialect cannot express.
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
from gateway.providers.gemini import Gemini
from gateway.providers.transport import HTTPTransport
from gateway.settings import resolve_secret
from tests.gateway.calls import a_call, a_policy
from tests.gateway.endpoints.bodies import messages_bodies, mutated, responses_bodies

POLICY = a_policy(
    deployments=[
        {"name": name, "provider": name, "base_url": f"http://{name}.invalid/v1", "model": "served"}
        for name in PROVIDERS
    ],
    models=[{"name": "m", "deployments": list(PROVIDERS)}],
)
DIALECTS = [make_provider(deployment, HTTPTransport(), resolve_secret) for deployment in POLICY.deployments]
CASES: list[tuple[Endpoint, st.SearchStrategy[Any]]] = [
    (MessagesEndpoint(), messages_bodies),
    (CountTokensEndpoint(), messages_bodies),
    (ResponsesEndpoint(), responses_bodies),
]  # fmt: skip


@pytest.mark.parametrize(("endpoint", "bodies"), CASES, ids=["messages", "count_tokens", "responses"])
@settings(max_examples=150)
@given(data=st.data())
def test_any_body_is_rejected_by_field_or_can_be_rendered_for_every_dialect(
    endpoint: Endpoint, bodies: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    body = data.draw(mutated(bodies))
    try:
        call = a_call(body, POLICY, endpoint=endpoint)
    except (BadRequest, ModelNotFound) as rejection:
        assert rejection.param or "not valid JSON" in rejection.message
        return
    for provider in DIALECTS:
        in_body = None if isinstance(provider, Gemini) else "served"  # Gemini's API has the model in the path
        refused = provider.unsupported_error(call)
        try:
            assert json.loads(provider.render(call)).get("model") == in_body and refused is None
        except ProviderFailure as failure:
            assert failure.fault is Fault.UNSUPPORTED and json.loads(failure.body)["error"]["param"]


@pytest.mark.parametrize(("endpoint", "bodies"), [CASES[0], CASES[2]], ids=["messages", "responses"])
@settings(max_examples=100)
@given(data=st.data())
def test_a_valid_body_is_accepted(
    endpoint: Endpoint, bodies: st.SearchStrategy[dict[str, object]], data: st.DataObject
) -> None:
    a_call(json.dumps(data.draw(bodies)).encode(), POLICY, endpoint=endpoint)
