"""Takes the pictures of the dashboard: `python -m docs.screenshot`, which needs the extra `dev` and a Chromium.

Two bundled engines and a gateway run for a quarter of an hour under traffic of three tenants: conversations with long
shared system prompts, single questions, and a batch class. One engine stops for a while. Then the pages are drawn as a
browser shows them. `python -m docs.screenshot --seconds 60` takes less time and shows less.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from openai import APIError
from playwright.sync_api import Page, expect

from tests.e2e.browser import chromium, recorded_page
from tests.e2e.processes import DEMO, Gateway, deployment, engine, gateway, tenant

IMAGES = Path(__file__).parent / "images"
ADMIN_KEY = "wpa-0123456789abcdef0123456789abcdef"
SECONDS = 900  # of traffic: the shortest range of the charts
OUTAGE = (0.5, 0.6)  # when one engine stands still, as parts of the time
QUESTIONS = [
    "What is prefix caching?",
    "What is a KV cache?",
    "What is a token?",
    "What is chunked prefill?",
    "What is speculative decoding?",
    "What is continuous batching?",
]


def policy(urls: list[str]) -> dict[str, Any]:
    return {
        "deployments": [
            deployment(f"cpu-{letter}", url, metrics=True, cache_tokens="64k")
            for letter, url in zip("ab", urls, strict=True)
        ],
        "models": [{"name": DEMO, "aliases": ["demo"], "deployments": ["cpu-a", "cpu-b"]}],
        "rules": [{"match": {"service_tier": "flex"}, "class": "batch"}],
        "diagnosis": {"sample": "100%"},
        "tenants": [
            tenant("support", limits={"requests": "6k/1m", "budget": {"amount": "20", "per": "month"}}),
            tenant("search", limits={"tokens": "2M/1m"}),
            tenant("reports", limits={"concurrency": 4}),
        ],
    }


def converse(running: Gateway, name: str, number: int, stop: threading.Event) -> None:
    """One conversation after the other, each under the system prompt of its tenant."""
    drawn = random.Random(number)
    rules = f"You work for {name}. " + " ".join(f"Rule {i}: answer in one short sentence." for i in range(1, 30))
    with running.client(name) as client:
        while not stop.is_set():
            messages: list[Any] = [{"role": "system", "content": rules}]
            for _ in range(4):
                messages.append({"role": "user", "content": drawn.choice(QUESTIONS)})
                tier: Any = "flex" if name == "reports" else "auto"
                text = ""
                try:
                    for chunk in client.chat.completions.create(
                        model=DEMO, messages=messages, service_tier=tier, max_tokens=80, stream=True
                    ):
                        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                except APIError:  # its engine stands still
                    break
                messages.append({"role": "assistant", "content": text})
                if stop.wait(drawn.uniform(0.5, 3.0)):
                    return


def change_policy(folder: Path) -> None:
    """What an operator might change, so that the policy page has a diff."""
    file = folder / "policy.yaml"
    policy = yaml.safe_load(file.read_text())
    policy["models"][0]["aliases"].append("gpt-4o")
    policy["tenants"][1]["limits"]["tokens"] = "3M/1m"
    file.write_text(yaml.safe_dump(policy))


def draw_call(page: Page) -> None:
    """A call with a second attempt if the outage has caused one, else the newest call."""
    row = page.locator("tbody tr").filter(has_text="answered").filter(has_text="2 attempts")
    expect(page.locator("tbody tr").first).to_be_visible()
    (row if row.count() else page.locator("tbody tr")).first.get_by_role("link").click()
    expect(page.get_by_role("region", name="One call").locator(".waterfall")).to_be_visible()


def draw_explanation(page: Page) -> None:
    body = {"messages": [{"role": "user", "content": "What is prefix caching?"}], "model": "gpt-4o"}
    page.get_by_label("Request body, as JSON").fill(json.dumps(body))
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_role("status").filter(has_text="Predicted cost")).to_be_visible()


def draw_answer(page: Page) -> None:
    page.get_by_label("Message").fill("What is prefix caching?")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("region", name="Trace of the last answer").locator(".waterfall")).to_be_visible()
    page.get_by_role("heading", name="Playground").click()


PICTURES: dict[str, tuple[str, int, Callable[[Page], None]]] = {  # by file: the page, its height, what is done first
    "dashboard": ("now?span=15m", 900, lambda page: None),
    "dashboard-call": ("calls", 800, draw_call),
    "dashboard-policy": ("policy", 900, draw_explanation),
    "dashboard-playground": ("playground", 640, draw_answer),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--to", type=Path, default=IMAGES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, engine(Path(folder, "a")) as a, engine(Path(folder, "b")) as b:
        settings: dict[str, Any] = {
            "admin_port": "0",
            "admin_key": ADMIN_KEY,
            "storage": f"sqlite:///{folder}/state.db",
        }
        with gateway(Path(folder, "gw"), policy([a.url, b.url]), **settings) as running, chromium() as browser:
            stop = threading.Event()
            names = ["support"] * 3 + ["search"] * 2 + ["reports"]
            threads = [
                threading.Thread(target=converse, args=(running, name, number, stop))
                for number, name in enumerate(names)
            ]
            for thread in threads:
                thread.start()
            begins, ends = (part * options.seconds for part in OUTAGE)
            time.sleep(begins)
            with b.frozen():
                time.sleep(ends - begins)
            change_policy(Path(folder, "gw"))
            time.sleep(options.seconds - ends)
            for name, (place, height, act) in PICTURES.items():
                with recorded_page(browser, width=1280, height=height, color_scheme="light") as recorded:
                    recorded.page.goto(f"{running.admin_url}/#key={ADMIN_KEY}")
                    recorded.page.evaluate("(place) => { location.hash = place; }", f"#/{place}")
                    recorded.page.wait_for_load_state("networkidle")
                    act(recorded.page)
                    recorded.page.wait_for_timeout(1000)
                    recorded.page.screenshot(path=str(options.to / f"{name}.png"))
            stop.set()
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    main()
