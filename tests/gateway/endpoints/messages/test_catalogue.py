"""The list of models, page by page."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import ModelInfo

from gateway.core.errors import BadRequest, ModelNotFound
from gateway.endpoints.messages.catalogue import asked_for_in, entry, listing
from gateway.types import Principal
from tests.gateway.calls import a_policy

POLICY = a_policy(models=[{"name": f"m{i:02}", "deployments": ["a"]} for i in range(25)])
PRINCIPAL = Principal(POLICY.tenants_by_name["t"], "k")


def page(**query: str) -> tuple[list[str], bool]:
    told = listing(POLICY, PRINCIPAL, 0, query)
    names = [model["id"] for model in told["data"]]
    if names:
        assert (told["first_id"], told["last_id"]) == (names[0], names[-1])
    return names, told["has_more"]


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
def test_what_is_no_page(query: dict[str, str]) -> None:
    (name,) = query
    with pytest.raises(BadRequest, match=f"^{name}:"):
        page(**query)


def test_a_model_as_the_client_takes_it() -> None:
    told = entry(POLICY, PRINCIPAL, 1_700_000_000, "m01")
    model = ModelInfo.model_validate(told)
    assert (model.id, model.created_at.isoformat()) == ("m01", "2023-11-14T22:13:20+00:00")
    with pytest.raises(ModelNotFound):
        entry(POLICY, PRINCIPAL, 0, "none")


@pytest.mark.parametrize(
    ("path", "headers", "is_so"),
    [
        ("/v1/models", [(b"anthropic-version", b"2023-06-01")], True),
        ("/v1/models", [(b"accept", b"*/*")], False),
        ("/v1/messages/batches", [], True),
    ],
)
def test_who_asks_in_its_words(path: str, headers: list[Any], is_so: bool) -> None:
    assert asked_for_in({"type": "http", "path": path, "headers": headers}) is is_so
