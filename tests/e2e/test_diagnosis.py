"""Faults planted in requests to real processes: `warmpath doctor` finds each, and its policy line fixes it."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.diagnosis import read_summaries
from tests.e2e.processes import DEMO, Gateway, Running, deployment, gateway, simple_policy, tenant, until, warmpath

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RULES = "Be brief. Refund only what was booked before 2024-05-16. " * 12
LATER = [{"role": "assistant", "content": "Where to? " * 8}, {"role": "user", "content": "Home, please."}]
BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"


GIT = "gitStatus: the repository at the start\nCurrent branch: main\n\nStatus:\nM {}.py"
CHUNKS = [
    f"<document id='{n}'>{word * 12}</document>" for n, word in enumerate(("Fly away. ", "Stay here. ", "Wait. "))
]


def chat(line: str, *more: Any, user: str = "I want to fly.", **fields: Any) -> dict[str, Any]:
    system = {"role": "system", "content": f"{line}\nYou are an airline agent. {RULES}"}
    return {"model": DEMO, "messages": [system, {"role": "user", "content": user}, *more], "max_tokens": 1, **fields}


def tool(name: str, *, turned: bool = False) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    function = {"name": name, "description": f"{name} does it. " * 10, "parameters": schema}
    return {"type": "function", "function": dict(reversed(function.items())) if turned else function}


def reasoned(**reasoning: str) -> list[Any]:
    return [{**LATER[0], **reasoning}, {"role": "user", "content": "Home. " * 40}]


UNFIXED = {"git_status", "memory", "dropped_reasoning"}
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clock": (chat("Current time: 09:41:07"), chat("Current time: 09:42:31", *LATER)),
    "date": (chat("Today's date: 2026-11-20"), chat("Today's date: 2026-11-21", *LATER)),
    "uuid": (
        chat("Session id: 3f2a9c1e-7b54-4d2e-9d0a-0f6f2c1b7a11"),
        chat("Session id: 9d0a0f6f-2c1b-4a11-bf2a-9c1e7b544d2e", *LATER),
    ),
    "request_id": (chat("Request id: req_8f3a2b1c9d"), chat("Request id: req_1c9d8f3a2b", *LATER)),
    "cwd": (chat("Working directory: /home/ada/shop"), chat("Working directory: /home/ada/bank", *LATER)),
    "noise": (chat(BILLING.format("36ee5")), chat(BILLING.format("0aaa9"), *LATER)),
    "tool_order": (chat("", tools=[tool("f"), tool("g")]), chat("", *LATER, tools=[tool("g"), tool("f")])),
    "key_order": (chat("", tools=[tool("f"), tool("g")]), chat("", tools=[tool("f", turned=True), tool("g")])),
    "chunk_order": (
        chat("", user="\n".join(CHUNKS) + "\nWhen?"),
        chat("", user="\n".join(reversed(CHUNKS)) + "\nWhere?"),
    ),
    # No policy line fixes these.
    "git_status": (chat(GIT.format("a")), chat(GIT.format("b"), *LATER)),
    "memory": (chat("# Memory\n- likes fish"), chat("# Memory\n- likes bread", *LATER)),
    "dropped_reasoning": (
        chat("", *reasoned(reasoning_content="They want to fly."), user="Think."),
        chat("", *reasoned(), *LATER, user="Think."),
    ),
}


def policy(url: str, **fields: Any) -> dict[str, Any]:
    """Each fault has its own tenant, so that the policy lines that fix them do not conflict."""
    common = {"diagnosis": {"sample": "100%"}, "canonicalise": {"level": "off"}, "tenants": [*map(tenant, FAULTS)]}
    return simple_policy(url, **common | fields)


def plant(started: Gateway, kind: str, run: str) -> None:
    """`run` makes the prompts new to the engine, whose cache outlives a gateway."""
    for body in FAULTS[kind]:
        ask(started, json.loads(json.dumps(body).replace("airline agent", f"{run} airline agent")), kind)


def ask(started: Gateway, body: dict[str, Any], who: str = "dev") -> None:
    reply = started.post("chat/completions", body, who, **{"user-agent": f"{who}-agent/1.0 (test)"})
    assert reply.status_code == 200, reply.text


def diagnosis(folder: Path, *options: str) -> dict[str, Any]:
    told = warmpath("doctor", "--data", str(folder / "data"), "--json", *options, cwd=folder)
    assert told.returncode == 0, told.stderr
    return dict(json.loads(told.stdout))


def cached_tokens(folder: Path) -> Counter[str]:
    """What the engine reported, by tenant."""
    cached: Counter[str] = Counter()
    for row in read_summaries(folder / "data" / "diagnosis"):
        cached[row.tenant] += row.cached_tokens
    return cached


def test_each_planted_fault_is_found_and_fixed(local_engine: Running, tmp_path: Path) -> None:
    broken = tmp_path / "sick"
    with gateway(broken, policy(local_engine.url)) as started:
        for kind in FAULTS:
            plant(started, kind, "old")
    before = diagnosis(broken, "--policy", "policy.yaml")
    found = before["findings"]
    named = {(finding["tenant"], finding["agent"], finding["kind"]) for finding in found}
    assert named == {(kind, f"{kind}-agent/1.0", kind) for kind in FAULTS}
    assert len(found) == len(FAULTS)
    assert all(finding["lost_tokens"] >= 32 for finding in found)
    assert all(float(finding["lost_cost"]["USD"]) > 0 and finding["lost_seconds"] > 0 for finding in found)
    ranked = [finding["lost_tokens"] for finding in found]
    assert ranked == sorted(ranked, reverse=True)
    assert {proposal["tenant"] for proposal in before["proposals"]} == FAULTS.keys() - UNFIXED
    assert {finding["kind"] for finding in found if finding["advice"]} == UNFIXED
    assert before["predicted_share"] == pytest.approx(before["reported_share"], abs=0.1)

    written = warmpath("doctor", "--data", "data", "--policy", "policy.yaml", "--apply", "--yes", cwd=broken)
    assert written.returncode == 0, written.stderr
    assert warmpath("check", "policy.yaml", cwd=broken).returncode == 0
    fixed = tmp_path / "mended"
    with gateway(fixed, yaml.safe_load((broken / "policy.yaml").read_text())) as started:
        for kind in FAULTS:
            plant(started, kind, "new")
    after = diagnosis(fixed)
    remaining = {finding["kind"] for finding in after["findings"] if finding["place"] != "user messages"}
    assert remaining == UNFIXED, "the last user message now precedes a moved line"
    was_cached, is_cached = (cached_tokens(folder) for folder in (broken, fixed))
    for proposal in before["proposals"]:
        saved = is_cached[proposal["tenant"]] - was_cached[proposal["tenant"]]
        assert saved == pytest.approx(proposal["saved_tokens"], rel=0.15, abs=16), proposal

    recorded = "".join(file.read_text() for file in (broken / "data" / "diagnosis").rglob("*.jsonl"))
    for words in ("airline", "09:41", "/home/ada", "does it", "They want", "likes fish", "Fly away"):
        assert words not in recorded, "no text of a prompt is written"
    report = warmpath("doctor", "--by", "money", cwd=tmp_path, data_dir=str(broken / "data")).stdout
    assert "   saves " in report
    assert report.count("last seen in req_") == len(FAULTS)


def alike(one: str, other: str) -> int:
    """How many characters the beginnings of both have in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class DatedServer(BaseHTTPRequestHandler):
    """A server with a prefix cache whose template prints the local date, as Llama 3.1's does."""

    prompts: list[str]
    midnight: float
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        date = "today" if time.time() < self.midnight else "tomorrow"
        prompt = date + json.dumps(body["messages"])[:-1]
        cached = max((alike(prompt, earlier) // 16 * 4 for earlier in self.prompts), default=0)
        self.prompts.append(prompt)
        usage = {
            "prompt_tokens": len(prompt) // 4, "completion_tokens": 1, "total_tokens": len(prompt) // 4 + 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
        message = {"role": "assistant", "content": "x"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage,
                  "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}  # fmt: skip
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def dated_server(midnight: float) -> Iterator[str]:
    handler = type("Handler", (DatedServer,), {"prompts": [], "midnight": midnight})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def zone_with_midnight_at(moment: float) -> str:
    """A POSIX time zone in which a day begins at this moment."""
    behind = int(moment) % 86400  # seconds that UTC is ahead of it
    hours, rest = divmod(behind, 3600)
    return f"TST{hours}:{rest // 60:02d}:{rest % 60:02d}"


def test_a_template_that_prints_the_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway runs in a time zone in which midnight is a few seconds after its start."""
    for patience in (5, 10, 20, 40):  # where starting takes longer than that, midnight comes later
        midnight = float(int(time.time() + patience))
        monkeypatch.setenv("TZ", zone_with_midnight_at(midnight))
        folder = tmp_path / str(patience)
        with dated_server(midnight) as url:
            served = deployment("local", url, provider="openai")
            with gateway(folder, policy(url, deployments=[served], tenants=[tenant("dev")])) as started:
                ask(started, chat(""))
                ask(started, chat("", *LATER))
                if time.time() >= midnight - 0.5:
                    continue
                until(lambda due=midnight: time.time() > due + 0.1)
                ask(started, chat("", *LATER, *LATER))
        told = diagnosis(folder)
        assert [finding["kind"] for finding in told["findings"]] == ["template_date"]
        assert ["opt_in: [template_date]" in proposal["line"] for proposal in told["proposals"]] == [True]
        return
    pytest.fail("the gateway takes a minute to start")
