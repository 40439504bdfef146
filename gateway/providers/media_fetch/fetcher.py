"""Fetches the media of a call that are given by URL, and returns the call with their data.

Every URL, and every redirect, must have a host that `media_fetch.hosts` allows, and addresses that are public or that
the policy names. Bytes, time, redirects and concurrent fetches are bounded. No header of the client and no cookie is
sent. A call whose media cannot be fetched fails with a 400 that names the field.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator

import httpx2
import msgspec

from gateway.core.timers import time_bound
from gateway.core.worker_thread import LARGE_BYTES, in_thread
from gateway.policy import UpstreamTLS
from gateway.policy.media_fetch import MediaFetch
from gateway.providers.base import Fault, ProviderFailure
from gateway.providers.media_fetch.addresses import is_address, is_allowed, resolve
from gateway.providers.media_fetch.cache import FetchedMedium, MediaCache
from gateway.providers.media_fetch.media_types import ACCEPTED, media_type_of
from gateway.providers.media_fetch.parts import RemoteMedium, remote_media, with_data
from gateway.providers.translation import error_body
from gateway.providers.transport import HTTPResponse, HTTPTransport, header_lines
from gateway.providers.transport.origin_pool import OriginPool
from gateway.providers.transport.tls import UnusableFile, tls_context
from gateway.types import Call

log = logging.getLogger("warmpath")

MEDIA_MAX = 64  # URLs of one request
REDIRECTS_MAX = 3
CONCURRENT_FETCHES_MAX = 16  # per process; others wait, within their `timeout`
ADDRESSES_MAX = 3  # of one host, to which a connection is tried
CODE = "media_not_fetched"
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class NotFetched(Exception):
    """Why a medium cannot be fetched, in words for the client."""


class _Allowance:
    """The bytes that may still be fetched for one call."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left_bytes = max_bytes

    def take(self, size_bytes: int) -> None:
        """Raise `NotFetched` if the media of the call have more bytes than they may have."""
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            raise NotFetched(f"the media of a request may have at most {self._max_bytes:,} bytes")


class MediaFetcher:
    """Fetches and caches media. One per gateway process; owned by the event loop."""

    def __init__(self, transport: HTTPTransport) -> None:
        self._transport = transport
        self._cache = MediaCache()
        self._slots = asyncio.Semaphore(CONCURRENT_FETCHES_MAX)
        self._tls: tuple[str | None, ssl.SSLContext] | None = None  # of the last policy

    async def with_data(self, call: Call, kinds: frozenset[str]) -> Call:
        """Return the call with data instead of the URLs of these kinds of parts. Raises `ProviderFailure`."""
        messages = call.fields.get("messages")
        media = remote_media(messages, kinds) if kinds and messages is not None else []
        if messages is None or not media:
            return call
        if len(media) > MEDIA_MAX:
            raise _failure(media[-1], f"a request may have at most {MEDIA_MAX} media by URL")
        urls = await self._fetch_all(call, media)
        size_bytes = sum(map(len, urls)) + memoryview(messages).nbytes
        large = call.large or size_bytes > LARGE_BYTES
        arguments = (messages, media, urls)
        changed = await in_thread(with_data, *arguments) if large else with_data(*arguments)
        return msgspec.structs.replace(call, fields={**call.fields, "messages": changed}, large=large)

    async def _fetch_all(self, call: Call, media: list[RemoteMedium]) -> list[str]:
        """Return the data URL of each medium. Each URL is fetched once."""
        rules = call.policy.media_fetch
        allowance = _Allowance(rules.max_bytes)
        first = {(medium.url, medium.kind): medium for medium in reversed(media)}
        tasks = {
            key: asyncio.ensure_future(self._medium(call.tenant_name, medium, rules, allowance))
            for key, medium in first.items()
        }
        try:
            async with time_bound(rules.timeout):
                await asyncio.gather(*tasks.values())
        except TimeoutError:
            late = next((each for key, each in first.items() if tasks[key].cancelled()), media[0])
            raise _failure(late, f"not fetched within {rules.timeout:g} s") from None
        finally:
            for task in tasks.values():
                task.cancel()
        return [tasks[medium.url, medium.kind].result().data_url for medium in media]

    async def _medium(
        self, tenant: str, medium: RemoteMedium, rules: MediaFetch, allowance: _Allowance
    ) -> FetchedMedium:
        """Return a medium from the cache or from its host. Raises `ProviderFailure`."""
        loop = asyncio.get_running_loop()
        try:
            url = _checked(medium.url, rules)  # before the cache: the policy may have changed
            if (known := self._cache.get(tenant, medium.url, loop.time())) is not None:
                if not known.media_type.startswith(ACCEPTED[medium.kind]):
                    raise NotFetched(f"is {known.media_type}, which this part cannot have")
                allowance.take(len(known.data) * 3 // 4)
                return known
            async with self._slots:
                found, may_keep = await self._get(url, medium.kind, rules, allowance)
        except NotFetched as problem:
            raise _failure(medium, str(problem)) from None
        if may_keep and rules.cache_bytes:
            self._cache.put(tenant, medium.url, found, loop.time() + rules.cache_for, rules.cache_bytes)
        return found

    async def _get(
        self, url: httpx2.URL, kind: str, rules: MediaFetch, allowance: _Allowance
    ) -> tuple[FetchedMedium, bool]:
        """Fetch a URL, following redirects. Returns the medium, and whether it may be cached."""
        for _ in range(REDIRECTS_MAX + 1):
            try:
                async with self._response(url, rules) as response:
                    if response.status in _REDIRECTS:
                        url = _checked(str(url.join(response.header(b"location").decode("latin-1"))), rules)
                        continue
                    if response.status != 200:
                        raise NotFetched(f"{url.host} answered with status {response.status}")
                    return await _read(response, kind, allowance)
            except httpx2.TransportError as error:
                raise NotFetched(f"{url.host} broke off its answer") from error
            except httpx2.InvalidURL:
                raise NotFetched(f"{url.host} redirects to a malformed URL") from None
        raise NotFetched(f"{url.host} redirects more than {REDIRECTS_MAX} times")

    @contextlib.asynccontextmanager
    async def _response(self, url: httpx2.URL, rules: MediaFetch) -> AsyncIterator[HTTPResponse]:
        """Send a GET to one of the host's addresses, on a connection of its own, which is closed afterwards."""
        host, port = _host(url), _port(url)
        context = self._context(rules.ca) if url.scheme == "https" else None
        lines = header_lines(
            [(b"host", url.netloc), (b"user-agent", b"warmpath"), (b"accept", b"*/*"),
             (b"accept-encoding", b"identity"), (b"connection", b"close")]
        )  # fmt: skip
        head = b"GET %b HTTP/1.1\r\n%b" % (url.raw_path, lines)
        for address in (addresses := await _addresses(host, port, rules)):
            pool = OriginPool(host, port, context, 1, 0.0, address=address)
            try:
                response = await self._transport.send(pool, head, b"")
            except httpx2.TransportError as error:
                if address != addresses[-1]:
                    continue
                log.info("media cannot be fetched from %s: %s", host, error)
                raise NotFetched(f"{host} cannot be reached, or gives no answer") from error
            try:
                yield response
                return
            finally:
                await response.aclose()
                pool.close_idle()
        raise NotFetched(f"{host} has no address")

    def _context(self, ca: str | None) -> ssl.SSLContext:
        """Return the TLS context, whose files are read once for a policy's `ca`."""
        if self._tls is None or self._tls[0] != ca:
            try:
                self._tls = (ca, tls_context(UpstreamTLS(ca=ca)))
            except UnusableFile as error:
                log.warning("media_fetch.ca cannot be used: %s", error)
                raise NotFetched("media_fetch.ca of the gateway's policy cannot be used") from None
        return self._tls[1]


async def _addresses(host: str, port: int, rules: MediaFetch) -> list[str]:
    """Resolve a host. Raises `NotFetched` if one of its addresses is not allowed."""
    try:
        found = await resolve(host, port)
    except OSError:
        raise NotFetched(f"{host} has no address") from None
    if not is_address(host):  # an address that the policy's hosts name is allowed by that
        for address in found:
            if not is_allowed(address, rules.allowed_networks):
                raise NotFetched(
                    f"{host} has an address that is not public; media_fetch.networks of the gateway's policy can "
                    "allow it"
                )
    return found[:ADDRESSES_MAX]


def _checked(text: str, rules: MediaFetch) -> httpx2.URL:
    """Return a URL that the policy allows. Raises `NotFetched`."""
    try:
        url = httpx2.URL(text)
        host, port = _host(url), _port(url)
    except (httpx2.InvalidURL, ValueError):
        raise NotFetched("is not a valid URL") from None
    if url.userinfo:
        raise NotFetched("a URL with a user or a password is not fetched")
    if not any(rule.allows(url.scheme, host, port) for rule in rules.rules):
        raise NotFetched(
            f"the gateway may not fetch from {url.scheme}://{host}:{port}; media_fetch.hosts of its policy can allow "
            "it, or send the data itself"
        )
    return url


def _host(url: httpx2.URL) -> str:
    return url.raw_host.decode("ascii").lower().strip("[]")


def _port(url: httpx2.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


async def _read(response: HTTPResponse, kind: str, allowance: _Allowance) -> tuple[FetchedMedium, bool]:
    if response.header(b"content-encoding").lower() not in (b"", b"identity"):
        raise NotFetched("its host sends it compressed, although the request accepts only identity")
    parts = []
    async for part in response:
        allowance.take(len(part))
        parts.append(part)
    body = b"".join(parts)
    content_type = response.header(b"content-type").decode("latin-1")
    media_type = media_type_of(kind, content_type, body)
    if media_type is None:
        raise NotFetched(f"is {content_type[:100] or 'of an unknown type'}, which this part cannot have")
    encoded = await in_thread(base64.b64encode, body) if len(body) > LARGE_BYTES else base64.b64encode(body)
    may_keep = b"no-store" not in response.header(b"cache-control").lower()
    return FetchedMedium(media_type, encoded.decode()), may_keep


def _failure(medium: RemoteMedium, problem: str) -> ProviderFailure:
    """Return the failure of a deployment that needs the medium's data. Others may take its URL."""
    message = f"{medium.param}: {problem}"
    return ProviderFailure(
        Fault.UNSUPPORTED,
        message,
        status=400,
        body=error_body(message, param=medium.param, code=CODE),
        log_message=f"{medium.param} was not fetched",
    )
