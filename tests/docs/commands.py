"""What is done with each fenced block of a page, so that every command in the documentation runs as written.

The blocks of a page run one after the other in the checkout of `conftest.Stack`, beside an engine and a gateway that
`warmpath up` has started there. A block that is not simply run says so in the page's source, by
`<!-- test: MARK -->` on the line before it; `RUNNERS` says what is done with each mark. `Stack.here` says what is
replaced in a block.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import openai
import yaml
from pydantic import TypeAdapter

from gateway.deployments.instances import Instance
from gateway.discovery.file import FileSource
from gateway.policy import Policy, located_yaml
from gateway.policy.file import parse_policy
from gateway.providers.transport import HTTPTransport
from gateway.server.policy_checks import ANYWHERE
from tests.docs.conftest import KEY, Stack
from tests.docs.markdown import ROOT, Block, blocks
from tests.e2e.processes import PATIENCE_SECONDS, clean_environment, until


def run(stack: Stack, block: Block) -> None:
    """Do with a block what its mark, or else its language, asks for."""
    what = block.mark or block.language
    assert what in RUNNERS, f"{block}: nothing is known about {what!r} blocks"
    RUNNERS[what](stack, block)


def run_bash(stack: Stack, block: Block) -> None:
    stack.printed[block] = printed = stack.bash(block, block.text).stdout
    lines = block.text.splitlines()
    only_exports = all(line.startswith("export ") for line in lines)
    redirected = re.search(r" > (\S+)$", lines[-1])
    written = (stack.checkout / redirected[1]).read_text() if redirected else ""
    assert printed or written or only_exports
    if "curl" in block.text:
        assert '"error"' not in printed
    if '"stream": true' in block.text:
        assert printed.endswith("data: [DONE]\n\n")


def run_python(stack: Stack, block: Block) -> None:
    (stack.checkout / "example.py").write_text(stack.here(block.text))
    stack.printed[block] = printed = stack.bash(block, "python example.py").stdout
    assert printed


def has_hooks(stack: Stack, block: Block) -> None:
    """The code is a module with functions that a policy can name. tests/gateway/hooks runs them."""
    (stack.checkout / "our_hooks.py").write_text(block.text)
    stack.bash(block, "python -c 'import our_hooks; our_hooks.mask_request, our_hooks.mask_answer'")


def is_logged(stack: Stack, block: Block) -> None:
    """The engine's code has the beginning of every line, up to the first value in it."""
    code = "".join(path.read_text() for path in (ROOT / "backend").rglob("*.py"))
    for line in block.text.splitlines():
        assert re.split(r" \(|\d", line)[0] in code, line


def is_like_what_was_printed(stack: Stack, block: Block) -> None:
    """Every line shown was printed, in this order, by the command before it; numbers and ids may differ."""
    printed = printed_before(stack, block)
    lines = iter(printed.splitlines())
    for shown in block.text.splitlines():
        pattern = r"\s+".join(map(pattern_of_word, shown.split()))
        assert any(re.fullmatch(rf"\s*{pattern}\s*", line) for line in lines), f"{shown!r} is not in:\n{printed}"


def is_what_was_printed(stack: Stack, block: Block) -> None:
    assert printed_before(stack, block) == block.text


def printed_before(stack: Stack, block: Block) -> str:
    """By the command before it, which runs now if its own test was not chosen."""
    (*_, command) = [earlier for earlier in blocks(block.page) if earlier.line < block.line]
    if command not in stack.printed:
        run(stack, command)
    return stack.printed[command]


def pattern_of_word(word: str) -> str:
    """Numbers stand for any number, and long hexadecimal ids for any id."""
    if re.fullmatch(r"[0-9a-f]{16,}", word):
        return "[0-9a-f]+"
    return r"\d[\d.]*".join(map(re.escape, re.split(r"\d[\d.]*", word)))


def check_policy(stack: Stack, block: Block) -> None:
    parse_policy(block.text.encode(), file=str(block), checks=ANYWHERE)


def check_part_of_policy(stack: Stack, block: Block) -> None:
    """Each field is valid by itself. The names that it refers to are not on the page."""
    for name, value in located_yaml.load(block.text).data.items():
        annotation: Any = Policy.model_fields[name].annotation
        TypeAdapter(annotation).validate_python(value)


def is_running(stack: Stack, block: Block) -> None:
    """The fixture has started what this starts."""
    assert shlex.split(block.text)[-2:] == ["make", "up"]
    assert set(re.findall(r"\bWARMPATH_\w+", block.text)) <= {"WARMPATH_OTLP_ENDPOINT"}


def was_printed(stack: Stack, block: Block) -> None:
    printed = (stack.checkout / "stdout").read_text()
    for line in stack.here(block.text).splitlines():
        pattern = r"\d+\.\d s".join(map(re.escape, re.split(r"\d+\.\d s", line)))
        assert re.search(f"^{pattern}$", printed, re.MULTILINE), f"{line!r} was not printed:\n{printed}"


def is_a_target(stack: Stack, block: Block) -> None:
    (command, target) = block.text.split()
    assert (command, bool(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE))) == ("make", True)


def check_without_running(stack: Stack, block: Block) -> None:
    """Its syntax, and that the options and files which it names exist."""
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        if "warmpath" in words:
            verb, *rest = words[words.index("warmpath") + 1 :]
            known = stack.bash(block, f"warmpath {shlex.join([verb, *subverb(verb, rest)])} --help").stdout
            assert all(option in known for option in rest if option.startswith("--"))
        if words[0].endswith("pip"):
            assert (ROOT / words[words.index("-c") + 1]).exists()
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(re.findall(r"\[(\w+)\]", words[-1])) <= extras.keys()


def subverb(verb: str, rest: list[str]) -> list[str]:
    return rest[:1] if verb in ("batch", "keys", "prices", "usage") and not rest[0].startswith("-") else []


def check_docker(stack: Stack, block: Block) -> None:
    check_without_running(stack, block)
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert set(re.findall(r"compose exec (\S+)", block.text)) <= services.keys()
    docker = shutil.which("docker")
    if docker and not subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        found = subprocess.run([docker, "compose", "config", "-q"], cwd=ROOT, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr


def check_chart_values(stack: Stack, block: Block) -> None:
    """Its syntax, and that the chart has the values which it sets."""
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "warmpath" / "values.yaml").read_text())
    paths = re.findall(r"--set (\S+?)=", block.text)
    assert paths
    for path in paths:
        found = values
        for name in path.split("."):
            assert name in found, path
            found = found[name]


def names_instances(stack: Stack, block: Block) -> None:
    """Discovery reads it as a file of targets, and finds all of them."""
    file = stack.checkout / "engines.yaml"
    file.write_text(block.text)
    assert len(asyncio.run(first_list(str(file)))) == sum(len(group["targets"]) for group in yaml.safe_load(block.text))


async def first_list(path: str) -> list[Instance]:
    found: list[Instance] = []
    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
        following = tasks.create_task(FileSource(path, HTTPTransport(), str).follow(found.extend))
        while not found:
            await asyncio.sleep(0.01)
        following.cancel()
    return found


def serves(stack: Stack, block: Block) -> None:
    """It gets ready, and ends well when it is stopped. The ledger in `.warmpath` has its writer already."""
    command = shlex.split(stack.here(block.text))
    server = subprocess.Popen(
        [sys.executable, "-m", "gateway", *command[1:]],
        cwd=stack.checkout, env=clean_environment(WARMPATH_DATA_DIR="instead"), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout
        assert any(" ready on http://127.0.0.1:" in line for line in server.stdout)
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_SECONDS) == 0
    finally:
        server.kill()
        server.communicate()


def are_the_spans(stack: Stack, block: Block) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=KEY) as client:
        hello = client.chat.completions.with_raw_response.create(
            model="warmpath-demo", messages=[{"role": "user", "content": "Hello"}]
        )
    trace_id = bytes.fromhex(hello.headers["x-trace-id"])

    def relations() -> set[tuple[str, str]]:
        spans = {span.span_id: span for span in stack.collector.spans if span.trace_id == trace_id}
        names = {span_id: span.name for span_id, span in spans.items()}
        return {(names.get(span.parent_span_id, ""), span.name) for span in spans.values()}

    expected = set(relations_of_tree(block.text))
    until(lambda: len(relations()) >= len(expected))
    assert relations() == expected


def relations_of_tree(text: str) -> Iterator[tuple[str, str]]:
    """(parent, child) for every line of a drawn tree; three columns are one level."""
    line_of_ancestors: list[str] = []
    for line in text.splitlines():
        name = line.lstrip("│├└─ ")
        level = (len(line) - len(name)) // 3
        line_of_ancestors[level:] = [name]
        yield (line_of_ancestors[level - 1] if level else ""), name


RUNNERS: dict[str, Callable[[Stack, Block], None]] = {
    "bash": run_bash,
    "a module of hooks": has_hooks,
    "python": run_python,
    "yaml": check_policy,
    "a part of a policy": check_part_of_policy,
    "a file of targets": names_instances,
    "the stack itself": is_running,
    "output of make up": was_printed,
    "logged by the engine": is_logged,
    "printed by the block above": is_like_what_was_printed,
    "printed exactly by the block above": is_what_was_printed,
    "runs this test": is_a_target,
    "needs the network": check_without_running,
    "needs a GPU": check_without_running,
    "needs Redis": check_without_running,
    "needs traffic": check_without_running,
    "needs Docker": check_docker,
    "needs a cluster": check_chart_values,
    "serves until stopped": serves,
    "spans of a call": are_the_spans,
}
