"""Each kind of break between two calls is found and classified, and other differences are not reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.diagnosis import CallSummary, DiagnosisJournal, PrefixDiagnosis, policy_line, read_summaries, report
from gateway.diagnosis.breaks import PrefixBreak
from gateway.endpoints import ENDPOINTS
from gateway.policy import Policy
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.types import Attempt, Call, PhaseTimings, Principal, Usage
from tests.gateway.calls import UNTRACED, a_policy

RULES = "Be brief. Refund only what was booked before 2024-05-16. " * 30
STABLE = f"You are an airline agent.\n{RULES}"
LATER = [{"role": "assistant", "content": "Where to? " * 40}, {"role": "user", "content": "Home, please."}]
PRICE = {"input": "1", "cached_input": "0.1"}


def tool(name: str, reverse: bool = False, words: str = "Does it. ") -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}}}
    function = {"name": name, "description": words * 20, "parameters": schema}
    return {"type": "function", "function": dict(reversed(function.items())) if reverse else function}


def chat(system: str = STABLE, *more: Any, user: str = "I want to fly.", **fields: Any) -> dict[str, Any]:
    first = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"model": "m", "messages": [*first, *more], **fields}


class DiagnosisRig:
    """A diagnosis behind the gateway's own canonicaliser."""

    def __init__(self, folder: Path, **policy: Any) -> None:
        self.policy = sampled_policy(**policy)
        self.folder = folder
        self._canonicaliser = Canonicaliser(b"secret")
        self.watcher = PrefixDiagnosis(DiagnosisJournal(folder, "r"))
        self.now_ns = 1_763_630_000 * 10**9  # 2025-11-20, 09:13 UTC

    def call(
        self, body: dict[str, Any], usage: Usage | None = None, *, key: str = "k", tenant: str = "t",
        deployment: str = "a", agent: bytes = b"Agent/1.0 (linux)",
    ) -> Call:  # fmt: skip
        call = self._canonicaliser.canonicalise(
            ENDPOINTS[0], json.dumps(body).encode(), {}, call_id=f"c{self.now_ns}", policy=self.policy,
            principal=Principal(self.policy.tenants_by_name[tenant], key), now=0.0, trace=UNTRACED,
        )  # fmt: skip
        timings = PhaseTimings()
        timings.started_ns, timings.first_chunk_ns, timings.ended_ns = (self.now_ns + n * 10**9 for n in (0, 2, 3))
        attempt = Attempt(deployment, "ok", self.now_ns + 10**9, self.now_ns + 3 * 10**9, 1)
        usage = usage or Usage(input_uncached=call.prompt_tokens_estimate, output=5)
        self.watcher.note(call, {b"user-agent": agent}, usage, timings, deployment, [attempt])
        self.watcher.flush()
        self.now_ns += 60 * 10**9
        return call

    @property
    def rows(self) -> list[CallSummary]:
        return list(read_summaries(self.folder))

    @property
    def breaks(self) -> list[PrefixBreak]:
        return [row.broken for row in self.rows if row.broken is not None]


def sampled_policy(sample: float = 1.0, content: bool = False, **policy: Any) -> Policy:
    deployments = [
        {"name": name, "base_url": f"http://{name}.invalid/v1", "model": "served", "price": PRICE,
         "prefill_tokens_per_second": 1000}
        for name in ("a", "b")
    ]  # fmt: skip
    return a_policy(deployments=deployments, diagnosis={"sample": sample, "content": content}, **policy)


@pytest.fixture
def rig(tmp_path: Path) -> DiagnosisRig:
    return DiagnosisRig(tmp_path)


LINES = {
    "clock": ("Current time: 09:41:07", "Current time: 09:42:31"),
    "clock ": ("The current date and time is Friday, November 20, 2026 9:41 AM.",
               "The current date and time is Friday, November 20, 2026 9:43 AM."),
    "clock  ": ("now=1763631667", "now=1763631802"),
    "date": ("Today's date: 2026-11-20", "Today's date: 2026-11-21"),
    "date ": ("Today is 20 November 2026", "Today is 21 November 2026"),
    "uuid": ("Session id: 3f2a9c1e-7b54-4d2e-9d0a-0f6f2c1b7a11", "Session id: 9d0a0f6f-2c1b-4a11-bf2a-9c1e7b544d2e"),
    "request_id": ("Request id: req_8f3a2b1c9d", "Request id: req_1c9d8f3a2b"),
    "request_id ": ("trace: 4bf92f3577b34da6a3ce929d0e0e4736", "trace: a3ce929d0e0e47364bf92f3577b34da6"),
    "cwd": ("Working directory: /home/ada/shop", "Working directory: /home/ada/bank"),
    "cwd ": ("cwd: C:\\\\src\\\\shop", "cwd: C:\\\\src\\\\bank"),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_volatile_text_in_a_system_prompt_and_the_policy_line_that_fixes_it(
    rig: DiagnosisRig, tmp_path: Path, name: str
) -> None:
    before, after = LINES[name]
    rig.call(chat(f"{before}\n{STABLE}"))
    rig.call(chat(f"{after}\n{STABLE}", *LATER))
    (broken,) = rig.breaks
    assert (broken.kind, broken.place, broken.role, broken.within) == (name.strip(), "messages[0]", "system", True)
    assert 0 <= broken.offset <= len(before)
    stable_tokens = len(STABLE) // 4
    assert stable_tokens - 10 <= broken.lost_tokens <= stable_tokens + 20, "the user's words too"

    found = report(rig.rows)
    (finding,), (proposal,) = found.findings, found.proposals
    assert finding.proposals == (0,)
    mended = DiagnosisRig(tmp_path / "mended", **fix_of(policy_line(proposal)))
    mended.call(chat(f"{before}\n{STABLE}"))
    mended.call(chat(f"{after}\n{STABLE}", *LATER))
    assert [b for b in mended.breaks if b.role == "system"] == []


def fix_of(line: str) -> Any:
    """A policy line, parsed as the gateway parses it."""
    return yaml.safe_load(line)


def test_text_that_differs_between_conversations_moves_to_the_systems_end(rig: DiagnosisRig) -> None:
    for folder, user in (("/home/ada/shop", "one"), ("/home/ada/bank", "two")):
        rig.call(chat(f"Working directory: {folder}\n{STABLE}", user=user))
    found = report(rig.rows)
    assert [finding.kind for finding in found.findings] == ["cwd"]
    assert [proposal.opt_in for proposal in found.proposals] == [("volatile_to_end",)]


def test_the_order_of_tools_and_of_keys(rig: DiagnosisRig) -> None:
    rig.call(chat(tools=[tool("f"), tool("g")]), key="a")
    rig.call(chat(tools=[tool("g"), tool("f")]), key="a")
    off = DiagnosisRig(rig.folder, canonicalise={"level": "off"})
    off.call(chat(tools=[tool("f"), tool("g")]), key="b", tenant="u")
    off.call(chat(tools=[tool("f", reverse=True), tool("g")]), key="b", tenant="u")
    assert [(b.kind, b.place) for b in rig.breaks] == [("tool_order", "tools[0]"), ("key_order", "tools[0]")]
    assert all(b.lost_tokens > len(STABLE) // 4 for b in rig.breaks)
    proposals = {p.tenant: (p.level, p.opt_in) for p in report(rig.rows).proposals}
    assert proposals == {"t": ("full", ("tool_order",)), "u": ("safe", ())}


def test_the_order_of_keys_is_fixed_by_default(rig: DiagnosisRig) -> None:
    rig.call(chat(tools=[tool("f"), tool("g")]))
    rig.call(chat(tools=[tool("f", reverse=True), tool("g")]))
    assert rig.breaks == []


def test_a_clock_in_a_tools_description(rig: DiagnosisRig) -> None:
    for time in ("09:41", "09:42"):
        rig.call(chat(tools=[tool("f", words=f"It is {time} now. "), tool("g")]))
    (broken,) = rig.breaks
    assert (broken.kind, broken.place) == ("clock", "tools[0]")


def test_a_changed_set_of_tools(rig: DiagnosisRig) -> None:
    rig.call(chat(tools=[tool("f"), tool("g")]))
    rig.call(chat(tools=[tool("f"), tool("e"), tool("g")]))
    (broken,) = rig.breaks
    assert (broken.kind, broken.place) == ("tool_set", "tools[1]")


def history(**answer: Any) -> list[Any]:
    said = {"role": "assistant", "content": "Where to? " * 40, **answer}
    return [said, {"role": "user", "content": "Home. " * 50}, *LATER]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"reasoning_content": "They want to fly."}, {}),
        ({"reasoning": "They want to fly."}, {}),
        ({"content": "<think>They want to fly.</think>\n\n" + "Where to? " * 40}, {}),
    ],
)
def test_reasoning_that_was_dropped(rig: DiagnosisRig, before: Any, after: Any) -> None:
    rig.call(chat(STABLE, *history(**before)[:2]))
    rig.call(chat(STABLE, *history(**after)))
    (broken,) = rig.breaks
    assert (broken.kind, broken.place) == ("dropped_reasoning", "messages[2]")


def test_generated_reasoning_that_was_not_returned(rig: DiagnosisRig) -> None:
    rig.call(chat(), Usage(input_uncached=500, output=200, reasoning=90, exact=True))
    rig.call(chat(STABLE, *LATER), Usage(input_uncached=120, cache_read=500, exact=True))
    (broken,) = rig.breaks
    assert (broken.kind, broken.place) == ("dropped_reasoning", "messages[2]")


def test_keys_of_a_tools_result(rig: DiagnosisRig) -> None:
    result = {"flights": [{"from": "A", "to": "B", "workers": 1}] * 10}
    turned = {"flights": [{"workers": 1, "to": "B", "from": "A"}] * 10}
    for told in (result, turned):
        answer = {"role": "tool", "tool_call_id": "1", "content": json.dumps(told)}
        rig.call(chat(STABLE, {"role": "assistant", "content": "one moment"}, answer, *LATER))
    (broken,) = rig.breaks
    assert (broken.kind, broken.place, broken.role) == ("key_order", "messages[3]", "tool")
    assert report(rig.rows).proposals == []


def test_a_moving_cache_breakpoint_is_no_break(rig: DiagnosisRig) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    for now in (mark, {}):
        rig.call(
            chat(
                STABLE,
                {"role": "user", "content": [{"type": "text", "text": "this"}, {**image, **now}]},
                {"role": "assistant", "content": None, "tool_calls": [{**call, **now}]},
                {"role": "tool", "tool_call_id": "1", "content": "seen", **now},
                *LATER,
                tools=[{**tool, **now}],
            )
        )
    assert rig.breaks == []


def test_a_history_that_was_rewritten_or_cut(rig: DiagnosisRig) -> None:
    rig.call(chat(STABLE, *history()), key="a")
    rig.call(chat(STABLE, *history(content="Summary: they want to fly."), *LATER), key="a")
    rig.call(chat(STABLE, *history()), key="b")
    rig.call(chat(STABLE, *history()[2:], *LATER), key="b")
    assert [b.kind for b in rig.breaks] == ["history_rewritten", "history_cut"]


def test_the_billing_line_if_noise_is_not_removed(tmp_path: Path) -> None:
    rig = DiagnosisRig(tmp_path, canonicalise={"level": "off"})
    for cch in ("36ee5", "0aaa9"):
        line = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={cch};"
        rig.call(chat(f"{line}\n{STABLE}"))
    found = report(rig.rows)
    assert [finding.kind for finding in found.findings] == ["noise"]
    assert [policy_line(proposal) for proposal in found.proposals] == [
        "canonicalise: {exceptions: [{tenant: t, model: m, level: safe}]}"
    ]


def test_a_template_that_prints_the_date(rig: DiagnosisRig) -> None:
    warm, cold = (Usage(input_uncached=10, cache_read=500, exact=True), Usage(input_uncached=620, exact=True))
    rig.call(chat(), Usage(input_uncached=505, exact=True))
    rig.call(chat(STABLE, *LATER), warm)
    rig.now_ns += 86400 * 10**9
    rig.call(chat(STABLE, *LATER, *LATER), cold)
    (broken,) = rig.breaks
    assert (broken.kind, broken.place) == ("template_date", "")
    assert [proposal.template_date for proposal in report(rig.rows).proposals] == ["26 Jul 2024"]


def test_an_evicted_prefix(rig: DiagnosisRig) -> None:
    rig.call(chat(), Usage(input_uncached=505, exact=True))
    rig.call(chat(STABLE, *LATER), Usage(input_uncached=620, exact=True))
    rig.call(chat(STABLE, *LATER, *LATER), Usage(input_uncached=700, exact=True), deployment="b")
    assert [b.kind for b in rig.breaks] == ["evicted"], "another deployment had nothing to forget"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (chat(), chat(STABLE, *LATER)),
        (chat(), chat()),
        (chat(STABLE, *LATER), chat()),
        (chat(user="one"), chat(user="two")),
        (chat("You are A."), chat("You are B.")),
        (chat(user="It is 09:41. Go."), chat(user="It is 09:42. Go.")),
    ],
)
def test_differences_that_are_no_break(rig: DiagnosisRig, first: Any, second: Any) -> None:
    rig.call(first)
    rig.call(second)
    assert rig.breaks == []


def test_calls_are_compared_within_one_application(rig: DiagnosisRig) -> None:
    who: list[dict[str, Any]] = [{}, {"key": "other"}, {"tenant": "u"}, {"agent": b"Other/1"}]
    for minute, application in enumerate(who):
        rig.call(chat(f"Current time: 09:4{minute}\n{STABLE}"), **application)
    assert rig.breaks == []
    assert len({row.parts[1].digest for row in rig.rows}) == 2, "digests are salted by tenant"


def test_the_turn_before_is_found_among_many_conversations(rig: DiagnosisRig) -> None:
    for n in range(50):
        rig.call(chat(f"Current time: 09:00\n{STABLE}", user=f"conversation {n}"))
    rig.call(chat(f"Current time: 09:01\n{STABLE}", *LATER, user="conversation 7"))
    (broken,) = rig.breaks
    assert broken.within


def test_lost_tokens_are_priced_and_timed(rig: DiagnosisRig) -> None:
    """At most what was computed; timed by a stream's first chunk, otherwise by the policy's prefill rate."""
    usage = Usage(input_uncached=200, cache_read=300, exact=True)
    for stream in (False, True):
        for minute in range(2):
            rig.call(chat(f"Current time: 09:4{minute}\n{STABLE}", stream=stream), usage, key=str(stream))
    rows = [row for row in rig.rows if row.broken]
    assert [row.broken.lost_tokens for row in rows if row.broken][:1] == [200]
    assert rows[0].lost_cost == "0.00018"
    assert rows[0].currency == "USD"
    assert rows[0].lost_seconds == 0.2
    assert rows[-1].lost_seconds == 1.0


def test_no_text_of_a_prompt_is_written(rig: DiagnosisRig) -> None:
    for time in ("09:41", "09:42"):
        rig.call(chat(f"Current time: {time}\n{STABLE}", tools=[tool("lookup")], user="my secret"))
    (written,) = (file.read_text() for file in rig.folder.rglob("*.jsonl"))
    for word in ("secret", "airline", "09:4", "lookup", "Current"):
        assert word not in written


def test_text_around_a_break_is_written_if_the_policy_says_so(tmp_path: Path) -> None:
    rig = DiagnosisRig(tmp_path, content=True)
    for time in ("09:41", "09:42"):
        rig.call(chat(f"Current time: {time}\n{STABLE}"))
    (broken,) = rig.breaks
    assert ("09:41" in broken.before, "09:42" in broken.after) == (True, True)
    assert max(len(broken.before), len(broken.after)) <= 120


def test_without_sampling_nothing_is_recorded(tmp_path: Path) -> None:
    rig = DiagnosisRig(tmp_path / "off", sample=0.0)
    rig.call(chat())
    assert not rig.folder.exists()
    assert not rig.watcher._outlines


def test_sampling_selects_whole_conversations(tmp_path: Path) -> None:
    rig = DiagnosisRig(tmp_path, sample=0.25)
    for n in range(200):
        rig.call(chat(user=f"conversation {n}"))
        rig.call(chat(STABLE, *LATER, user=f"conversation {n}"))
    assert 60 <= len(rig.rows) <= 140
    assert len(rig.rows) % 2 == 0
    assert report(rig.rows).calls == len(rig.rows) * 4
