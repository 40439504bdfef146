"""One deployment reports absurd usage: its calls are estimated, and every other tenant's bill and limits stay right."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.billing.ledger import verify
from tests.e2e.processes import Gateway, gateway, tenant, until, warmpath

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ADMIN_KEY = "admin-key-0123456789"
HONEST = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
COST = "0.000014"  # of an honest call
ABSURD = [
    '{"prompt_tokens":10,"completion_tokens":18446744073709551615,"total_tokens":18446744073709551625}',
    '{"prompt_tokens":-1000000,"completion_tokens":0,"total_tokens":1}',
    '{"prompt_tokens":1208925819614629174706176,"completion_tokens":2}',
    '{"prompt_tokens":1e308,"completion_tokens":2}',
    '{"prompt_tokens":1e999,"completion_tokens":2}',
    '{"prompt_tokens":true,"completion_tokens":[]}',
    '{"prompt_tokens":{"prompt_tokens":{}},"completion_tokens":"many"}',
    '{"prompt_tokens":10,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":11}}',
    '{"prompt_tokens":5000000,"completion_tokens":2}',
    '{"input_tokens":9007199254740991,"output_tokens":9007199254740991}',
]


class Liar(BaseHTTPRequestHandler):
    """Reports the usage that the last message contains, in an answer of two words."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        usage = body["messages"][-1]["content"]
        usage = usage if isinstance(usage, str) else usage[0]["text"]
        if body.get("stream"):
            words = [f'{{"index":0,"delta":{{"content":"{word}"}}}}' for word in ("two", " words")]
            events = [f'{{"choices":[{word}]}}' for word in words]
            last = '{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
            data = [*events, last, f'{{"choices":[],"usage":{usage}}}', "[DONE]"]
            self._reply("".join(f"data: {each}\n\n" for each in data), "text/event-stream")
        else:
            message = '{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":"two words"}}'
            self._reply(f'{{"object":"chat.completion","choices":[{message}],"usage":{usage}}}', "application/json")

    def do_GET(self) -> None:
        self._reply("{}", "application/json")

    def _reply(self, text: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def server() -> Iterator[str]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1"
    finally:
        http.shutdown()
        http.server_close()


@pytest.fixture(params=["memory", "sqlite"])
def started(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Gateway]:
    storage = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'state.db'}"
    limits = {"tokens": "1000000/1d", "concurrency": 4, "budget": {"amount": "10", "per": "total"}}
    price = {"input": "1", "output": "2"}
    with server() as url:
        policy = {
            "deployments": [
                {"name": name, "base_url": url, "model": "m", "price": price} for name in ("honest", "liar")
            ],
            "models": [{"name": name, "deployments": [name]} for name in ("honest", "liar")],
            "tenants": [tenant(name, limits=limits) for name in ("ada", "bob")],
        }
        with gateway(tmp_path, policy, storage=storage, admin_port="0", admin_key=ADMIN_KEY) as front:
            yield front


def chat(model: str, usage: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": usage}], "max_tokens": 100, **fields}


def ask_honestly(front: Gateway) -> None:
    """Send a call of the tenant bob to the honest deployment."""
    reply = front.post("chat/completions", chat("honest", json.dumps(HONEST)), "bob")
    assert reply.status_code == 200, reply.text
    receipt = front.receipt(reply.headers["x-request-id"])
    assert (receipt["input_uncached"], receipt["output"], receipt["exact"], receipt["cost"]) == (10, 2, True, COST)
    assert "implausible" not in receipt


def requests(usage: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests in every API format to the deployment that reports this usage."""
    return [
        (path, {**body, "stream": stream})
        for stream in (False, True)
        for path, body in (
            ("chat/completions", chat("liar", usage)),
            ("responses", {"model": "liar", "input": usage}),
            ("messages", chat("liar", usage)),
        )
    ]


def budget_left(front: Gateway, name: str) -> Decimal:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    limits = httpx2.get(f"{front.admin_url}/admin/limits/{name}", headers=headers).raise_for_status().json()["limits"]
    (budget,) = (limit for limit in limits if limit["limit"] == "budget")
    return Decimal(str(budget["left"]))


def test_absurd_usage_harms_no_other_tenant(started: Gateway, tmp_path: Path) -> None:
    for usage in ABSURD:
        for path, body in requests(usage):
            reply = started.post(path, body, "ada")
            assert reply.status_code == 200 and "words" in reply.text, (path, usage)
            assert '"error":{' not in reply.text and "event: error" not in reply.text, (path, usage)
            receipt = started.receipt(reply.headers["x-request-id"])
            assert receipt.get("implausible") and not receipt["exact"], (path, usage, receipt)
            assert 0 < receipt["input_uncached"] < 100 and receipt["output"] < 100, (path, usage, receipt)
        ask_honestly(started)
    for path, body in requests('{"prompt_tokens":10,"completion_tokens":NaN}'):  # no JSON, so the answer may be refused
        receipt = started.receipt(started.post(path, body, "ada").headers["x-request-id"])
        assert not receipt["exact"] and receipt["output"] < 100, (path, receipt)
    ask_honestly(started)
    owed = {name: sum(Decimal(each["cost"]) for each in started.receipts(tenant=name)) for name in ("ada", "bob")}
    assert owed["bob"] == (len(ABSURD) + 1) * Decimal(COST)
    for name, amount in owed.items():
        until(lambda name=name, amount=amount: budget_left(started, name) == 10 - amount)
    assert started.metric("warmpath_usage_implausible_total", deployment="liar") >= 6 * len(ABSURD)
    assert started.log.read_text().count("liar reported implausible usage") == 1
    assert "background task" not in started.log.read_text()
    usage_of = warmpath("usage", "--by", "tenant", "--json", cwd=tmp_path, ledger_dir=str(started.ledger))
    lines = {line["tenant"]: line for line in json.loads(usage_of.stdout)}
    assert lines["bob"]["requests"] == len(ABSURD) + 1 and usage_of.returncode == 0, usage_of.stderr
    assert verify(started.ledger).broken is None and verify(started.ledger).unreadable == ()
