"""What the policy adds to a deployment's requests, run over every provider against a real socket."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.deployments.fleet import Fleet
from gateway.policy import Deployment, Policy, Secret
from gateway.providers import PROVIDERS, Fault, ProviderFailure, make_provider
from gateway.providers.transport import HTTPTransport
from gateway.server.secret_refresh import SecretRefresh
from gateway.settings import SecretSources, SettingsError
from tests.gateway.calls import a_call
from tests.gateway.harness import policy_of
from tests.gateway.providers.scripted_server import ReceivedRequest, ScriptedServer, json_response

# Where other APIs have temperature, top_p and max_tokens
PARAMETERS = {
    "gemini": ("generationConfig", ("temperature", "topP", "maxOutputTokens")),
    "ollama": ("options", ("temperature", "top_p", "num_predict")),
}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def refuse(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """Quote a secret header, as some proxies do."""
    body = json.dumps({"error": {"message": f"no: {request.headers.get('x-token')}"}}).encode()
    writer.write(json_response(body, "400 Bad Request"))


async def received(kind: str, chat: dict[str, Any], **fields: Any) -> tuple[ReceivedRequest, ProviderFailure]:
    """Send a chat by a provider with these settings. Returns the request, and the rejection of `refuse`."""
    async with ScriptedServer(refuse) as server, HTTPTransport() as transport:
        deployment = Deployment.model_validate(
            {"name": "d", "provider": kind, "base_url": server.base_url, "model": "theirs", **fields}
        )
        provider = make_provider(deployment, transport, SecretSources().resolve)
        with pytest.raises(ProviderFailure) as rejection:
            await provider.open(a_call(chat), headers={})
        return server.requests[-1], rejection.value


@pytest.mark.parametrize("kind", sorted(PROVIDERS))
async def test_headers_and_query_are_sent_and_secrets_stay_secret(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "t0ken-of-the-deployment")
    request, rejection = await received(
        kind,
        CHAT,
        headers={"X-Team": "search", "x-token": {"env": "A_TOKEN"}, "User-Agent": "ours"},
        query={"api-version": "2026-10-21", "a b": "ü&"},
    )
    assert "?api-version=2026-10-21&a%20b=%C3%BC%26 HTTP/1.1" in request.head.splitlines()[0]
    assert {"x-team": "search", "x-token": "t0ken-of-the-deployment", "user-agent": "ours"}.items() <= (
        request.headers.items()
    )
    assert rejection.fault is Fault.REFUSED
    assert b"t0ken" not in rejection.body and b"[redacted]" in rejection.body


@pytest.mark.parametrize("kind", sorted(PROVIDERS))
async def test_defaults_overrides_and_system_prompt(kind: str) -> None:
    settings: dict[str, Any] = {
        "defaults": {"temperature": 0.25, "top_p": 0.5},
        "overrides": {"max_tokens": 77},
        "system_prompt": "Obey the style guide.",
    }
    request, _ = await received(kind, {**CHAT, "top_p": 0.75, "max_tokens": 900}, **settings)
    body = json.loads(request.body)
    where, names = PARAMETERS.get(kind, (None, ("temperature", "top_p", "max_tokens")))
    found = body if where is None else body[where]
    assert [found[name] for name in names] == [0.25, 0.75, 77]
    assert request.body.count(b"Obey the style guide.") == 1
    own = [{"role": "system", "content": "Be brief."}, *CHAT["messages"]]
    request, _ = await received(kind, {**CHAT, "messages": own}, **settings)
    assert b"Obey the style guide." in request.body
    assert request.body.index(b"Obey the style guide.") < request.body.index(b"Be brief.")


@pytest.mark.parametrize("kind", sorted(PROVIDERS))
async def test_the_key_is_sent_in_the_named_header_from_each_source(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "the-key")
    (tmp_path / "key").write_text("the-key\n")
    sources = {"env": "A_KEY"}, {"file": str(tmp_path / "key")}, {"command": ["printf", "the-key"]}
    for source in sources:
        request, _ = await received(
            kind, CHAT, api_key=source, key_header="Authorization"
        )  # as Entra's token for Azure
        assert request.headers["authorization"] == "Bearer the-key"
        request, _ = await received(kind, CHAT, api_key=source, key_header="X-Gateway-Key")
        assert request.headers["x-gateway-key"] == "the-key"
        assert not {"authorization", "api-key", "x-api-key", "x-goog-api-key"} & request.headers.keys()


@pytest.mark.parametrize("kind", sorted(PROVIDERS))
async def test_a_field_that_is_left_out_is_not_sent(kind: str) -> None:
    chat = {**CHAT, "temperature": 0.25, "top_p": 0.5}
    where, names = PARAMETERS.get(kind, (None, ("temperature", "top_p")))
    for left_out, expected in (([], {names[0], names[1]}), (["top_p"], {names[0]})):
        body = json.loads((await received(kind, chat, leave_out=left_out))[0].body)
        found = body if where is None else body[where]
        assert found.keys() & {names[0], names[1]} == expected


async def test_a_system_prompt_of_parts_is_extended() -> None:
    own = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *CHAT["messages"]]
    request, _ = await received("openai", {**CHAT, "messages": own}, system_prompt="First.")
    assert json.loads(request.body)["messages"][0] == {
        "role": "developer",
        "content": [{"type": "text", "text": "First."}, {"type": "text", "text": "Be brief."}],
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"headers": {"Host": "x"}}, "Host: the gateway sets this header itself"),
        ({"headers": {"a b": "x"}}, "is not the name of a header"),
        ({"headers": {"a": "x\r\ny: z"}}, "printable ASCII"),
        ({"headers": {"a": "1", "A": "2"}}, "named twice"),
        ({"defaults": {"model": "x"}}, "model: the gateway reads or sets this field"),
        ({"overrides": {"cache_salt": "x"}}, "cache_salt: the gateway reads or sets this field"),
        ({"api_key": {"env": "A", "file": "b"}}, "exactly one of env, file and command"),
        ({"api_key": {"env": "A", "expires": "1m"}}, "only the output of a command expires"),
    ],
)
def test_contradictions_are_found_in_the_policy(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Deployment.model_validate({"name": "d", "base_url": "http://x/v1", "model": "m", **fields})


def test_a_command_runs_again_when_its_output_has_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = tmp_path / "count"
    script = f"import pathlib; p = pathlib.Path({str(count)!r}); p.open('a').write('x'); print('k' + p.read_text())"
    secret = Secret(command=(sys.executable, "-c", script), expires=60.0)
    now = 100.0
    monkeypatch.setattr("gateway.settings.time.monotonic", lambda: now)
    sources = SecretSources()
    assert [sources.resolve(secret) for _ in range(2)] == ["kx", "kx"]
    now += 61
    assert sources.resolve(secret) == "kxx"
    for broken in (Secret(command=("/does/not/exist",)), Secret(command=("false",)), Secret(file=str(tmp_path / "no"))):
        with pytest.raises(SettingsError, match="cannot be read"):
            sources.resolve(broken)
    (tmp_path / "two").write_text("a\nb\n")
    with pytest.raises(SettingsError, match="one line"):
        sources.resolve(Secret(file=str(tmp_path / "two")))


async def test_a_changed_file_is_used_and_a_missing_one_keeps_the_last_value(tmp_path: Path) -> None:
    file, sources = tmp_path / "key", SecretSources()
    file.write_text("key-one-of-two\n")
    async with ScriptedServer(refuse) as server, HTTPTransport() as transport:
        given = policy_of()
        given["deployments"][0] |= {"base_url": server.base_url, "api_key": {"file": str(file)}}

        def make(config: Deployment) -> Any:
            return make_provider(config, transport, sources.resolve)

        fleet = Fleet(make)
        fleet.apply(Policy.model_validate(given))
        refresh = SecretRefresh(fleet, sources.resolve, make)
        sent = []
        for content in ("key-one-of-two\n", "key-two-of-two", None):
            file.unlink() if content is None else file.write_text(content)
            await refresh.refresh()
            with pytest.raises(ProviderFailure):
                await next(iter(fleet)).provider.open(a_call(CHAT), headers={})
            sent.append(server.requests[-1].headers["authorization"])
        assert sent == ["Bearer key-one-of-two", "Bearer key-two-of-two", "Bearer key-two-of-two"]
