"""Signing in to the dashboard through a real OpenID Connect provider, which runs as a process of its own."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import httpx2
import pytest
from pydantic import SecretStr

from gateway.auth.sessions import NAME_CHARACTERS_MAX, PendingSignIn
from gateway.auth.signed_cookies import CookieSigner
from gateway.billing.audit import read_audit
from gateway.core.errors import StorageUnavailable
from gateway.policy.sign_in import ROLES_MAX
from tests.gateway.admin.test_admin import ADMIN_KEY, Desk
from tests.oidc_provider import oidc_provider
from tests.ports import free_port

PUBLIC_URL = "http://localhost:8082"
ROLES = [
    {"value": "platform", "role": "owner"},
    {"value": "finance", "role": "billing"},
    {"value": "acme/leads", "role": "admin", "organisation": "t"},
]


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    with oidc_provider() as issuer:
        yield issuer


class Browser:
    """A client with cookies of its own, and the pages that it visits at the provider."""

    def __init__(self, desk: Desk, base_url: str = PUBLIC_URL) -> None:
        transport = httpx2.ASGITransport(app=desk.admin, raise_app_exceptions=False)
        self.client = httpx2.AsyncClient(transport=transport, base_url=base_url)

    async def begin(self) -> str:
        reply = await self.client.get("/session/sign-in")
        assert reply.status_code == 303
        return str(reply.headers["location"])

    async def at_provider(self, url: str, person: str, **claims: Any) -> str:
        """Sign in at the provider's page. Returns where it sends the browser."""
        async with httpx2.AsyncClient(verify=False) as client:
            issuer = "{0.scheme}://{0.netloc}".format(urlsplit(url))
            put = await client.put(f"{issuer}/users/{quote(person)}", json=claims)
            assert put.status_code == 204
            reply = await client.post(url, data={"sub": person})
        assert reply.status_code == 302, reply.text
        return str(reply.headers["location"])

    async def sign_in(self, person: str = "ada", **claims: Any) -> httpx2.Response:
        back = await self.at_provider(await self.begin(), person, **({"groups": ["platform"], "name": "Ada"} | claims))
        return await self.client.get(back)

    async def who(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = (await self.client.get("/session")).json()["actor"]
        return found

    async def ask(self, method: str, path: str, *, token: str | None = None, **body: Any) -> httpx2.Response:
        headers = {} if token is None else {"x-csrf-token": token}
        return await self.client.request(method, path, headers=headers, json=body or None)


def refusal(reply: httpx2.Response) -> str:
    assert reply.status_code == 303
    path, _, code = reply.headers["location"].partition("#sign-in=")
    assert path == "/dashboard/"
    return str(code)


class SignInDesk(Desk):
    def __init__(self, folder: Path, issuer: str) -> None:
        self.settings: dict[str, Any] = {
            "issuer": issuer, "client_id": "warmpath", "client_secret": {"file": str(folder / "secret")},
            "public_url": PUBLIC_URL, "name": "Example", "roles": ROLES,
        }  # fmt: skip
        (folder / "secret").write_text("the secret of the client")
        super().__init__(folder)

    def write(self, **changes: Any) -> None:
        super().write(**{"tenants": [{"name": "t"}, {"name": "u"}], "sign_in": self.settings, **changes})

    async def change(self, **settings: Any) -> None:
        self.settings = {**self.settings, **settings}
        self.write()
        assert await self.policies.reload()


@pytest.fixture
async def desk(tmp_path: Path, provider: str) -> AsyncIterator[SignInDesk]:
    desk = SignInDesk(tmp_path, provider)
    desk.audit.open()
    yield desk
    await desk.audit.close()


async def test_a_person_signs_in_works_and_signs_out(desk: SignInDesk) -> None:
    browser = Browser(desk)
    assert (await browser.client.get("/session")).json() == {"sign_in": "Example", "actor": None}
    reply = await browser.sign_in(given_name="secret")
    assert (reply.status_code, reply.headers["location"]) == (303, "/dashboard/")
    session, ended = reply.headers.get_list("set-cookie")
    assert session.startswith("warmpath-session=") and ended.startswith("warmpath-sign-in=; Max-Age=0;")
    assert session.endswith("; Max-Age=28800; Path=/; HttpOnly; SameSite=Strict")
    who = await browser.who()
    assert who is not None and 0 < who["expires"] - time.time() <= 28_800
    assert (who["name"], who["role"], who["organisation"]) == ("Ada (ada)", "owner", None)
    assert (await browser.ask("GET", "/admin/me")).json() == {
        "name": "Ada (ada)", "role": "owner", "organisation": None
    }  # fmt: skip

    made = await browser.ask("POST", "/admin/tenants", token=who["csrf"], name="new")
    assert made.status_code == 201
    out = await browser.ask("POST", "/session/sign-out", token=who["csrf"])
    assert out.status_code == 200
    leads_to = urlsplit(out.json()["continue"])
    assert parse_qs(leads_to.query) == {
        "client_id": ["warmpath"], "post_logout_redirect_uri": [f"{PUBLIC_URL}/dashboard/"]
    }  # fmt: skip
    assert await browser.who() is None
    assert (await browser.ask("GET", "/admin/me")).status_code == 401

    acts = [(each.act.act, each.act.actor, each.act.role, each.status) for each in read_audit(desk.audit_folder)]
    assert acts == [
        ("sign in", "Ada (ada)", "owner", 200),
        ("POST /admin/tenants", "Ada (ada)", "owner", 201),
        ("sign out", "Ada (ada)", "owner", 200),
    ]
    assert read_audit(desk.audit_folder)[0].act.details == {"issuer": desk.settings["issuer"]}


async def test_the_request_to_the_provider_is_bound_to_the_browser(desk: SignInDesk) -> None:
    browser = Browser(desk)
    query = {name: value for name, (value,) in parse_qs(urlsplit(await browser.begin()).query).items()}
    cookie = browser.client.cookies["warmpath-sign-in"]
    sessions = desk.admin._sign_in._sessions
    assert isinstance(sessions._signer, CookieSigner)
    pending = sessions._signer.read("sign-in", cookie, PendingSignIn)
    assert pending is not None
    challenge = base64.urlsafe_b64encode(hashlib.sha256(pending.verifier.encode()).digest()).rstrip(b"=").decode()
    assert query == {
        "response_type": "code", "client_id": "warmpath", "redirect_uri": f"{PUBLIC_URL}/session/callback",
        "scope": "openid profile email", "state": pending.state, "nonce": pending.nonce,
        "code_challenge": challenge, "code_challenge_method": "S256",
    }  # fmt: skip


async def test_an_answer_for_another_browser_or_sign_in_is_refused(desk: SignInDesk) -> None:
    attacker, victim = Browser(desk), Browser(desk)
    back = await attacker.at_provider(await attacker.begin(), "mallory", groups=["platform"])
    assert refusal(await victim.client.get(back)) == "expired"
    await victim.begin()
    assert refusal(await victim.client.get(back)) == "expired"
    assert await victim.who() is None
    assert (await attacker.client.get(back)).headers["location"] == "/dashboard/"
    assert refusal(await attacker.client.get(back)) == "expired"  # the cookie is gone
    assert len(read_audit(desk.audit_folder)) == 1


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("error=access_denied", "denied"),
        ("", "denied"),
        ("code=wrong", "provider"),
        ("code=a&iss=https://evil", "provider"),
    ],
)
async def test_answers_without_a_valid_code_are_refused(desk: SignInDesk, answer: str, code: str) -> None:
    browser = Browser(desk)
    state = parse_qs(urlsplit(await browser.begin()).query)["state"][0]
    assert refusal(await browser.client.get(f"/session/callback?state={state}&{answer}")) == code
    assert await browser.who() is None


async def test_a_sign_in_may_take_ten_minutes(desk: SignInDesk) -> None:
    browser, desk.now = Browser(desk), time.time()
    back = await browser.at_provider(await browser.begin(), "ada", groups=["platform"])
    desk.now += 600
    assert refusal(await browser.client.get(back)) == "expired"


@pytest.mark.parametrize(
    ("claims", "settings", "role", "organisation"),
    [
        ({"groups": ["finance", "platform"]}, {}, "owner", None),  # the policy's first match
        ({"groups": "finance"}, {}, "billing", None),
        ({"groups": ["acme/leads", 7, None]}, {}, "admin", "t"),
        ({"realm": {"roles": ["finance"]}}, {"claim": "realm.roles"}, "billing", None),
        ({"a.b": ["finance"]}, {"claim": "a.b"}, "billing", None),
        ({"email": "platform", "email_verified": True}, {"claim": "email"}, "owner", None),
        ({"email": "platform", "email_verified": "true"}, {"claim": "email"}, None, None),
        ({"email": "platform"}, {"claim": "email"}, None, None),
        ({"groups": ["Platform"]}, {}, None, None),
        ({"groups": {"platform": 1}}, {}, None, None),
        ({"groups": []}, {}, None, None),
        ({}, {}, None, None),
    ],
)
async def test_the_policy_gives_roles_to_values_of_a_claim(
    desk: SignInDesk, claims: dict[str, Any], settings: dict[str, Any], role: str | None, organisation: str | None
) -> None:
    await desk.change(**settings)
    browser = Browser(desk)
    reply = await browser.sign_in("bob", **{"groups": None, **claims})
    who = await browser.who()
    if role is None:
        assert refusal(reply) == "no-role" and who is None
        (entry,) = read_audit(desk.audit_folder)
        assert (entry.act.actor, entry.act.role, entry.status) == ("Ada (bob)", "", 403)
    else:
        assert who is not None and (who["role"], who["organisation"]) == (role, organisation)


async def test_people_in_all_groups_of_a_long_policy_sign_in(desk: SignInDesk) -> None:
    groups = [f"team-{number}" for number in range(ROLES_MAX)]
    first = [{"value": groups[-1], "role": "admin"}]
    await desk.change(roles=first + [{"value": group, "role": "viewer"} for group in groups[:-1]])
    browser = Browser(desk)
    await browser.sign_in(name="\N{OLD ITALIC LETTER A}" * NAME_CHARACTERS_MAX, groups=groups)
    who = await browser.who()
    assert who is not None and who["role"] == "admin"


async def test_roles_and_organisations_of_people_are_those_of_keys(desk: SignInDesk) -> None:
    browser = Browser(desk)
    await browser.sign_in(groups=["acme/leads"])
    who = await browser.who()
    assert who is not None
    assert (await browser.ask("GET", "/admin/tenants/t")).status_code == 200
    assert (await browser.ask("GET", "/admin/tenants/u")).status_code == 404
    assert (await browser.ask("GET", "/admin/state")).status_code == 403
    assert (await browser.ask("POST", "/admin/tenants", token=who["csrf"], name="x", parent="u")).status_code == 404
    assert (await browser.ask("POST", "/admin/tenants", token=who["csrf"], name="x", parent="t")).status_code == 201


async def test_a_change_needs_the_token_of_the_session(desk: SignInDesk) -> None:
    browser, other = Browser(desk), Browser(desk)
    await browser.sign_in()
    await other.sign_in()
    foreign = (await other.who() or {})["csrf"]
    for token in (None, "", "x", foreign):
        assert (await browser.ask("POST", "/admin/tenants", token=token, name="new")).status_code == 403
        assert (await browser.ask("POST", "/session/sign-out", token=token)).status_code == 403
    assert (await browser.ask("GET", "/admin/tenants/new")).status_code == 404
    assert await browser.who() is not None


async def test_a_key_counts_before_a_session(desk: SignInDesk) -> None:
    browser = Browser(desk)
    await browser.sign_in(groups=["finance"])
    wrong = await browser.client.get("/admin/me", headers={"authorization": "Bearer wrong"})
    right = await browser.client.get("/admin/me", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert wrong.status_code == 401 and right.json()["role"] == "owner"


async def test_a_session_ends_with_its_time_the_policy_or_the_admin_key(desk: SignInDesk) -> None:
    browser, desk.now = Browser(desk), time.time()
    await browser.sign_in()
    await desk.change(roles=[{"value": "platform", "role": "viewer"}])
    assert (await browser.who() or {})["role"] == "viewer"
    for gone in ({"roles": ROLES[1:]}, {"client_id": "another"}, {"issuer": "http://localhost:9"}):
        before = desk.settings
        await desk.change(**gone)
        assert await browser.who() is None
        await desk.change(**before)
        assert await browser.who() is not None
    desk.write(sign_in=None)
    assert await desk.policies.reload()
    assert (await browser.client.get("/session")).json() == {"sign_in": None, "actor": None}
    assert refusal(await browser.client.get("/session/sign-in")) == "off"
    await desk.change()
    cookies = browser.client.cookies
    desk.admin = desk.make(SecretStr(ADMIN_KEY + "new"))
    renewed = Browser(desk)
    renewed.client.cookies = cookies
    assert await renewed.who() is None
    desk.now += 28_799
    assert await browser.who() is not None
    desk.now += 1
    assert await browser.who() is None


async def test_signing_out_ends_all_sessions_of_a_person_at_all_gateways(desk: SignInDesk) -> None:
    here, there, another = Browser(desk), Browser(desk), Browser(desk)
    await here.sign_in()
    await there.sign_in()
    await another.sign_in("eve")
    token = (await here.who() or {})["csrf"]
    assert (await here.ask("POST", "/session/sign-out", token=token)).status_code == 200
    assert await there.who() is None and await another.who() is not None
    await there.sign_in()
    assert await there.who() is not None


async def test_without_the_storage_only_this_browser_is_signed_out(
    desk: SignInDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser, other = Browser(desk), Browser(desk)
    await browser.sign_in()
    await other.sign_in()
    token = (await browser.who() or {})["csrf"]

    async def away(_: str) -> None:
        raise StorageUnavailable("it is away")

    monkeypatch.setattr(desk.storage, "records_since", away)
    reply = await browser.ask("POST", "/session/sign-out", token=token)
    assert reply.status_code == 503 and "this browser only" in reply.json()["error"]["message"]
    assert await browser.who() is None and await other.who() is not None
    assert read_audit(desk.audit_folder)[-1].status == 503


async def test_over_https_the_cookies_belong_to_this_host_alone(desk: SignInDesk) -> None:
    await desk.change(public_url="https://warmpath.example.com/")
    reply = await Browser(desk, "https://warmpath.example.com").client.get("/session/sign-in")
    (cookie,) = reply.headers.get_list("set-cookie")
    assert cookie.startswith("__Host-warmpath-sign-in=")
    assert cookie.endswith("; Max-Age=600; Path=/; HttpOnly; SameSite=Lax; Secure")
    assert "redirect_uri=https%3A%2F%2Fwarmpath.example.com%2Fsession%2Fcallback" in reply.headers["location"]
    assert reply.headers["cache-control"] == "no-store" and reply.headers["referrer-policy"] == "no-referrer"


async def test_a_provider_that_is_away_or_another_one_is_refused(
    desk: SignInDesk, caplog: pytest.LogCaptureFixture
) -> None:
    browser, issuer = Browser(desk), desk.settings["issuer"]
    await desk.change(issuer=f"http://127.0.0.1:{free_port()}")
    assert refusal(await browser.client.get("/session/sign-in")) == "provider"
    assert "did not answer: ConnectError" in caplog.text
    await desk.change(issuer=issuer.replace("localhost", "127.0.0.1") + "/nothing")
    assert refusal(await browser.client.get("/session/sign-in")) == "provider"
    assert "answered 404" in caplog.text
