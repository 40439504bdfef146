"""Takes the README's picture of the dashboard: `python -m docs.screenshot`, which needs the extra `dev` and a Chromium.

Two bundled engines and a gateway run for a minute under traffic of three tenants: conversations with long shared
system prompts, single questions, and a batch class. Then the page is drawn as a browser shows it.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.e2e.browser import chromium, recorded_page
from tests.e2e.processes import DEMO, Gateway, deployment, engine, gateway, tenant

PICTURE = Path(__file__).parent / "images" / "dashboard.png"
ADMIN_KEY = "wpa-0123456789abcdef0123456789abcdef"
SECONDS = 75
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
                for chunk in client.chat.completions.create(
                    model=DEMO, messages=messages, service_tier=tier, max_tokens=80, stream=True
                ):
                    text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                messages.append({"role": "assistant", "content": text})
                if stop.wait(drawn.uniform(0.0, 0.3)):
                    return


def main() -> None:
    page_name = sys.argv[1] if len(sys.argv) > 1 else "now"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else PICTURE
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, engine(Path(folder, "a")) as a, engine(Path(folder, "b")) as b:
        settings = {"admin_port": "0", "admin_key": ADMIN_KEY}
        with gateway(Path(folder, "gw"), policy([a.url, b.url]), **settings) as running, chromium() as browser:
            stop = threading.Event()
            names = ["support"] * 6 + ["search"] * 4 + ["reports"] * 3
            threads = [
                threading.Thread(target=converse, args=(running, name, number, stop))
                for number, name in enumerate(names)
            ]
            for thread in threads:
                thread.start()
            with recorded_page(browser, width=1280, height=760, color_scheme="light") as recorded:
                recorded.page.goto(f"{running.admin_url}/#key={ADMIN_KEY}")
                recorded.page.wait_for_timeout(1000)
                recorded.page.goto(f"{running.admin_url}/#/{page_name}")
                time.sleep(SECONDS)
                recorded.page.screenshot(path=str(target))
            stop.set()
            for thread in threads:
                thread.join()
    print(f"{target}: {target.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
