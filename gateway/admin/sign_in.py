"""`/session`: signing in to the dashboard through an OpenID Connect provider, and signing out.

    GET /session              how one can sign in, and who is signed in
    GET /session/sign-in      redirects to the provider's page
    GET /session/callback     where the provider sends the browser back to; sets the session's cookie
    POST /session/sign-out    ends all sessions of the person

These requests need no admin key. Who signs in is recorded in the audit log, and so is who was refused and who signs
out. Requests that change something must repeat the session's token in the header `x-csrf-token`. Another site's page
can neither read the token nor set the header, and browsers do not send the cookie with its requests.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.dashboard_files import HOME
from gateway.auth.admin_keys import Actor
from gateway.auth.sessions import SIGN_IN_SECONDS, Session, Sessions, SignInRefused
from gateway.billing.audit import AuditLog
from gateway.core.errors import Forbidden, LedgerUnavailable, StorageUnavailable, Unauthenticated
from gateway.endpoints.replies import EXCEPTION_HANDLERS, error_reply, json_reply

PATH = "/session"
CSRF_HEADER = "x-csrf-token"
HEADERS = {"cache-control": "no-store", "referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}
_READS = ("GET", "HEAD", "OPTIONS")

log = logging.getLogger(__name__)


def is_session_path(path: str) -> bool:
    """True if the path is about signing in."""
    return path == PATH or path.startswith(f"{PATH}/")


class SignInPages:
    """The ASGI application of `/session`, and the check of its cookie."""

    def __init__(self, sessions: Sessions, audit: AuditLog) -> None:
        self._sessions = sessions
        self._audit = audit
        self.application = Starlette(
            routes=[
                Route(PATH, self._show, methods=["GET"]),
                Route(f"{PATH}/sign-in", self._begin, methods=["GET"]),
                Route(f"{PATH}/callback", self._finish, methods=["GET"]),
                Route(f"{PATH}/sign-out", self._end, methods=["POST"]),
            ],
            exception_handlers=EXCEPTION_HANDLERS,
        )
        self.application.router.redirect_slashes = False  # a redirect would repeat the Host header

    def authenticate(self, request: Request) -> Actor | None:
        """Return who sends a request with the cookie of a session. None without a valid session.

        Raises `Forbidden` for a request that may change something and lacks the session's token.
        """
        found = self._found(request)
        if found is None:
            return None
        session, actor = found
        presented = request.headers.get(CSRF_HEADER, "")
        if request.method not in _READS and not hmac.compare_digest(presented.encode(), session.csrf.encode()):
            raise Forbidden(f"the header {CSRF_HEADER} must have the token of the session")
        return actor

    def _found(self, request: Request) -> tuple[Session, Actor] | None:
        cookie = request.cookies.get(self._cookie_name("session"))
        return None if cookie is None else self._sessions.find(cookie)

    async def _show(self, request: Request) -> Response:
        sign_in, found = self._sessions.sign_in, self._found(request)
        actor = None
        if found is not None:
            session, who = found
            actor = {
                "name": who.name, "role": who.role, "organisation": who.organisation,
                "expires": session.expires, "csrf": session.csrf,
            }  # fmt: skip
        reply = json_reply(200, {"sign_in": None if sign_in is None else sign_in.name, "actor": actor})
        reply.headers.update(HEADERS)
        return reply

    async def _begin(self, _: Request) -> Response:
        try:
            url, cookie = await self._sessions.begin()
        except SignInRefused as refused:
            log.warning("sign-in refused: %s", refused)
            return _redirect(f"{HOME}#sign-in={refused.code}")
        reply = _redirect(url)
        # The provider's redirect comes from another site, so this cookie must be sent with it.
        self._set_cookie(reply, "sign-in", cookie, SIGN_IN_SECONDS, same_site="lax")
        return reply

    async def _finish(self, request: Request) -> Response:
        cookie = request.cookies.get(self._cookie_name("sign-in"), "")
        try:
            session, actor = await self._sessions.finish(request.query_params, cookie)
            await self._record("sign in", actor, status=200)
        except SignInRefused as refused:
            log.warning("sign-in refused: %s", refused)
            if refused.person is not None:
                await self._record("sign in", Actor(refused.person, "viewer"), status=Forbidden.status)
            reply = _redirect(f"{HOME}#sign-in={refused.code}")
        else:
            reply = _redirect(HOME)
            self._set_cookie(reply, "session", self._sessions.cookie(session), session.expires - session.began)
        self._set_cookie(reply, "sign-in", "", 0)
        return reply

    async def _end(self, request: Request) -> Response:
        actor, found = self.authenticate(request), self._found(request)
        if actor is None or found is None:
            raise Unauthenticated("there is no session")
        session, _ = found
        try:
            await self._record("sign out", actor, status=200, work=lambda: self._sessions.end(session))
        except StorageUnavailable as error:
            message = "you are signed out of this browser only, because the storage does not answer"
            reply = error_reply(StorageUnavailable(f"{message}: {error.message}"))
        else:
            reply = json_reply(200, {"continue": await self._sessions.provider_sign_out()})
        self._set_cookie(reply, "session", "", 0)
        reply.headers.update(HEADERS)
        return reply

    async def _record(
        self, act: str, actor: Actor, *, status: int, work: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Record an act with its result, and do `work` in between.

        Raises `LedgerUnavailable` before anything is done.
        """
        sign_in = self._sessions.sign_in
        act_id = await self._audit.begin(
            act, actor=actor.name, role=actor.role if status == 200 else "", organisation=actor.organisation,
            details=None if sign_in is None else {"issuer": sign_in.issuer},
        )  # fmt: skip
        try:
            if work is not None:
                await work()
        except StorageUnavailable as error:
            status = error.status
            raise
        finally:
            try:
                await self._audit.end(act_id, status)
            except LedgerUnavailable as error:
                log.error("the result of %s by %s is not in the audit log: %s", act, actor.name, error.message)

    def _cookie_name(self, name: str) -> str:
        return f"__Host-warmpath-{name}" if self._is_https else f"warmpath-{name}"

    @property
    def _is_https(self) -> bool:
        sign_in = self._sessions.sign_in
        return sign_in is not None and sign_in.public_url.startswith("https:")

    def _set_cookie(self, reply: Response, name: str, value: str, seconds: float, *, same_site: str = "strict") -> None:
        attributes = f"Max-Age={int(seconds)}; Path=/; HttpOnly; SameSite={same_site.capitalize()}"
        secure = "; Secure" if self._is_https else ""
        reply.headers.append("set-cookie", f"{self._cookie_name(name)}={value}; {attributes}{secure}")


def _redirect(url: str) -> Response:
    return Response(status_code=303, headers={**HEADERS, "location": url})
