"""Fetching over real sockets: what is allowed, what is refused and named, and what is bounded."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from gateway.policy import Policy
from gateway.providers.base import Fault, ProviderFailure
from gateway.providers.media_fetch import fetcher as fetching
from gateway.providers.media_fetch.fetcher import CODE, CONCURRENT_FETCHES_MAX, MEDIA_MAX, MediaFetcher
from gateway.providers.media_fetch.parts import ALL_PARTS
from gateway.providers.transport import HTTPTransport
from gateway.types import Call
from tests.gateway.calls import a_call, a_policy, chat
from tests.gateway.providers.scripted_server import ReceivedRequest, ScriptedServer

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
PNG_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
FIELD = "messages[0].content[0].image_url.url"


def reply(body: bytes = PNG, status: str = "200 OK", *headers: str, media_type: str = "image/png") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-type: {media_type}", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answering(*replies: bytes) -> ScriptedServer:
    """Sends the replies in their order, and the last one to all further requests."""
    left = list(replies)

    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        await writer.drain()

    return ScriptedServer(script)


def redirect(to: str, status: str = "302 Found") -> bytes:
    return reply(b"", status, f"location: {to}")


def allowing(*hosts: str, **rules: Any) -> Policy:
    return a_policy(media_fetch={"hosts": hosts, **rules})


def origin(server: ScriptedServer, host: str = "127.0.0.1") -> str:
    return f"http{'s' if server._tls else ''}://{host}:{server.port}"


def call_for(policy: Policy, *urls: str, tenant: str = "t") -> Call:
    return a_call(chat([{"type": "image_url", "image_url": {"url": url}} for url in urls]), policy, tenant=tenant)


@pytest.fixture
async def fetcher() -> AsyncIterator[MediaFetcher]:
    async with HTTPTransport() as transport:
        yield MediaFetcher(transport)


async def fetched(fetcher: MediaFetcher, policy: Policy, *urls: str, tenant: str = "t") -> list[str]:
    call = await fetcher.with_data(call_for(policy, *urls, tenant=tenant), ALL_PARTS)
    (message,) = json.loads(bytes(call.fields["messages"]))
    return [part["image_url"]["url"] for part in message["content"]]


async def refusal(fetcher: MediaFetcher, policy: Policy, *urls: str, field: str = FIELD) -> str:
    """The error's message, without the field that it names."""
    with pytest.raises(ProviderFailure) as raised:
        await fetched(fetcher, policy, *urls)
    failure = raised.value
    error = json.loads(failure.body)["error"]
    assert (failure.fault, failure.status, error["param"], error["code"]) == (Fault.UNSUPPORTED, 400, field, CODE)
    assert error["message"].startswith(f"{field}: ")
    return str(error["message"]).removeprefix(f"{field}: ")


async def test_media_of_an_allowed_host_become_data(fetcher: MediaFetcher) -> None:
    async with answering(reply()) as server:
        url = f"{origin(server)}/a.png?signed=1"
        assert await fetched(fetcher, allowing(origin(server)), url, PNG_URL, url) == [PNG_URL] * 3
        (request,) = server.requests
        await server.until_the_client_closed()
        assert request.head == "GET /a.png?signed=1 HTTP/1.1"
        assert request.headers["host"] == f"127.0.0.1:{server.port}"
        assert not {"authorization", "cookie", "x-request-id"} & request.headers.keys()


async def test_a_host_that_is_not_allowed_is_refused_by_name(fetcher: MediaFetcher) -> None:
    async with answering(reply()) as server:
        message = await refusal(fetcher, allowing("images.example.com"), f"{origin(server)}/a.png")
        assert "may not fetch" in message and "media_fetch.hosts" in message and origin(server) in message
        assert not server.connections


@pytest.mark.parametrize("to", ["http://localhost:{port}/b", "https://127.0.0.1:{port}/b", "//169.254.169.254/meta"])
async def test_a_redirect_may_lead_to_allowed_hosts_only(fetcher: MediaFetcher, to: str) -> None:
    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(redirect(to.format(port=server.port)))

    async with ScriptedServer(script) as server:
        assert "may not fetch" in await refusal(fetcher, allowing(origin(server)), f"{origin(server)}/a")
        assert len(server.requests) == 1


async def test_redirects_between_allowed_hosts_are_followed_and_bounded(fetcher: MediaFetcher) -> None:
    async with answering(redirect("/b"), redirect("c", "308 Permanent Redirect"), reply()) as server:
        assert await fetched(fetcher, allowing(origin(server)), f"{origin(server)}/a") == [PNG_URL]
        assert [request.head.split()[1] for request in server.requests] == ["/a", "/b", "/c"]
    async with answering(redirect("/again")) as server:
        message = await refusal(fetcher, allowing(origin(server)), f"{origin(server)}/a")
        assert "redirects more than 3 times" in message


async def test_a_name_with_a_private_address_needs_a_named_network(fetcher: MediaFetcher) -> None:
    async with answering(reply()) as server:
        url, hosts = f"{origin(server, 'localhost')}/a.png", origin(server, "localhost")
        message = await refusal(fetcher, allowing(hosts), url)
        assert "not public" in message and "media_fetch.networks" in message
        assert not server.connections
        networks = ["127.0.0.0/8", "::1/128"]
        assert await fetched(fetcher, allowing(hosts, networks=networks), url) == [PNG_URL]


async def test_the_connection_goes_to_the_address_that_was_checked(
    fetcher: MediaFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = []

    async def resolve(host: str, port: int) -> list[str]:
        resolved.append(host)
        return ["127.0.0.1"]

    monkeypatch.setattr(fetching, "resolve", resolve)
    async with answering(reply()) as server:
        url = f"{origin(server, 'cdn.images.test')}/a.png"
        policy = allowing(origin(server, "*.images.test"), networks="127.0.0.1/32")
        assert await fetched(fetcher, policy, url) == [PNG_URL]
        assert resolved == ["cdn.images.test"]  # a name that no name server knows: it was not resolved again
        assert server.requests[0].headers["host"] == f"cdn.images.test:{server.port}"


async def test_one_private_address_among_public_ones_is_refused(
    fetcher: MediaFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["93.184.216.34", "10.0.0.1"]

    monkeypatch.setattr(fetching, "resolve", resolve)
    assert "not public" in await refusal(fetcher, allowing("images.test"), "https://images.test/a.png")


async def test_tls_verifies_the_name_and_the_authority(
    fetcher: MediaFetcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    monkeypatch.setattr(fetching, "resolve", resolve)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("images.test").configure_cert(context)

    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(reply())

    async with ScriptedServer(script, tls=context) as server:
        rules: dict[str, Any] = {"networks": "127.0.0.1/32", "cache_bytes": 0}
        host, other = f"images.test:{server.port}", f"other.test:{server.port}"
        url, elsewhere = f"https://{host}/a.png", f"https://{other}/a.png"
        assert "cannot be reached" in await refusal(fetcher, allowing(host, **rules), url)
        trusting = allowing(host, other, ca=str(tmp_path / "ca.pem"), **rules)
        assert await fetched(fetcher, trusting, url) == [PNG_URL]
        assert "cannot be reached" in await refusal(fetcher, trusting, elsewhere)
        missing = allowing(host, ca=str(tmp_path / "missing.pem"), **rules)
        assert "media_fetch.ca" in await refusal(fetcher, missing, url)


async def test_the_bytes_of_a_request_s_media_are_bounded_together(fetcher: MediaFetcher) -> None:
    async with answering(reply(PNG + bytes(400))) as server:
        policy = allowing(origin(server), max_bytes=1_000, cache_bytes=0)
        urls = [f"{origin(server)}/{name}" for name in "ab"]
        assert len(await fetched(fetcher, policy, urls[0])) == 1
        with pytest.raises(ProviderFailure, match="at most 1,000 bytes"):
            await fetched(fetcher, policy, *urls)
        kept = allowing(origin(server), max_bytes=1_000)
        for url in urls:
            await fetched(fetcher, kept, url)
        with pytest.raises(ProviderFailure, match="at most 1,000 bytes"):  # the same from the cache
            await fetched(fetcher, kept, *urls)


async def test_an_endless_body_is_cut_off(fetcher: MediaFetcher) -> None:
    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n\r\n")
        while True:
            writer.write(bytes(10_000))
            await writer.drain()

    async with ScriptedServer(script) as server:
        policy = allowing(origin(server), max_bytes=100_000)
        assert "at most 100,000 bytes" in await refusal(fetcher, policy, f"{origin(server)}/a")
        await server.until_the_client_closed()


async def test_a_silent_host_takes_no_longer_than_the_timeout(fetcher: MediaFetcher) -> None:
    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        pass

    async with ScriptedServer(script) as server:
        policy = allowing(origin(server), timeout="50ms")
        assert await refusal(fetcher, policy, f"{origin(server)}/a") == "not fetched within 0.05 s"
        await server.until_the_client_closed()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (reply(b"<html>", media_type="text/html"), "is text/html, which this part cannot have"),
        (reply(status="404 Not Found"), "127.0.0.1 answered with status 404"),
        (reply(PNG, "200 OK", "content-encoding: gzip"), "its host sends it compressed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", "127.0.0.1 broke off its answer"),
        (b"nonsense\r\n\r\n", "127.0.0.1 cannot be reached, or gives no answer"),
        (redirect("http://[nonsense"), "may not fetch"),
    ],
)
async def test_what_is_wrong_with_an_answer_is_said(fetcher: MediaFetcher, answer: bytes, problem: str) -> None:
    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with ScriptedServer(script) as server:
        assert problem in await refusal(fetcher, allowing(origin(server)), f"{origin(server)}/a")


@pytest.mark.parametrize("url", ["https://user:password@images.test/a", "https://images.test:99999/a", "https://"])
async def test_odd_urls_are_not_fetched(fetcher: MediaFetcher, url: str) -> None:
    message = await refusal(fetcher, allowing("images.test"), url)
    assert "password" in message or "valid URL" in message or "may not fetch" in message
    assert "user:password" not in message


async def test_fetched_media_are_cached_for_their_tenant(fetcher: MediaFetcher) -> None:
    async with answering(reply()) as server:
        policy, url = allowing(origin(server)), f"{origin(server)}/a"
        for _ in range(2):
            assert await fetched(fetcher, policy, url) == [PNG_URL]
        assert len(server.requests) == 1
        assert await fetched(fetcher, policy, url, tenant="u") == [PNG_URL]
        assert len(server.requests) == 2
        await refusal(fetcher, allowing("images.test"), url)  # a changed policy counts at once


async def test_what_its_host_forbids_to_store_is_fetched_again(fetcher: MediaFetcher) -> None:
    async with answering(reply(PNG, "200 OK", "cache-control: private, No-Store")) as server:
        for _ in range(2):
            assert await fetched(fetcher, allowing(origin(server)), f"{origin(server)}/a") == [PNG_URL]
        assert len(server.requests) == 2


async def test_the_number_of_media_and_of_concurrent_fetches_is_bounded(fetcher: MediaFetcher) -> None:
    open_now, most = 0, 0
    go_on = asyncio.Event()

    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        if open_now == CONCURRENT_FETCHES_MAX:
            go_on.set()
        await go_on.wait()
        open_now -= 1
        writer.write(reply())

    async with ScriptedServer(script) as server:
        policy = allowing(origin(server))
        urls = [f"{origin(server)}/{number}" for number in range(MEDIA_MAX + 1)]
        assert len(await fetched(fetcher, policy, *urls[:-1])) == MEDIA_MAX
        assert most == CONCURRENT_FETCHES_MAX
        field = FIELD.replace("content[0]", f"content[{MEDIA_MAX}]")
        assert f"at most {MEDIA_MAX} media" in await refusal(fetcher, policy, *urls, field=field)


async def test_a_large_medium_makes_the_call_large(fetcher: MediaFetcher) -> None:
    async with answering(reply(PNG + bytes(600_000))) as server:
        call = call_for(allowing(origin(server)), f"{origin(server)}/a")
        assert not call.large
        assert (await fetcher.with_data(call, ALL_PARTS)).large


async def test_a_call_without_urls_is_returned_as_it_is(fetcher: MediaFetcher) -> None:
    call = call_for(allowing("images.test"), PNG_URL)
    assert await fetcher.with_data(call, ALL_PARTS) is call
    remote = call_for(allowing("images.test"), "https://images.test/a")
    assert await fetcher.with_data(remote, frozenset()) is remote
