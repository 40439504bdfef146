"""Models in Anthropic's format."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import ModelInfo

from gateway.core.errors import BadRequest, ModelNotFound
from gateway.endpoints.messages.models import get_model, is_messages_request, list_models
from gateway.types import Principal
from tests.gateway.calls import a_policy

POLICY = a_policy(models=[{"name": f"m{i:02}", "deployments": ["a"]} for i in range(25)])
PRINCIPAL = Principal(POLICY.tenants_by_name["t"], "k")


def page(**query: str) -> tuple[list[str], bool]:
    result = list_models(POLICY, PRINCIPAL, 0, query)
    names = [model["id"] for model in result["data"]]
    if names:
        assert (result["first_id"], result["last_id"]) == (names[0], names[-1])
    return names, result["has_more"]


def test_pages_in_either_direction() -> None:
    names = [f"m{i:02}" for i in range(25)]
    assert page() == (names[:20], True)
    assert page(after_id="m19") == (names[20:], False)
    assert page(after_id="m24") == ([], False)
    assert page(limit="2", before_id="m03") == (names[1:3], True)
    assert page(limit="2", before_id="m02") == (names[:2], False)
    assert page(limit="1000") == (names, False)


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"limit": "9" * 5000}, {"after_id": "x"}]
)
def test_an_invalid_page_is_rejected(query: dict[str, str]) -> None:
    (name,) = query
    with pytest.raises(BadRequest, match=f"^{name}:"):
        page(**query)


def test_a_model_is_valid_for_anthropics_client() -> None:
    result = get_model(POLICY, PRINCIPAL, 1_700_000_000, "m01")
    model = ModelInfo.model_validate(result)
    assert (model.id, model.created_at.isoformat()) == ("m01", "2023-11-14T22:13:20+00:00")
    with pytest.raises(ModelNotFound):
        get_model(POLICY, PRINCIPAL, 0, "none")


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/v1/models", [(b"anthropic-version", b"2023-06-01")], True),
        ("/v1/models", [(b"accept", b"*/*")], False),
        ("/v1/messages/batches", [], True),
    ],
)
def test_requests_of_anthropics_wire_are_recognised(path: str, headers: list[Any], expected: bool) -> None:
    assert is_messages_request({"type": "http", "path": path, "headers": headers}) is expected
