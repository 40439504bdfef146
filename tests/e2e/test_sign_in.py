"""Signing in to the dashboard with a real browser, at a real gateway and a real OpenID Connect provider."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.browser import chromium, recorded_page
from tests.e2e.processes import gateway, simple_policy
from tests.oidc_provider import oidc_provider
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ADMIN_KEY = "an-admin-key-of-some-length"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def sign_in(page: Page, name: str) -> None:
    page.get_by_role("button", name="Sign in with Example").click()
    page.locator("input[name=sub]").fill(name)
    page.locator("input[name=sub]").press("Enter")


def test_people_sign_in_work_and_sign_out(browser: Browser, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://localhost:{port}"
    with oidc_provider() as issuer:
        for name, groups in (("ada", ["platform"]), ("eve", [])):
            httpx2.put(f"{issuer}/users/{name}", json={"name": name.title(), "groups": groups}, verify=False)
        secret = tmp_path / "secret"
        secret.write_text("the secret of the client")
        policy = simple_policy(
            f"http://127.0.0.1:{free_port()}",
            sign_in={
                "issuer": issuer, "client_id": "warmpath", "client_secret": {"file": str(secret)}, "public_url": url,
                "name": "Example", "roles": [{"value": "platform", "role": "admin"}],
            },
        )  # fmt: skip
        storage = f"sqlite:///{tmp_path / 'state.db'}"
        with (
            gateway(tmp_path / "gateway", policy, storage=storage, admin_port=str(port), admin_key=ADMIN_KEY),
            recorded_page(browser) as recorded,
        ):
            page = recorded.page
            page.goto(f"{url}/")
            sign_in(page, "eve")
            expect(page.get_by_role("alert")).to_have_text(
                "You are known to the provider, but the gateway's policy gives you no role."
            )
            assert page.url == f"{url}/dashboard/"
            sign_in(page, "ada")
            expect(page.locator(".fresh .state")).to_have_text("● live")
            expect(page.locator(".person")).to_have_text("Ada (ada)")
            assert page.evaluate("JSON.stringify([{ ...sessionStorage }, document.cookie])") == '[{},""]'
            page.reload()
            page.get_by_role("link", name="Tenants").click()
            page.get_by_role("button", name="New tenant").click()
            page.get_by_label("Name", exact=True).fill("made-by-ada")
            page.get_by_role("button", name="Create tenant").click()
            expect(page.get_by_text("made-by-ada").first).to_be_visible()
            page.get_by_role("button", name="Sign out").click()
            page.wait_for_url(f"{issuer}/**")
            page.goto(f"{url}/")
            expect(page.get_by_label("Admin key")).to_be_visible()
            assert httpx2.get(f"{url}/session", verify=False).json() == {"sign_in": "Example", "actor": None}
            assert page.evaluate("window.violations") == []
            errors = [error for error in recorded.errors if not error.startswith("Failed to load resource")]
            assert errors == [], "besides the style sheets and icons of the provider's own pages"
