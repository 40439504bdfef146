"""CORS by policy: preflight requests, the headers of answers and of errors, and origins that the policy lacks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.policy.cors import CORS
from tests.gateway.harness import answer, chat
from tests.gateway.providers.scripted_server import ReceivedRequest, ScriptedServer, json_response
from tests.gateway.server.application import policy_for, running

PAGE, OTHER = b"https://app.example.com", b"https://evil.example.com"


def preflight(origin: bytes) -> dict[str, Any]:
    asks = [(b"access-control-request-method", b"POST"), (b"access-control-request-headers", b"authorization")]
    return {"method": "OPTIONS", "path": "/v1/chat/completions", "headers": [(b"origin", origin), *asks]}


async def reply(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(json_response(answer()))


async def test_a_named_page_may_call_and_others_may_not(tmp_path: Path) -> None:
    async with ScriptedServer(reply) as server:
        policy = {**policy_for(server.base_url), "cors": {"origins": PAGE.decode()}}
        async with running(tmp_path, policy) as app:
            allowed = await app.ask(**preflight(PAGE))
            assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, PAGE.decode())
            assert (await app.ask(**preflight(OTHER))).status == 400
            call = await app.ask(chat(), headers=[(b"origin", PAGE)])
            assert (call.status, call.headers["access-control-allow-origin"]) == (200, PAGE.decode())
            failed = await app.ask(b"{", headers=[(b"origin", PAGE)])
            assert (failed.status, failed.headers["access-control-allow-origin"]) == (400, PAGE.decode())
            other = await app.ask(chat(), headers=[(b"origin", OTHER)])
            assert "access-control-allow-origin" not in other.headers


async def test_without_origins_nothing_is_allowed(tmp_path: Path) -> None:
    async with running(tmp_path, policy_for("http://127.0.0.1:9/v1")) as app:
        assert (await app.ask(**preflight(PAGE))).status == 405


@pytest.mark.parametrize("origin", ["app.example.com", "https://app.example.com/page", "ftp://x", "https://"])
def test_an_origin_has_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        CORS(origins=(origin,))
