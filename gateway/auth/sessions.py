"""Sessions of people who signed in to the dashboard through an OpenID Connect provider.

A session is a signed cookie. It has the person, when it began, and which values of the role claim they had. What these
values permit is looked up in the policy at every request, so a removed entry of `sign_in.roles` takes effect at once.
Signing out ends all sessions of a person, at all gateways on the storage: a record says until when their sessions are
void. The cookies are signed with a key that is derived from `WARMPATH_ADMIN_KEY` and the pepper, so that replacing the
admin key ends all sessions.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from pydantic import SecretStr

from gateway.auth.admin_keys import Actor
from gateway.auth.openid_provider import OpenIdProvider, ProviderError, find_claim
from gateway.auth.records import RecordFeed
from gateway.auth.signed_cookies import CookieSigner
from gateway.core.errors import Conflict
from gateway.policy import Policy, Secret
from gateway.policy.sign_in import SESSION_SECONDS_MAX, SignIn, SignInRole

SIGN_IN_SECONDS = 600.0  # how long a person may take at the provider
SIGNED_OUT = "signed_out"  # the kind of the records of people whose earlier sessions are void
SIGNED_OUT_MAX = 10_000  # such records; those that no session can be older than are removed first
NAME_CHARACTERS_MAX = 100
SUBJECT_CHARACTERS_MAX = 255  # by the specification
VALUES_MAX = 1_000  # values of a claim that are looked at
GRANTED_MAX = 50  # values with a role that a session has: the first in the policy, so that its cookie is not too long
_DIGITS = 16  # of the SHA-256 of a value

log = logging.getLogger(__name__)


class PendingSignIn(msgspec.Struct, frozen=True):
    """A sign-in that has begun, in a cookie of the browser: only this browser can finish it."""

    state: str
    nonce: str
    verifier: str


class Session(msgspec.Struct, frozen=True):
    """A person's session.

    `values` are digests of the claim's values to which the policy gave a role at sign-in, GRANTED_MAX at most.
    """

    subject: str
    name: str
    issuer: str
    client_id: str
    values: tuple[str, ...]
    began: float  # seconds since the epoch
    expires: float
    csrf: str  # which requests that change something repeat in a header


class SignInRefused(Exception):
    """A person was not signed in. `code` is shown in the dashboard, and the message is for the log.

    `person` is who it was, if the provider has said so.
    """

    def __init__(self, code: str, message: str, *, person: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.person = person


class Sessions:
    """Begins, finds and ends sessions. No person has a session without `sign_in` in the policy. Not thread-safe."""

    def __init__(
        self,
        policy: Callable[[], Policy],
        feed: RecordFeed,
        resolve_secret: Callable[[Secret], str],
        *,
        admin_key: SecretStr | None,
        pepper: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._policy = policy
        self._feed = feed
        self._resolve_secret = resolve_secret
        self._clock = clock
        key = b"" if admin_key is None else admin_key.get_secret_value().encode()
        derived = hmac.digest(key, b"warmpath dashboard sessions\n" + pepper.encode(), "sha256")
        self._signer = None if admin_key is None else CookieSigner(derived, clock=clock)
        self._provider: tuple[SignIn, OpenIdProvider] | None = None

    @property
    def sign_in(self) -> SignIn | None:
        """How people sign in, by the policy in force. None: with an admin key only."""
        return None if self._signer is None else self._policy().sign_in

    async def begin(self) -> tuple[str, str]:
        """Begin a sign-in. Returns the URL of the provider's page, and the cookie. Raises `SignInRefused`."""
        _, signer = self._configured()
        pending = PendingSignIn(secrets.token_urlsafe(32), secrets.token_urlsafe(32), secrets.token_urlsafe(48))
        try:
            url = await self._client().authorization_url(
                state=pending.state, nonce=pending.nonce, verifier=pending.verifier
            )
        except ProviderError as error:
            raise SignInRefused("provider", str(error)) from None
        return url, signer.sign("sign-in", pending, life_seconds=SIGN_IN_SECONDS)

    async def finish(self, query: Mapping[str, str], cookie: str) -> tuple[Session, Actor]:
        """Finish a sign-in with the provider's redirect, and the cookie of `begin`. Raises `SignInRefused`."""
        sign_in, signer = self._configured()
        pending = signer.read("sign-in", cookie, PendingSignIn)
        if pending is None:
            raise SignInRefused("expired", "this browser has begun no sign-in in the last minutes")
        if not hmac.compare_digest(query.get("state", "").encode(), pending.state.encode()):
            raise SignInRefused("expired", "the provider's answer belongs to another sign-in")
        if query.get("iss", sign_in.issuer) != sign_in.issuer:  # RFC 9207
            raise SignInRefused("provider", "the answer is from another provider")
        if "error" in query or not query.get("code"):
            raise SignInRefused("denied", f"the provider answered {query.get('error', 'no code')[:50]!r}")
        try:
            claims = await self._client().redeem(query["code"], nonce=pending.nonce, verifier=pending.verifier)
        except ProviderError as error:
            raise SignInRefused("provider", str(error)) from None
        return self._session_of(sign_in, claims)

    def cookie(self, session: Session) -> str:
        """Return the cookie of a session."""
        _, signer = self._configured()
        return signer.sign("session", session, life_seconds=session.expires - self._clock())

    def find(self, cookie: str) -> tuple[Session, Actor] | None:
        """Return the session of a cookie, and what it permits now. None if it is not valid."""
        sign_in = self.sign_in
        session = None if self._signer is None else self._signer.read("session", cookie, Session)
        if sign_in is None or session is None:
            return None
        if (session.issuer, session.client_id) != (sign_in.issuer, sign_in.client_id):
            return None
        record = self._feed.of_kind(SIGNED_OUT).get(_record_name(session))
        if record is not None and session.began <= float(record.value or 0):
            return None
        granted = _first_role(sign_in, session.values)
        return None if granted is None else (session, _actor(session, granted))

    async def end(self, session: Session) -> None:
        """End all sessions of a person. Raises `StorageUnavailable` and `Conflict`."""
        await self._feed.refresh()
        await self._remove_old_records()
        for _ in range(2):  # another gateway may end them at the same time
            if await self._feed.change(SIGNED_OUT, _record_name(session), repr(self._clock())):
                return
        raise Conflict("the sessions were not ended; try again")

    async def provider_sign_out(self) -> str | None:
        """Return the provider's page that ends the session there. None if there is none, or it is unknown."""
        try:
            return None if self.sign_in is None else await self._client().end_session_url()
        except ProviderError as error:
            log.warning("the provider's sign-out page is unknown: %s", error)
            return None

    def _configured(self) -> tuple[SignIn, CookieSigner]:
        sign_in = self.sign_in
        if sign_in is None or self._signer is None:
            raise SignInRefused("off", "the policy has no `sign_in`")
        return sign_in, self._signer

    def _client(self) -> OpenIdProvider:
        """The client of the policy's provider. Another one after `sign_in` has changed."""
        sign_in, _ = self._configured()
        if self._provider is None or self._provider[0] != sign_in:
            self._provider = sign_in, OpenIdProvider(sign_in, self._resolve_secret, clock=self._clock)
        return self._provider[1]

    def _session_of(self, sign_in: SignIn, claims: Mapping[str, Any]) -> tuple[Session, Actor]:
        subject = claims["sub"][:SUBJECT_CHARACTERS_MAX]
        name = next((claims[each] for each in ("name", "preferred_username", "email") if claims.get(each)), subject)
        now = self._clock()
        known = dict.fromkeys(_digest(role.value) for role in sign_in.roles)  # in the policy's order
        held = {_digest(value) for value in _claim_values(sign_in, claims)}
        session = Session(
            subject=subject,
            name=str(name)[:NAME_CHARACTERS_MAX],
            issuer=sign_in.issuer,
            client_id=sign_in.client_id,
            values=tuple(value for value in known if value in held)[:GRANTED_MAX],
            began=now,
            expires=now + sign_in.session,
            csrf=secrets.token_urlsafe(24),
        )
        granted = _first_role(sign_in, session.values)
        if granted is None:
            person = f"{session.name} ({subject})"
            why = f"no entry of sign_in.roles has a value of the claim {sign_in.claim!r} of {person}"
            raise SignInRefused("no-role", why, person=person)
        return session, _actor(session, granted)

    async def _remove_old_records(self) -> None:
        records = self._feed.of_kind(SIGNED_OUT)
        if len(records) >= SIGNED_OUT_MAX:
            oldest = self._clock() - SESSION_SECONDS_MAX
            for name in [name for name, record in records.items() if float(record.value or 0) < oldest]:
                await self._feed.change(SIGNED_OUT, name, None)


def _claim_values(sign_in: SignIn, claims: Mapping[str, Any]) -> list[str]:
    """The values of the role claim. An email address counts only if the provider has verified it."""
    if sign_in.claim == "email" and claims.get("email_verified") is not True:
        return []
    found = find_claim(claims, sign_in.claim)
    values = found if isinstance(found, list) else [found]
    return [value for value in values[:VALUES_MAX] if isinstance(value, str)]


def _first_role(sign_in: SignIn, digests: tuple[str, ...]) -> SignInRole | None:
    return next((role for role in sign_in.roles if _digest(role.value) in digests), None)


def _actor(session: Session, granted: SignInRole) -> Actor:
    return Actor(f"{session.name} ({session.subject})", granted.role, granted.organisation)


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:_DIGITS]


def _record_name(session: Session) -> str:
    return hashlib.sha256(f"{session.issuer}\n{session.subject}".encode()).hexdigest()[:32]
