"""Records a run of every command into docs/reference/recorded-run.md.

    unshare --map-root-user --net python -m docs.record

Everything runs in an empty folder with an empty home, against `warmpath up` and redis-server, which the run starts
first. Ports are the defaults, so nothing else may use them; the network namespace of the command above is empty. Keys
lose their secrets, and long outputs are cut, which a line says. `tests/docs/test_recorded_run.py` checks that
the page has every verb, and that every recorded command line is still valid.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.first_start import raise_loopback

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "recorded-run.md"
COLUMNS = 110
LINES_MAX = 24  # of an output
START_SECONDS_MAX = 600.0
SCREEN_SECONDS = 20.0  # until the live view is read from the terminal
SECRET = re.compile(r"\b(wpa?-(?:[a-z0-9_]+-)?)[A-Za-z0-9]{16,}")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")
KEY = "wp-dev-0123456789abcdef0123"
ADMIN_KEY = "wpa-0123456789abcdef0123456789abcdef"

OPENING = """<!-- Recorded by `python -m docs.record`. Do not edit this page. -->

# A recorded run of each command

The outputs are those of one run in an empty folder on a machine with two cores, against the gateway and the engine that
`warmpath up` starts. Other work ran on the machine, so that starts take longer than on an idle one. The terminal has
{columns} columns. Secrets are replaced by `…`, and long outputs are cut. The [command reference](cli.md) has all
options.
"""

FILES = {
    "policy.yaml": """\
deployments:
  - name: local
    provider: warmpath
    base_url: http://127.0.0.1:8081/v1
    model: warmpath-demo
    price: {version: "2026-11", input: 0.05, cached_input: 0.005, output: 0.2}
models:
  - {name: warmpath-demo, aliases: [demo], deployments: [local]}
rules:
  - {match: {service_tier: flex}, class: batch}
tenants:
  - name: dev
    limits: {requests: 600/1m, budget: {amount: 50, per: month}}
diagnosis: {sample: 100%}
routing: {log: true}
""",
    "broken.yaml": """\
deployments:
  - {name: local, provider: vlm, base_url: "http://127.0.0.1:8000/v1", model: qwen}
models:
  - {name: qwen, deployments: [locla], fallbaks: [other]}
tenants:
  - {name: dev, limits: {requests: often}}
""",
    "request.json": json.dumps(
        {
            "model": "demo",
            "service_tier": "flex",
            "messages": [{"role": "user", "content": "What is prefix caching?"}],
            "temperature": 0,
        }
    ),
    "batch.jsonl": "".join(
        json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": "demo", "max_tokens": 12,
                    "messages": [{"role": "user", "content": f"What is {word}?"}],
                },
            }
        )
        + "\n"
        for number, word in enumerate(("a token", "a KV cache"), 1)
    ),
    "litellm.yaml": """\
model_list:
  - model_name: gpt-x
    litellm_params: {model: openai/gpt-x, api_key: os.environ/OPENAI_API_KEY, rpm: 500}
  - model_name: qwen
    litellm_params: {model: hosted_vllm/Qwen/Qwen3-32B, api_base: "http://10.0.0.5:8000/v1"}
litellm_settings: {fallbacks: [{gpt-x: [qwen]}]}
""",
    "litellm.json": json.dumps(
        {
            "gpt-x": {
                "litellm_provider": "openai", "mode": "chat",
                "input_cost_per_token": 2e-6, "cache_read_input_token_cost": 2e-7, "output_cost_per_token": 8e-6,
            }
        }
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One command line.

    `title` begins a section of the page, and `why` stands before the command. `stdin`: what it reads. `until`: it
    serves until a line with this text, and is then interrupted. `screen`: it draws on a terminal, and `q` ends it.
    `into`: the file that gets its output, too.
    """

    command: str
    why: str = ""
    title: str = ""
    stdin: str = ""
    until: str = ""
    screen: bool = False
    into: str = ""


STEPS = (
    Step("warmpath --version"),
    Step("warmpath completion bash"),
    Step("warmpath check policy.yaml", "A valid policy:", title="The policy"),
    Step("warmpath import litellm litellm.yaml", "The configuration of another gateway as a policy:"),
    Step("warmpath check broken.yaml", "Every mistake is reported in one pass:"),
    Step("warmpath check policy.yaml --live", "What works at each deployment:"),
    Step("warmpath explain policy.yaml --request request.json"),
    Step("warmpath keys create --tenant dev --id ci --expires 30d", title="Keys and tenants"),
    Step("warmpath keys rotate ci --overlap 1h"),
    Step("warmpath keys list"),
    Step("warmpath keys revoke ci"),
    Step("warmpath keys hash", "The line of a key for the policy file. The key is read from stdin:", stdin=f"{KEY}\n"),
    Step("warmpath keys change-pepper"),
    Step("warmpath tenants create search --parent dev --model warmpath-demo"),
    Step("warmpath tenants set search --limits '{{requests: 60/1m}}'"),
    Step("warmpath tenants list"),
    Step("warmpath tenants export", into="tenants.jsonl"),
    Step("warmpath tenants delete search"),
    Step("warmpath tenants import tenants.jsonl"),
    Step("warmpath admin-keys create alice --role viewer --expires 30d"),
    Step("warmpath admin-keys list"),
    Step("warmpath admin-keys revoke {admin_key_id}"),
    Step("warmpath audit list --since 1h"),
    Step("warmpath audit verify"),
    Step("warmpath batch submit batch.jsonl --output answers.jsonl", title="Requests"),
    Step("warmpath batch watch {batch_id}"),
    Step("warmpath status", title="A running gateway"),
    Step("warmpath trace {request_id}"),
    Step("warmpath top", "One screen of the live view. The key `q` ends it:", screen=True),
    Step("warmpath route-log --last 3"),
    Step("warmpath doctor"),
    Step(
        "warmpath simulate --generate conversation --deployments 2 --sessions 8 --max-requests 4 --only 'round robin'"
    ),
    Step("warmpath usage --by model --by class", title="Usage and money"),
    Step("warmpath usage receipts --last 3"),
    Step("warmpath usage verify"),
    Step("warmpath usage reconcile", "The drift is what `check --live` sent to the engine, past the gateway:"),
    Step("warmpath usage reprice --since today --until now --dry-run"),
    Step("warmpath usage adjust dev 0.01 --reason goodwill"),
    Step("warmpath usage adjust dev 5 --kind adjustment --reason setup --month {last_month}"),
    Step("warmpath usage close {last_month}"),
    Step("warmpath usage statement {month}"),
    Step("warmpath usage make-key signing.pem"),
    Step("warmpath usage invoice {last_month} dev --out invoice --key signing.pem"),
    Step("warmpath usage verify-invoice invoice"),
    Step("warmpath usage anchor --to anchors --key signing.pem"),
    Step("warmpath usage check-anchors anchors --public-key signing.pub.pem"),
    Step("warmpath usage export csv --since today --out usage.csv"),
    Step("warmpath usage compact"),
    Step("warmpath usage collect collected"),
    Step("warmpath prices import litellm litellm.json --from 2026-12-01"),
    Step("warmpath prices diff policy.yaml dearer.yaml"),
    Step("warmpath prices check"),
)
ALONE = (  # after `warmpath up` has ended
    Step("warmpath serve", "The gateway and the engine as processes of their own:", "Parts", until="ready on"),
    Step("warmpath engine --model demo", until="ready on"),
)


# What later command lines need from earlier outputs: the first text that a pattern finds.
FOUND = {"admin_key_id": r"wpa-([a-z0-9_]+)-", "batch_id": r"(batch_\w+)"}


class Recorder:
    """Runs steps in one folder and collects the text of the page."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.found: dict[str, str] = {}  # what later command lines need from earlier outputs
        self.text = [OPENING.format(columns=COLUMNS)]
        self._folder = folder
        self._env = env

    def record(self, step: Step) -> None:
        """Run one step."""
        line = step.command.format(**self.found)
        if step.screen:
            output, code = self._screen(line), 0
        elif step.until:
            output, code = self._served(line, step.until), 0
        else:
            done = subprocess.run(
                ["bash", "-c", line], cwd=self._folder, env=self._env, input=step.stdin, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            output, code = done.stdout, done.returncode
        if step.into:
            (self._folder / step.into).write_text(output)
        for name, pattern in FOUND.items():
            if found := re.search(pattern, output):
                self.found.setdefault(name, found[1])
        self.add(step, line, output, code)
        print(f"$ {line}\n{output}", flush=True)

    def add(self, step: Step, line: str, output: str, code: int) -> None:
        """Add a command and its output to the page."""
        lines = [SECRET.sub(r"\1…", each.rstrip()) for each in CONTROL.sub("", output).rstrip().splitlines()]
        if len(lines) > LINES_MAX:
            lines = [*lines[:LINES_MAX], f"[... {len(lines) - LINES_MAX} more lines]"]
        if code:
            lines.append(f"[exit code {code}]")
        if step.title:
            self.text.append(f"## {step.title}\n")
        if step.why:
            self.text.append(f"{step.why}\n")
        self.text.append("\n".join(["```text", f"$ {line}", *lines, "```", ""]))

    def _served(self, line: str, until: str) -> str:
        with self.serving(line, until) as lines:
            return "".join(lines)

    @contextlib.contextmanager
    def serving(self, line: str, until: str) -> Iterator[list[str]]:
        """Run a server while the block runs. The list has its output, until a line with this text."""
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line}"], cwd=self._folder, env=self._env, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        watchdog = threading.Timer(START_SECONDS_MAX, process.kill)
        watchdog.start()
        try:
            lines: list[str] = []
            for each in process.stdout:
                lines.append(each)
                if until in each:
                    break
            else:
                sys.exit(f"{line} has ended:\n{''.join(lines)}")
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield lines
        finally:
            watchdog.cancel()
            process.send_signal(signal.SIGINT)
            process.wait()

    def _screen(self, line: str) -> str:
        """What the command has drawn on a terminal when nothing more comes for a second. Then presses q."""
        ours, theirs = pty.openpty()
        rows_and_columns = (20).to_bytes(2, sys.byteorder) + COLUMNS.to_bytes(2, sys.byteorder) + bytes(4)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, rows_and_columns)
        env = {**self._env, "TERM": "xterm", "NO_COLOR": "1"}
        process = subprocess.Popen(["bash", "-c", line], cwd=self._folder, env=env, stdin=theirs, stdout=theirs)
        os.close(theirs)
        drawn, deadline = b"", time.monotonic() + SCREEN_SECONDS
        while time.monotonic() < deadline and select.select([ours], [], [], 1.0 if b"quit" in drawn else 10.0)[0]:
            drawn += os.read(ours, 65536)
        os.write(ours, b"q")
        with contextlib.suppress(OSError):  # the other end of the terminal is closed
            while os.read(ours, 65536):
                pass
        process.wait()
        frames = drawn.decode(errors="replace").replace("\r", "").split("\x1b[H")
        return next(frame for frame in reversed(frames) if "quit" in frame)


def record(folder: Path) -> str:
    """Run everything. Returns the page."""
    (folder / "home").mkdir()
    for name, content in FILES.items():
        (folder / name).write_text(content)
    (folder / "dearer.yaml").write_text(FILES["policy.yaml"].replace("output: 0.2", "output: 0.3"))
    env = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(folder / "home"), "COLUMNS": str(COLUMNS),
        "PYTHONPATH": str(ROOT), "USER": "alice", "LOGNAME": "alice",
        "WARMPATH_POLICY": "policy.yaml", "WARMPATH_DEV_KEY": KEY, "WARMPATH_ADMIN_KEY": ADMIN_KEY,
        "WARMPATH_ADMIN_PORT": "8082", "WARMPATH_STORAGE": "sqlite:///.warmpath/warmpath.db",
        "WARMPATH_LEDGER_SHIP": "redis://127.0.0.1:6379/0", "WARMPATH_REPLICA": "gateway-1",
        "OPENAI_BASE_URL": "http://127.0.0.1:8080/v1", "OPENAI_API_KEY": KEY,
    }  # fmt: skip
    recorder = Recorder(folder, env)
    now = datetime.now(UTC)
    last_month = (now.replace(day=1) - timedelta(days=1)).strftime("%Y-%m")
    recorder.found = {"month": now.strftime("%Y-%m"), "last_month": last_month}
    with recorder.serving("redis-server --save '' --dir .", "Ready to accept"):
        with recorder.serving("warmpath up", "    print(") as lines:
            recorder.add(Step("", "The first start:", title="Start"), "warmpath up", "".join(lines), 0)
            recorder.found["request_id"] = chat(folder, env)
            for step in STEPS:
                recorder.record(step)
        for step in ALONE:
            recorder.record(step)
    return "\n".join(recorder.text)


def chat(folder: Path, env: dict[str, str]) -> str:
    """Send the request. Returns its id."""
    command = [
        "curl", "-sN", "-D", "headers", "http://127.0.0.1:8080/v1/chat/completions", "-d", "@request.json",
        "-H", f"authorization: Bearer {KEY}", "-H", "content-type: application/json",
    ]  # fmt: skip
    subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
    return next(re.finditer(r"x-request-id: (\S+)", (folder / "headers").read_text()))[1]


def main() -> None:
    raise_loopback()
    with tempfile.TemporaryDirectory(prefix="warmpath-record-") as folder:
        text = record(Path(folder))
        PAGE.write_text(text.replace(folder, "~/warmpath").rstrip() + "\n")


if __name__ == "__main__":
    main()
