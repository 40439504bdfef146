"""The dashboard's history, policy view, playground, batches and tables, and its accessibility, in a real browser.

All tests share one gateway with two workers, which was stopped and started again after its first calls.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from playwright.sync_api import Browser, Page, expect

from tests.e2e.browser import RecordedPage, chromium, recorded_page
from tests.e2e.faults.upstreams import Request, listening
from tests.e2e.processes import (
    DEMO,
    Gateway,
    chat,
    deployment,
    gateway,
    tenant,
    until,
)
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ADMIN_KEY = "an-admin-key-of-some-length"
PAGES = ("now", "calls", "batches", "spend", "tenants", "keys", "prefixes", "policy", "playground")
EARLIER_CALLS = 6  # before the gateway was started again
AXE_OPTIONS = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
RUN_AXE = """async (options) => (await axe.run(document, options)).violations.map(
    ({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map((node) => node.html).join(" ")}`)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


async def answer(request: Request) -> None:
    await request.whole(tokens=request.body["max_tokens"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("views")
    settings: dict[str, Any] = {
        "storage": f"sqlite:///{folder / 'state.db'}",
        "workers": "2",
        "admin_key": ADMIN_KEY,
    }
    with listening({"local": answer}) as upstreams:
        urls = {"local": f"http://127.0.0.1:{upstreams.ports['local']}", "down": f"http://127.0.0.1:{free_port()}"}
        policy = {
            "deployments": [deployment(name, url, provider="openai") for name, url in urls.items()],
            "models": [{"name": DEMO, "deployments": ["local"]}, {"name": "broken", "deployments": ["down"]}],
            "rules": [{"match": {"header": {"x-team": "night"}}, "class": "batch"}],
            "tenants": [
                tenant("dev", limits={"budget": {"amount": "0.1", "per": "month"}}),
                tenant("limited", limits={"requests": "1/1h"}),
            ],
        }
        with gateway(folder, policy, admin_port="0", **settings) as before:
            for number in range(EARLIER_CALLS):
                body = {**chat(f"Call {number}"), "max_tokens": 3}
                assert before.post("chat/completions", body).status_code == 200
            assert before.post("chat/completions", {**chat(), "model": "broken"}).status_code == 502
        with gateway(folder, folder / "policy.yaml", admin_port="0", **settings) as started:
            yield started


@pytest.fixture
def signed_in(browser: Browser, served: Gateway) -> Iterator[RecordedPage]:
    with recorded_page(browser, width=1440, accept_downloads=True) as recorded:
        recorded.page.goto(f"{served.admin_url}/#key={ADMIN_KEY}")
        expect(recorded.page.locator(".fresh .state")).to_have_text("● live")
        yield recorded
        recorded.assert_clean(served.admin_url)


def open_page(page: Page, place: str) -> None:
    page.evaluate("(place) => { location.hash = place; }", f"#/{place}")
    name = place.split("/")[0].split("?")[0].capitalize()
    expect(page.get_by_role("navigation").locator("[aria-current=page]")).to_have_text(name)


def download(page: Page, button: str) -> list[dict[str, str]]:
    with page.expect_download() as started:
        page.get_by_role("button", name=button).click()
    content = Path(started.value.path()).read_bytes()
    assert re.fullmatch(r"warmpath-[\w-]+-\d{4}-\d\d-\d\d\.csv", started.value.suggested_filename)
    return list(csv.DictReader(io.StringIO(content.decode(), newline="")))


def cell(page: Page, table: str, row: str, column: str) -> Any:
    """The cell of a table, by the texts of its row's and its column's heads."""
    found = page.get_by_role("table", name=table)
    expect(found.get_by_role("columnheader", name=column, exact=True)).to_be_visible()
    heads = [text.rstrip("▲▼") for text in found.locator("thead th").all_inner_texts()]
    return found.locator("tbody tr").filter(has_text=row).locator("th, td").nth(heads.index(column))


def admin(served: Gateway, path: str) -> Any:
    return httpx2.get(f"{served.admin_url}{path}", headers={"authorization": f"Bearer {ADMIN_KEY}"}).json()


def test_calls_of_before_the_restart_are_shown_for_every_range(signed_in: RecordedPage) -> None:
    page = signed_in.page
    for span in ("15m", "7d"):
        open_page(page, f"now?span={span}")
        expect(cell(page, "Models", DEMO, "Requests")).to_have_text(re.compile(r"^\d+$"))
        expect(cell(page, "Deployments", "local", "p99")).to_have_text(re.compile(r"\d m?s$"))
        rows = download(page, "Download the history as CSV")
        assert sum(int(row["answered"]) for row in rows) >= EARLIER_CALLS, "of both workers"
        assert sum(int(row["failed"]) for row in rows) >= 1
        assert sum(float(row["cost_USD"]) for row in rows) > 0
    page.get_by_label("Calls of").select_option("deployment:down")
    expect(page).to_have_url(re.compile(r"of=deployment%3Adown"))
    errors = page.get_by_role("img", name=re.compile("^Errors: "))
    expect(cell(page, "Deployments", "down", "Errors")).to_contain_text("connect_error")
    expect(errors).to_be_visible()
    page.get_by_label("Calls of").select_option("")
    page.get_by_label("Range").select_option("1h")
    expect(page.get_by_role("img", name=re.compile("^Requests: answered"))).to_be_visible()


def test_a_chart_is_read_by_the_keyboard(signed_in: RecordedPage) -> None:
    page = signed_in.page
    open_page(page, "now?span=15m")
    chart = page.locator("figure").filter(has_text="Requests per second")
    expect(chart.locator("path.line").first).to_be_visible()
    chart.locator(".plot-frame").focus()
    expect(chart.locator(".legend")).not_to_contain_text("at ")
    page.keyboard.press("ArrowLeft")
    expect(chart.locator(".legend")).to_contain_text(re.compile(r"at \d\d:\d\d:\d\d"))
    page.keyboard.press("Home")
    expect(chart.locator(".pointer")).to_have_count(1)


def test_calls_are_sorted_and_downloaded_with_their_costs(signed_in: RecordedPage, served: Gateway) -> None:
    page = signed_in.page
    for tokens in (9, 1, 5):
        served.post("chat/completions", {**chat(f"{tokens} tokens"), "max_tokens": tokens})
    open_page(page, "calls?show=answered")
    expect(page.locator("tbody tr").nth(2)).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    head = page.get_by_role("columnheader", name="Output")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "descending")
    rows = download(page, "Download calls as CSV")
    outputs = [int(row["Output"]) for row in rows]
    assert outputs == sorted(outputs, reverse=True) and len(outputs) >= 3
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    column = page.locator("thead th").all_inner_texts().index("Cost")
    costs = [float(text.split()[0]) for text in page.locator(f"tbody tr td:nth-child({column + 1})").all_inner_texts()]
    assert costs and all(costs)
    receipt = served.receipt(rows[0]["Call"])
    assert float(rows[0]["Cost"]) == pytest.approx(float(receipt["cost"]))


def test_keys_have_their_last_use_and_spend(signed_in: RecordedPage) -> None:
    page = signed_in.page
    open_page(page, "keys")
    expect(cell(page, "Keys", "dev", "Last used")).to_have_text(re.compile(r"\d\d:\d\d:\d\d"))
    expect(cell(page, "Keys", "dev", "Spend")).to_have_text(re.compile(r"0\.0\d+ USD"))
    open_page(page, "spend")
    expect(cell(page, "Usage and cost", "dev", "Budget left")).to_have_text(re.compile(r"^0\.0999\d* of 0\.10$"))


def test_the_policy_its_last_change_and_an_explanation(
    signed_in: RecordedPage, served: Gateway, tmp_path: Path
) -> None:
    page = signed_in.page
    file = Path(admin(served, "/admin/policy")["path"])
    policy = yaml.safe_load(file.read_text())
    policy["models"][0]["aliases"] = ["an-alias"]
    file.write_text(yaml.safe_dump(policy))
    open_page(page, "policy")
    page.get_by_role("button", name="Reload the file").click()
    until(lambda: "an-alias" in json.dumps(admin(served, "/admin/policy")))
    change = page.get_by_role("region", name="Changes")
    expect(change.locator(".added", has_text="an-alias")).to_be_visible()
    expect(page.get_by_role("region", name="The policy")).to_contain_text("(hidden ")
    assert "hmac-sha256" not in page.content()

    page.get_by_label("Request body, as JSON").fill(json.dumps({**chat("Explain this"), "model": "an-alias"}))
    page.get_by_label("Further headers").fill("x-team: night")
    page.get_by_role("button", name="Explain").click()
    result = page.get_by_role("status").filter(has_text="Predicted cost")
    expect(result).to_contain_text(f"{DEMO} (requested as an-alias)")
    expect(result).to_contain_text("batch, by rule 1")
    expect(result).to_contain_text("local is the only candidate")
    page.get_by_label("Request body, as JSON").fill(
        '{"model": "unknown", "messages": [{"role": "user", "content": ""}]}'
    )
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_role("alert").filter(has_text="would reject")).to_contain_text("unknown")
    assert ["404" in each for each in signed_in.errors] == [True]  # the browser logs the rejection
    signed_in.errors.clear()


def test_the_playground_streams_and_shows_its_trace(signed_in: RecordedPage, served: Gateway) -> None:
    page = signed_in.page
    open_page(page, "playground")
    page.get_by_label("Key").select_option("dev")
    page.get_by_label("Maximum tokens").fill("12")
    box, talk = page.get_by_label("Message"), page.get_by_role("log")
    trace = page.get_by_role("region", name="Trace of the last answer")
    link, traced = trace.get_by_role("link"), ""
    for turn in (1, 2):
        box.fill("What is a token?")
        box.press("Enter")
        expect(talk.locator(".turn")).to_have_count(2 * turn)
        expect(talk.locator(".turn .text").last).not_to_be_empty()
        expect(link).not_to_have_text(traced)  # until then the trace is the one of the answer before
        expect(trace.locator(".waterfall tbody").first).to_contain_text("settle")
        traced = link.inner_text()
    receipt = served.receipt(traced)
    assert (receipt["key_id"], receipt["outcome"]) == ("dev", "complete")

    page.get_by_label("Key").select_option("limited")
    for _ in range(2):
        box.fill("Again")
        box.press("Enter")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(page.get_by_role("alert").filter(has_text="limit")).to_be_visible()
    assert ["429" in each for each in signed_in.errors] == [True]
    signed_in.errors.clear()
    page.get_by_role("button", name="New conversation").click()
    expect(talk.locator(".turn")).to_have_count(0)


def test_batches_of_all_tenants(signed_in: RecordedPage, served: Gateway) -> None:
    page, client = signed_in.page, served.client()
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {**chat(), "max_tokens": 2}}
    file = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    open_page(page, "batches")
    expect(cell(page, "Batches", batch.id, "Status")).to_contain_text("completed")
    expect(cell(page, "Batches", batch.id, "Progress")).to_contain_text("1 of 1")
    expect(cell(page, "Batches", batch.id, "Tenant")).to_have_text("dev")


def test_the_storage_is_not_called_healthy_while_it_times_out(browser: Browser, served: Gateway) -> None:
    """With an edited reply: time-outs of a real storage last until they are a minute old."""
    with recorded_page(browser) as recorded:
        page = recorded.page

        def with_timeouts(route: Any) -> None:
            found = route.fetch().json()
            route.fulfill(json={**found, "last_minute": {**found["last_minute"], "storage_timeouts": 4}})

        page.goto(f"{served.admin_url}/#key={ADMIN_KEY}")
        storage = page.locator("dl.facts dt", has_text="Storage").locator("+ dd")
        expect(storage).to_have_text("● healthy")
        served.post("chat/completions", {**chat(), "max_tokens": 1})
        until(lambda: admin(served, "/admin/history?span=15m")["last_minute"])
        page.route("**/admin/history*", with_timeouts)
        expect(storage).to_contain_text("▲ slow: 4 timeouts in the last minute")


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (360, "dark")])
def test_every_page_is_accessible(
    browser: Browser, served: Gateway, node_project: Path, width: int, scheme: Any
) -> None:
    axe = (node_project / "node_modules" / "axe-core" / "axe.min.js").read_text()
    with recorded_page(browser, width=width, color_scheme=scheme) as recorded:
        page = recorded.page
        page.goto(f"{served.admin_url}/")
        page.evaluate(axe)
        assert page.evaluate(RUN_AXE, AXE_OPTIONS) == []
        page.evaluate("(key) => { location.hash = `#key=${key}`; }", ADMIN_KEY)
        for place in PAGES:
            open_page(page, place)
            expect(page.locator("main h1")).to_be_visible()
            page.wait_for_load_state("networkidle")
            assert page.evaluate(RUN_AXE, AXE_OPTIONS) == [], place
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{place} is {wide} px wide"
        open_page(page, "keys")
        page.get_by_role("button", name="New key").click()
        assert page.evaluate(RUN_AXE, AXE_OPTIONS) == [], "the dialog"


def test_the_keyboard_alone_reaches_everything(signed_in: RecordedPage) -> None:
    page = signed_in.page
    page.reload()
    expect(page.get_by_role("heading", name="Deployments")).to_be_visible()
    names = []
    for _ in range(len(PAGES) + 2):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.textContent"))
    assert names[0] == "Skip to content"
    assert names[1:] == ["Warmpath", *(place.capitalize() for place in PAGES)], "in the order in which they are shown"
    page.get_by_role("link", name="Calls").focus()
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr").first).to_be_visible()
    sort = page.get_by_role("button", name="Duration")
    sort.focus()
    page.keyboard.press("Enter")
    expect(sort).to_be_focused()
    expect(page.get_by_role("columnheader", name="Duration")).to_have_attribute("aria-sort", "descending")
