"""Reply headers under Anthropic's names."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from gateway.endpoints.messages.headers import headers_of
from tests.gateway.endpoints.messages.test_messages import client_of, message
from tests.gateway.harness import a_rig, answer, tenant

NOON = datetime.fromisoformat("2026-11-23T12:00:00Z").timestamp()


def test_a_reset_is_a_time_and_not_a_duration() -> None:
    named = {
        "x-ratelimit-limit-tokens": "1000", "x-ratelimit-remaining-tokens": "250", "x-ratelimit-reset-tokens": "1m0.5s",
        "x-ratelimit-limit-requests": "9", "x-ratelimit-remaining-requests": "9", "x-ratelimit-reset-requests": "0s",
    }  # fmt: skip
    assert headers_of(named, "req_1", NOON) == {
        "request-id": "req_1",
        "anthropic-ratelimit-tokens-limit": "1000",
        "anthropic-ratelimit-tokens-remaining": "250",
        "anthropic-ratelimit-tokens-reset": "2026-11-23T12:01:01Z",
        "anthropic-ratelimit-requests-limit": "9",
        "anthropic-ratelimit-requests-remaining": "9",
        "anthropic-ratelimit-requests-reset": "2026-11-23T12:00:00Z",
    }


async def test_answers_and_errors_have_rate_limit_headers(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=[tenant(requests="1/1h")]) as rig:
        rig.script(answer())
        answered = await rig.ask(client_of(message()))
        rejected = await rig.ask(client_of(message(stream=True)))
        assert (answered.status, rejected.status) == (200, 429)
        for client in (answered, rejected):
            assert client.headers["anthropic-ratelimit-requests-limit"] == "1"
            assert client.headers["anthropic-ratelimit-requests-remaining"] == "0"
            reset = datetime.fromisoformat(client.headers["anthropic-ratelimit-requests-reset"])
            assert reset.utcoffset() is not None
            assert "anthropic-ratelimit-tokens-limit" not in client.headers
