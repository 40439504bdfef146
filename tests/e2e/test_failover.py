"""A server that is down costs its callers nothing but time, and the books say that it was tried."""

from __future__ import annotations

import pytest

from tests.e2e.processes import DEMO, Gateway, chat, events, text_of

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("model", "stream"),
    [("fails-over-0", True), ("fails-over-1", False), ("falls-back-2", True), ("falls-back-3", False)],
)
def test_another_deployment_answers(local_gateway: Gateway, model: str, stream: bool) -> None:
    body = chat("Who answers?", max_tokens=8, stream=stream) | {"model": model}
    reply = local_gateway.post("chat/completions", body)
    assert reply.status_code == 200
    assert reply.headers["x-warmpath-deployment"] == "local"
    assert text_of(events(reply.text)) if stream else reply.json()["choices"][0]["message"]["content"]
    receipt = local_gateway.receipt(reply.headers["x-request-id"])
    assert (receipt["outcome"], receipt["deployment"], receipt["exact"]) == ("complete", "local", True)
    assert (receipt["model_asked"], receipt["model_served"]) == (model, DEMO)
    tried = [(attempt["deployment"], attempt["outcome"], attempt["status"]) for attempt in receipt["attempts"]]
    assert tried == [(f"down-{model[-1]}", "connect_error", None), ("local", "ok", 200)]
    assert float(receipt["cost"]) > 0, "billed once, for the one that worked"
