"""Deployments behind an HTTP proxy, which is a process of its own: by TLS tunnels and by plain requests."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faults.upstreams import Request, Upstreams, listening
from tests.e2e.processes import ROOT, Gateway, chat, clean_environment, deployment, gateway, simple_policy, until
from tests.e2e.test_upstream_tls import certificates

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


async def answer(request: Request) -> None:
    await request.whole()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The proxy's port, and its log of request lines."""
    log = tmp_path_factory.mktemp("proxy") / "log"
    with log.open("wb") as out:
        command = [sys.executable, str(ROOT / "tests" / "e2e" / "http_proxy.py"), "gateway:s3cret"]
        process = subprocess.Popen(command, stdout=out, env=clean_environment())
        try:
            found = until(lambda: re.search(r"ready on (\d+)", log.read_text()))
            yield int(found[1]), log
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, proxy: tuple[int, Path]) -> Iterator[tuple[Gateway, Upstreams]]:
    folder = tmp_path_factory.mktemp("behind")
    contexts = {"secure": certificates(folder)["good"]}
    with listening({"secure": answer, "plain": answer}, contexts) as upstreams:
        through: dict[str, Any] = {"url": f"http://127.0.0.1:{proxy[0]}", "login": {"env": "PROXY_LOGIN"}}
        secure = f"https://localhost:{upstreams.ports['secure']}"
        of: dict[str, Any] = {"provider": "openai", "tls": {"ca": str(folder / "ca.pem")}}
        deployments = [
            deployment("secure", secure, proxy=through, **of),
            deployment("plain", f"http://127.0.0.1:{upstreams.ports['plain']}", provider="openai", proxy=through),
            deployment("no-login", secure, proxy={"url": through["url"]}, **of),
            deployment("no-proxy", secure, proxy={"url": "http://127.0.0.1:9"}, **of),
        ]
        models = [{"name": each["name"], "deployments": [each["name"]]} for each in deployments]
        policy = simple_policy("", deployments=deployments, models=models)
        with gateway(folder, policy, environment={"PROXY_LOGIN": "gateway:s3cret"}) as started:
            yield started, upstreams


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["secure", "plain"])
def test_requests_go_through_the_proxy(
    front: tuple[Gateway, Upstreams], proxy: tuple[int, Path], name: str, stream: bool
) -> None:
    front_gateway, upstreams = front
    for _ in range(3):
        reply = front_gateway.post("chat/completions", {**chat(stream=stream), "model": name})
        assert reply.status_code == 200 and "59 " in reply.text, reply.text
    lines = proxy[1].read_text()
    port = upstreams.ports[name]
    if name == "secure":
        assert f"CONNECT localhost:{port} HTTP/1.1" in lines
        assert lines.count(f"CONNECT localhost:{port} ") < 8, "tunnels are used again"
    else:
        assert f"POST http://127.0.0.1:{port}/v1/chat/completions HTTP/1.1" in lines
    assert "proxy-authorization" not in upstreams.requests[name][-1].headers


def test_a_proxy_that_refuses_or_is_away_fails_the_attempt(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, _ = front
    for name in ("no-login", "no-proxy"):
        reply = front_gateway.post("chat/completions", {**chat(), "model": name})
        assert reply.status_code == 502, reply.text
        assert {attempt["outcome"] for attempt in reply.json()["error"]["attempts"]} == {"connect_error"}
    log = front_gateway.log.read_text()
    assert "refused CONNECT with status 407" in log and "s3cret" not in log
