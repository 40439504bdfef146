"""Client of an OpenID Connect provider: authorization code flow with PKCE (OpenID Connect Core 1.0, RFC 7636).

    authorization_url   where the browser is sent to
    redeem              exchanges the code with which it comes back for the person's claims
    end_session_url     where the browser ends its session with the provider

The provider's metadata and keys are read when they are needed, and kept for an hour. A token that is signed with an
unknown key has the keys read again. Redirects are not followed, and answers, waits and the number of requests at a time
are bounded, since everyone who reaches the admin listener can begin a sign-in.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import httpx2
import msgspec

from gateway.policy import Secret, UpstreamTLS
from gateway.policy.sign_in import SignIn, is_secure_url
from gateway.providers.transport import UnusableFile, tls_context
from gateway.settings import SettingsError

REQUEST_SECONDS = 10.0  # of each request to the provider
REQUESTS_MAX = 32  # at a time; further sign-ins are refused
FAILURE_SECONDS = 2.0  # how long metadata that could not be read is not tried again
ANSWER_BYTES_MAX = 1024 * 1024
KEEP_SECONDS = 3600.0  # metadata and keys
KEYS_AGAIN_SECONDS = 60.0  # least time between two reads of the keys because of unknown ones
TOKEN_CHARACTERS_MAX = 64 * 1024

CALLBACK = "/session/callback"  # below the public URL


class ProviderError(Exception):
    """The provider did not answer, or answered against the specification. The message contains nothing secret."""


class _Metadata(msgspec.Struct, frozen=True):
    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str | None = None
    end_session_endpoint: str | None = None
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)


_URLS = ("authorization_endpoint", "token_endpoint", "jwks_uri", "userinfo_endpoint", "end_session_endpoint")


class _Tokens(msgspec.Struct, frozen=True):
    id_token: str
    access_token: str = ""


class OpenIdProvider:
    """Client of one provider. Must be used on one event loop."""

    def __init__(
        self, sign_in: SignIn, resolve_secret: Callable[[Secret], str], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._sign_in = sign_in
        self._resolve_secret = resolve_secret
        self._clock = clock
        self._metadata: tuple[_Metadata, float] | None = None  # and when it was read
        self._keys: tuple[dict[str, Any], float] | None = None
        self._failure: tuple[str, float] | None = None  # why the metadata could not be read, and when
        self._requests = 0
        self._tls: ssl.SSLContext | None = None  # making one takes tens of milliseconds

    async def authorization_url(self, *, state: str, nonce: str, verifier: str) -> str:
        """Return the URL of the provider's sign-in page. Raises `ProviderError`."""
        metadata = await self._read_metadata()
        query = {
            "response_type": "code",
            "client_id": self._sign_in.client_id,
            "redirect_uri": self._sign_in.origin + CALLBACK,
            "scope": " ".join(self._sign_in.scopes),
            "state": state,
            "nonce": nonce,
            "code_challenge": _challenge(verifier),
            "code_challenge_method": "S256",
        }
        return _with_query(metadata.authorization_endpoint, query)

    async def redeem(self, code: str, *, nonce: str, verifier: str) -> dict[str, Any]:
        """Exchange a code for the claims about the person. Raises `ProviderError`.

        If the ID token has no claim that the policy's roles refer to, the claims of the userinfo endpoint are added.
        """
        metadata = await self._read_metadata()
        tokens = await self._exchange(metadata, code, verifier)
        claims = await self._verified(metadata, tokens.id_token, nonce)
        endpoint = metadata.userinfo_endpoint
        if find_claim(claims, self._sign_in.claim) is None and endpoint is not None and tokens.access_token:
            more = await self._request("GET", endpoint, headers={"authorization": f"Bearer {tokens.access_token}"})
            found = _decode(more, dict[str, Any], "userinfo")
            if found.get("sub") != claims["sub"]:
                raise ProviderError("the userinfo endpoint answered for another person")
            claims = {**found, **claims}
        return claims

    async def end_session_url(self) -> str | None:
        """Return where the browser ends its session with the provider. None if the provider has no such page.

        Raises `ProviderError`.
        """
        endpoint = (await self._read_metadata()).end_session_endpoint
        if endpoint is None:
            return None
        query = {
            "client_id": self._sign_in.client_id,
            "post_logout_redirect_uri": f"{self._sign_in.origin}/dashboard/",
        }
        return _with_query(endpoint, query)

    async def _exchange(self, metadata: _Metadata, code: str, verifier: str) -> _Tokens:
        sign_in, headers = self._sign_in, dict[str, str]()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": sign_in.origin + CALLBACK,
            "code_verifier": verifier,
        }
        if sign_in.client_secret is None:
            form["client_id"] = sign_in.client_id
        else:
            try:
                secret = await asyncio.to_thread(self._resolve_secret, sign_in.client_secret)
            except SettingsError as error:
                raise ProviderError(str(error)) from None
            if "client_secret_basic" in metadata.token_endpoint_auth_methods_supported:
                login = f"{quote(sign_in.client_id, safe='')}:{quote(secret, safe='')}"
                headers["authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
            else:
                form |= {"client_id": sign_in.client_id, "client_secret": secret}
        answer = await self._request("POST", metadata.token_endpoint, headers=headers, form=form)
        tokens: _Tokens = _decode(answer, _Tokens, "token")
        if len(tokens.id_token) > TOKEN_CHARACTERS_MAX:
            raise ProviderError("the ID token is too long")
        return tokens

    async def _verified(self, metadata: _Metadata, token: str, nonce: str) -> dict[str, Any]:
        tokens = load_id_tokens()
        expected = {"issuer": metadata.issuer, "client_id": self._sign_in.client_id, "nonce": nonce}
        now = self._clock()
        try:
            try:
                claims = tokens.verify_id_token(token, await self._read_keys(metadata), now=now, **expected)
            except tokens.UnknownKey:
                claims = tokens.verify_id_token(token, await self._read_keys(metadata, again=True), now=now, **expected)
        except tokens.InvalidToken as error:
            raise ProviderError(f"the ID token is not valid: {error}") from None
        checked: dict[str, Any] = claims
        return checked

    async def _read_metadata(self) -> _Metadata:
        if self._metadata is not None and self._clock() < self._metadata[1] + KEEP_SECONDS:
            return self._metadata[0]
        if self._failure is not None and self._clock() < self._failure[1] + FAILURE_SECONDS:
            raise ProviderError(self._failure[0])
        try:
            metadata = await self._request_metadata()
        except ProviderError as error:
            self._failure = str(error), self._clock()
            raise
        self._metadata = metadata, self._clock()
        return metadata

    async def _request_metadata(self) -> _Metadata:
        issuer = self._sign_in.issuer
        answer = await self._request("GET", f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        metadata: _Metadata = _decode(answer, _Metadata, "metadata")
        if metadata.issuer != issuer:
            raise ProviderError(f"the provider calls itself {metadata.issuer[:200]!r} and not {issuer!r}")
        for name in _URLS:
            url = getattr(metadata, name)
            if url is not None and not is_secure_url(url):
                raise ProviderError(f"{name} in the provider's metadata is not an https URL")
        return metadata

    async def _read_keys(self, metadata: _Metadata, *, again: bool = False) -> dict[str, Any]:
        if self._keys is not None:
            keep = KEYS_AGAIN_SECONDS if again else KEEP_SECONDS
            if self._clock() < self._keys[1] + keep:
                return self._keys[0]
        keys: dict[str, Any] = _decode(await self._request("GET", metadata.jwks_uri), dict[str, Any], "key")
        self._keys = keys, self._clock()
        return keys

    async def _request(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, form: Mapping[str, str] | None = None
    ) -> bytes:
        """Send a request, and return the body of its 200. Raises `ProviderError`."""
        if self._requests >= REQUESTS_MAX:
            raise ProviderError("too many sign-ins at a time")
        sent = {"accept": "application/json", **(headers or {})}
        body = bytearray()
        self._requests += 1
        try:
            if self._tls is None:
                self._tls = tls_context(None if self._sign_in.ca is None else UpstreamTLS(ca=self._sign_in.ca))
            async with (
                httpx2.AsyncClient(timeout=REQUEST_SECONDS, follow_redirects=False, verify=self._tls) as client,
                client.stream(method, url, headers=sent, data=form) as reply,
            ):
                async for part in reply.aiter_bytes():
                    body += part
                    if len(body) > ANSWER_BYTES_MAX:
                        raise ProviderError(f"{_without_query(url)} answered more than {ANSWER_BYTES_MAX} bytes")
        except (httpx2.HTTPError, UnusableFile, OSError, ValueError) as error:
            raise ProviderError(f"{_without_query(url)} did not answer: {type(error).__name__}") from None
        finally:
            self._requests -= 1
        if reply.status_code != 200:
            raise ProviderError(f"{_without_query(url)} answered {reply.status_code}{_error_code(bytes(body))}")
        return bytes(body)


def find_claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return the value of a claim, or None. A name with dots that is no claim itself leads into objects."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def load_id_tokens() -> Any:
    """Import `gateway.auth.id_tokens`. Raises `ProviderError` if the optional package is not installed."""
    try:
        return importlib.import_module("gateway.auth.id_tokens")
    except ModuleNotFoundError as error:
        raise ProviderError(f"the package {error.name} is not installed: pip install 'warmpath[oidc]'") from None


def _challenge(verifier: str) -> str:
    digest = hashlib.sha256(verifier.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _with_query(url: str, query: Mapping[str, str]) -> str:
    return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}"


def _without_query(url: str) -> str:
    return url.partition("?")[0]


def _decode(body: bytes, form: Any, endpoint: str) -> Any:
    try:
        return msgspec.json.decode(body, type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProviderError(f"the {endpoint} endpoint's answer cannot be read: {error}") from None


def _error_code(body: bytes) -> str:
    """The code in the member `error` of an OAuth error response, after a space. Empty if the body has no such code."""
    try:
        code = msgspec.json.decode(body, type=dict[str, Any]).get("error")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return f" {code[:50]!r}" if isinstance(code, str) else ""
