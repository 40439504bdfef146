"""The dashboard in a real browser, on a real gateway."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.browser import RecordedPage, chromium, recorded_page
from tests.e2e.processes import (
    DEMO,
    PATIENCE_SECONDS,
    Gateway,
    Running,
    chat,
    deployment,
    gateway,
    simple_policy,
    tenant,
    until,
)
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ADMIN_KEY = "an-admin-key-of-some-length"
PAGES = ("now", "calls", "spend", "tenants", "prefixes", "keys", "policy")
EVIL = '"><img src=x onerror="window.owned=1">'  # what a tenant, a model or a server may be called
MODEL_OF_MARKUP = f"model {EVIL}"
SECRET = "the-words-of-a-prompt"


def policy(url: str) -> dict[str, Any]:
    nowhere = f"http://127.0.0.1:{free_port()}"
    return simple_policy(
        url,
        deployments=[deployment("local", url), deployment(f"down {EVIL}", nowhere, metrics=True)],
        models=[
            {"name": DEMO, "deployments": ["local"]},
            {"name": MODEL_OF_MARKUP, "deployments": [f"down {EVIL}"], "fallbacks": [DEMO]},
        ],
        diagnosis={"sample": "100%", "content": True},
        canonicalise={"level": "off"},
        tenants=[
            tenant("dev", limits={"requests": "600/1m", "budget": {"amount": "0.01", "per": "day"}}),
            {**tenant("evil"), "name": f"tenant {EVIL}"},
        ],
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, browser: Browser, local_engine: Running) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("dashboard")
    storage = f"sqlite:///{folder / 'state.db'}"
    with gateway(folder, policy(local_engine.url), storage=storage, admin_port="0", admin_key=ADMIN_KEY) as started:
        yield started


@pytest.fixture
def signed_in(browser: Browser, served: Gateway) -> Iterator[RecordedPage]:
    """A signed-in page, opened with the address that `warmpath up` prints. It must not report any error."""
    with recorded_page(browser) as recorded:
        recorded.page.goto(f"{served.admin_url}/#key={ADMIN_KEY}")
        expect_live(recorded.page)
        yield recorded
        recorded.assert_clean(served.admin_url)


def expect_live(page: Page, state: str = "● live") -> None:
    expect(page.locator(".fresh .state")).to_have_text(state)


def open_page(page: Page, place: str) -> None:
    page.evaluate("(place) => { location.hash = place; }", f"#/{place}")
    expect(page.get_by_role("navigation").locator("[aria-current=page]")).to_have_text(place.split("/")[0].capitalize())


def make_call(started: Gateway, model: str = MODEL_OF_MARKUP, who: str = "evil", line: str = "") -> str:
    """Make a call whose first deployment is down and whose names are markup. Returns its id."""
    rules = f"{line}\n{SECRET}. Refund only what was booked before 2024-05-16. " + "Be brief. " * 40
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": SECRET}]
    reply = started.post("chat/completions", {**chat(), "model": model, "messages": messages, "max_tokens": 3}, who)
    assert reply.status_code == 200, reply.text
    return str(reply.headers["x-request-id"])


def test_the_key_is_requested_and_stored_for_the_tab_only(browser: Browser, served: Gateway) -> None:
    with recorded_page(browser) as recorded:
        page = recorded.page
        page.goto(f"{served.admin_url}/")
        box = page.get_by_label("Admin key")
        expect(box).to_be_focused()
        box.fill("no-key-of-this-gateway")
        box.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("the admin key is not valid")
        assert not recorded.paths("/admin/calls")
        box.fill(ADMIN_KEY)
        box.press("Enter")
        expect(page.get_by_role("heading", name="Deployments")).to_be_visible()
        page.reload()
        expect(page.get_by_role("heading", name="Deployments")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(box).to_be_visible()
        kept = page.evaluate("JSON.stringify([{ ...sessionStorage }, { ...localStorage }, document.cookie])")
        assert kept == '[{},{},""]'
        assert ADMIN_KEY not in page.content()


def test_a_key_that_becomes_invalid_is_requested_again(browser: Browser, served: Gateway) -> None:
    with recorded_page(browser) as recorded:
        page = recorded.page
        page.goto(f"{served.admin_url}/dashboard/#key={ADMIN_KEY}")
        expect(page.get_by_role("heading", name="Deployments")).to_be_visible()
        refusal = {"error": {"message": "the admin key is not valid"}}
        page.route("**/admin/**", lambda route: route.fulfill(status=401, json=refusal))
        expect(page.get_by_role("alert")).to_have_text("the admin key is not valid")
        expect(page.get_by_label("Admin key")).to_be_visible()


def test_the_key_in_the_address_is_removed_at_once(signed_in: RecordedPage, served: Gateway) -> None:
    page = signed_in.page
    assert page.url == f"{served.admin_url}/dashboard/"
    open_page(page, "calls")
    page.go_back()
    assert "key" not in page.url
    assert not [url for url in signed_in.requested if ADMIN_KEY in url.partition("#")[0]]


def test_a_call_and_its_waterfall(signed_in: RecordedPage, served: Gateway) -> None:
    page = signed_in.page
    call_id = make_call(served)
    open_page(page, "calls")
    row = page.locator(f'tr[data-key="{call_id}"]')
    expect(row).to_contain_text("answered 200")
    expect(row.locator("td").nth(2)).to_contain_text(MODEL_OF_MARKUP)
    expect(row.locator("td").nth(3)).to_have_text(f"tenant {EVIL}")
    row.get_by_role("link").focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(rf"#/calls/{call_id}$"))

    listed = httpx2.get(f"{served.admin_url}/admin/calls", headers={"authorization": f"Bearer {ADMIN_KEY}"}).json()
    (call,) = [each for each in listed["data"] if each["call_id"] == call_id]
    detail = page.get_by_role("region", name="One call")
    names = detail.locator(".waterfall tbody:first-of-type th[scope=row]").all_inner_texts()
    assert names == [phase["name"] for phase in call["phases"]]
    tries = detail.locator(".waterfall tbody:last-of-type th[scope=row]").all_inner_texts()
    assert tries == [f"{n}. {a['deployment']} {a['outcome']}" for n, a in enumerate(call["attempts"], 1)]
    assert (call["attempts"][0]["outcome"], call["deployment"]) == ("connect_error", "local")
    expect(detail.locator(".first[title='first chunk']")).to_have_count(
        2
    )  # in the dialogue, and in the attempt that answered
    for fact in (call["event_id"], call["trace_id"], call["route_reason"], call_id):
        expect(detail).to_contain_text(fact)
    lane = detail.locator(".lane").nth(1).bounding_box()
    assert lane is not None
    for bar in detail.locator(".span").all():
        box = bar.bounding_box()
        assert box is not None
        assert lane["x"] - 1 <= box["x"] < lane["x"] + lane["width"] + 1
        assert box["x"] + box["width"] <= lane["x"] + lane["width"] + 3

    page.reload()
    expect(detail).to_contain_text(call["event_id"])
    page.get_by_label("Outcome").select_option("failed")
    expect(row).to_be_hidden()
    expect(detail).to_contain_text(call["event_id"])
    page.get_by_role("button", name="Close").click()
    expect(detail).to_be_hidden()


def test_a_failed_call_is_found_behind_many_others(signed_in: RecordedPage, served: Gateway) -> None:
    page = signed_in.page
    call_id = make_call(served)
    for _ in range(100):
        make_call(served, DEMO, "dev")
    open_page(page, "calls")
    page.get_by_label("Show").select_option("100")
    row = page.locator(f'tr[data-key="{call_id}"]')
    expect(row).to_be_hidden()
    open_page(page, f"calls/{call_id}")
    expect(page.get_by_role("region", name="One call")).to_contain_text("connect_error")
    page.get_by_label("Outcome").select_option("problems")
    expect(row).to_be_visible()


def test_a_call_that_is_not_stored(signed_in: RecordedPage) -> None:
    open_page(signed_in.page, "calls/req_of_long_ago")
    expect(signed_in.page.get_by_text("This call is not among the last calls")).to_be_visible()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark"), (2000, "light")])
def test_every_page_shows_names_as_text_and_no_prompt(
    browser: Browser, served: Gateway, width: int, scheme: Any
) -> None:
    for clock in ("09:41:07", "09:42:31"):  # a changing time breaks the prefix
        make_call(served, line=f"Current time: {clock}")
    make_call(served, DEMO, "dev")
    with recorded_page(browser, width=width, color_scheme=scheme) as recorded:
        page = recorded.page
        page.goto(f"{served.admin_url}/#key={ADMIN_KEY}")
        expected = {
            "now": f"down {EVIL}",
            "calls": f"tenant {EVIL}",
            "spend": f"tenant {EVIL}",
            "tenants": f"tenant {EVIL}",
            "prefixes": "a time of day that changes",
            "keys": f"tenant {EVIL}",
            "policy": f"tenant {EVIL}",
        }
        for place in PAGES:
            open_page(page, place)
            expect(page.get_by_role("main")).to_contain_text(expected[place])
            assert page.locator("img").count() == 0
            assert SECRET not in page.content(), place
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{place} is {wide} px wide"
        assert page.evaluate("window.owned") is None
        recorded.assert_clean(served.admin_url)


def test_a_proposal_is_applied_after_a_look_at_its_diff(
    browser: Browser, local_engine: Running, tmp_path: Path
) -> None:
    with gateway(tmp_path, policy(local_engine.url), admin_port="0", admin_key=ADMIN_KEY) as started:
        for minute in range(4):
            make_call(started, DEMO, "dev", line=f"Current time: 09:4{minute}:07")
        file = tmp_path / "policy.yaml"
        before = file.read_text()
        with recorded_page(browser) as recorded:
            page = recorded.page
            page.goto(f"{started.admin_url}/#key={ADMIN_KEY}")
            open_page(page, "prefixes")
            panel = page.locator("section").filter(has=page.get_by_role("heading", name="Proposals for the policy"))
            expect(panel).to_contain_text("would be saved")
            panel.get_by_role("button", name="Apply …").click()
            dialog = page.get_by_role("dialog", name="Change the policy?")
            expect(dialog.locator(".diff .added", has_text=f"tenant: dev, model: {DEMO}")).to_be_visible()
            dialog.get_by_role("button", name="Cancel").click()
            expect(page.locator("dialog")).to_have_count(0)
            assert file.read_text() == before

            panel.get_by_role("button", name="Apply …").click()
            expect(dialog.locator(".diff")).to_be_visible()
            file.write_text(f"{before}# another hand\n")
            dialog.get_by_role("button", name="Write and reload").click()
            expect(dialog.get_by_role("alert")).to_contain_text("has changed since the change was reviewed")
            assert ["409" in each for each in recorded.errors] == [True]  # the browser logs the rejection
            recorded.errors.clear()
            dialog.get_by_role("button", name="Cancel").click()

            panel.get_by_role("button", name="Apply …").click()
            dialog.get_by_role("button", name="Write and reload").click()
            expect(dialog.get_by_role("status")).to_contain_text("is written and in force")
            dialog.get_by_role("button", name="Done").click()
            expect(panel).to_contain_text("Nothing to change")
            recorded.assert_clean(started.admin_url)
        written = file.read_text().splitlines()
        assert [line for line in written if "tenant: dev" not in line and line != "  exceptions:"] == [
            *before.splitlines(), "# another hand"
        ]  # fmt: skip
        messages = [
            {"role": "system", "content": "Current time: 09:59:07\nBe brief."},
            {"role": "user", "content": "Go"},
        ]
        reply = started.post("chat/completions", {"model": DEMO, "messages": messages, "max_tokens": 1}, "dev")
        assert "volatile_to_" in reply.headers["x-warmpath-canonical"]


def test_spend_and_limits(signed_in: RecordedPage, served: Gateway) -> None:
    page = signed_in.page
    receipt = served.receipt(make_call(served, DEMO, "dev"))
    open_page(page, "spend")
    page.get_by_label("By").select_option("key")
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="dev", exact=True))
    expect(row.locator("td").nth(4)).to_have_text(re.compile(r"^0\.0\d+ USD$"))
    assert receipt["cost"]
    limits = page.locator("article").filter(has=page.get_by_role("heading", name="dev"))
    expect(limits).to_contain_text(re.compile(r"(600|5\d\d) of 600 requests left per minute"))
    expect(limits).to_contain_text(re.compile(r"0\.00\d+ of 0\.01 USD left in \d{4}-\d\d-\d\d"))


def test_a_tenant_s_life(signed_in: RecordedPage, served: Gateway) -> None:
    page = signed_in.page
    make_call(served, DEMO, "dev")
    open_page(page, "tenants")
    expect(page.locator('tr[data-key="dev"]')).to_contain_text(re.compile(r"in the policy.*0\.0\d+ USD"))
    page.get_by_role("button", name="New tenant").click()
    page.get_by_label("Name", exact=True).fill("team")
    page.get_by_label("Parent").select_option("dev")
    page.get_by_label("Requests").fill("30/1m")
    page.get_by_role("button", name="Create tenant").click()
    row = page.locator('tr[data-key="team"]')
    expect(row).to_contain_text("active")
    expect(row).to_contain_text("30 requests per minute")
    names = page.locator("tbody th[scope=row]").all_inner_texts()
    assert names[names.index("dev") + 1].strip() == "team", "below its parent"

    page.get_by_role("button", name="Disable tenant team").click()
    page.get_by_role("button", name="Disable", exact=True).last.click()
    expect(row).to_contain_text("disabled")
    page.get_by_role("button", name="Enable tenant team").click()
    page.get_by_role("button", name="Enable", exact=True).last.click()
    expect(row).to_contain_text("active")
    page.get_by_role("button", name="Delete tenant team").click()
    page.get_by_role("button", name="Delete", exact=True).last.click()
    expect(row).to_be_hidden()
    signed_in.assert_clean(served.admin_url)


def test_a_key_s_life(signed_in: RecordedPage, served: Gateway) -> None:
    page = signed_in.page
    open_page(page, "keys")

    def status(secret: str) -> int:
        headers = {"authorization": f"Bearer {secret}"}
        body = {"model": DEMO, "prompt": [100, 101], "max_tokens": 1}
        reply = httpx2.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_SECONDS)
        return reply.status_code

    def shown_once() -> str:
        secret = page.locator(".secret code").inner_text()
        page.get_by_role("button", name="Done").click()
        expect(page.locator("dialog")).to_have_count(0)
        assert secret not in page.content()
        return secret

    page.get_by_role("button", name="New key").click()
    page.get_by_label("Tenant").last.select_option("dev")
    page.get_by_label("Id", exact=True).fill("from_the_page")
    page.get_by_label("Expires after").fill("soon")
    page.get_by_label("Requests").fill("30/1m")
    page.get_by_role("button", name="Create key").click()
    expect(page.get_by_role("alert")).to_contain_text("expires")  # the gateway names the field
    assert ["400" in each for each in signed_in.errors] == [True]  # the browser logs the rejection
    signed_in.errors.clear()
    page.get_by_label("Expires after").fill("90d")
    page.get_by_role("button", name="Create key").click()
    first = shown_once()
    assert status(first) == 200
    row = page.locator('tr[data-key="from_the_page"]')
    expect(row).to_contain_text("active")
    expect(row).to_contain_text("requests")

    page.get_by_role("button", name="Rotate key from_the_page").click()
    page.get_by_label("The old secret stays valid for").select_option("1h")
    page.get_by_role("button", name="Rotate", exact=True).last.click()
    second = shown_once()
    expect(row).to_contain_text("old secret until")
    assert second != first
    until(lambda: status(second) == 200)
    assert status(first) == 200

    page.get_by_role("button", name="Revoke key from_the_page").click()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    assert status(second) == 200
    page.get_by_role("button", name="Revoke key from_the_page").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(row).to_contain_text("revoked")
    until(lambda: status(second) == 401)
    expect(row.get_by_role("button")).to_have_count(0)


def test_one_request_at_a_time_and_none_while_the_page_is_hidden(browser: Browser, served: Gateway) -> None:
    """With a simulated clock."""
    with recorded_page(browser) as recorded:
        page = recorded.page
        page.clock.install()
        page.goto(f"{served.admin_url}/#key={ADMIN_KEY}")
        expect_live(page)

        look = "(hidden) => { Object.defineProperty(document, 'hidden', { get: () => hidden, configurable: true });"
        look += " document.dispatchEvent(new Event('visibilitychange')); }"
        page.clock.pause_at(page.evaluate("Date.now()") + 1000)
        page.evaluate("1")  # a round trip, after which all earlier requests have been reported
        before = len(recorded.paths("/admin/"))
        page.evaluate(look, True)
        page.clock.run_for(10 * 60_000)
        assert len(recorded.paths("/admin/")) == before

        page.route("**/admin/metrics", lambda route: None)  # a reply that never arrives
        with page.expect_request("**/admin/metrics"):
            page.evaluate(look, False)
        waiting = len(recorded.paths("/admin/metrics"))
        page.clock.run_for(15_000)
        assert len(recorded.paths("/admin/metrics")) == waiting
        expect_live(page, "■ not live")
        expect(page.get_by_role("status").filter(has_text="The data is stale")).to_be_visible()


def test_the_page_survives_a_restart_of_the_gateway(browser: Browser, local_engine: Running, tmp_path: Path) -> None:
    ports: dict[str, Any] = {"port": free_port(), "admin_port": str(free_port())}
    rules = policy(local_engine.url)
    with recorded_page(browser) as recorded:
        page = recorded.page
        with gateway(tmp_path / "one", rules, admin_key=ADMIN_KEY, **ports) as started:
            make_call(started, DEMO, "dev")
            page.goto(f"{started.admin_url}/#key={ADMIN_KEY}")
            expect(page.locator("dl.facts")).to_contain_text("1 receipt since the start")
            open_page(page, "calls")
            expect(page.locator("tbody tr")).to_have_count(1)
        expect_live(page, "■ not live")
        expect(page.get_by_role("status").filter(has_text="is unreachable").first).to_be_visible()
        expect(page.locator("tbody tr")).to_have_count(1)  # the last data stays
        with gateway(tmp_path / "two", rules, admin_key=ADMIN_KEY, **ports) as started:
            expect_live(page)
            expect(page.get_by_text("No calls yet")).to_be_visible()
            call_id = make_call(started, DEMO, "dev")
            expect(page.locator(f'tr[data-key="{call_id}"]')).to_be_visible()
            open_page(page, "now")
            failed = page.locator(".figures div").filter(has_text="Failed").locator("dd")
            expect(failed).to_have_text(re.compile("^(0%|\\u2013)$"))
        errors = [each for each in recorded.errors if "ERR_CONNECTION_REFUSED" not in each]
        assert [each for each in errors if "Failed to load resource" not in each] == []
