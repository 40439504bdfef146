"""What changes between two prompts is recognised by its form, or called text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gateway.diagnosis import report
from tests.gateway.diagnosis.test_breaks import LATER, STABLE, DiagnosisRig, chat, tool

GIT = """gitStatus: This is the state of the repository at the start. It is not updated.
Current branch: main

Status:
{}

Recent commits:
{}"""
MEMORIES = """<memories>
The user's memories, newest first:
- likes window tables
- {}
- lives in Ghent
</memories>"""
CHUNKS = ["Refunds take a week.\nAsk first.", "Bags are paid.\nPets fly too.", "Delays are ours.\nCall us."]
EXAMPLES = ["Q: May I fly?\nA: Yes.", "Q: May I smoke?\nA: No.", "Q: May I sing?\nA: If you must."]


def blocks(texts: list[str], form: str = "{}") -> tuple[str, str]:
    """The texts in two orders."""
    one, two, three = (form.format(text, n=n) for n, text in enumerate(texts))
    return "\n\n".join((one, two, three)), "\n\n".join((three, one, two))


SYSTEM_TEXTS: dict[str, tuple[str, tuple[str, str]]] = {
    "epoch seconds": ("clock", ("build 1763631667 runs", "build 1763631802 runs")),
    "epoch nanoseconds in a word": ("clock", ("at1763631667123456789x", "at1763631802123456789x")),
    "an id in brackets": ("request_id", ("[a3f9c21b] Agent", "[77b0c21b] Agent")),
    "an id behind a sign": ("request_id", ("Agent #a3f9c21b", "Agent #77b0c21b")),
    "a date in prose": ("date", ("Written on the 20th of November.", "Written on the 21st of November.")),
    "a date in words": ("date", ("Since the twentieth of November", "Since the third of December")),
    "a date without a year": ("date", ("In force from Nov 20th on.", "In force from Nov 21st on.")),
    "changed files": ("git_status", (GIT.format("M a.py", "1a2b3c4 fix"), GIT.format("M b.py", "1a2b3c4 fix"))),
    "a commit": ("git_status", (GIT.format("M a.py", "1a2b3c4 fix"), GIT.format("M a.py", "9f8e7d6 tidy"))),
    "git's own words": ("git_status", ("On branch main\nnothing to commit", "On branch main\nmodified: a.py")),
    "a memory": ("memory", (MEMORIES.format("flies often"), MEMORIES.format("flies rarely"))),
    "a memory with a date": ("memory", (MEMORIES.format("paid 2026-11-20"), MEMORIES.format("paid 2026-11-21"))),
    "memories under a heading": ("memory", ("## User memory\n- eats fish", "## User memory\n- eats bread")),
    "memories in another order": ("memory", ("# Memory\n- a b\n- c d\n- e f", "# Memory\n- c d\n- e f\n- a b")),
    "chunks in another order": ("chunk_order", blocks(CHUNKS, "<document id='{n}'>{}</document>")),
    "chunks on one line": ("chunk_order", ("<doc id='1'>a</doc><doc id='2'>bc</doc>",
                                           "<doc id='2'>bc</doc><doc id='1'>a</doc>")),
    "unmarked chunks in another order": ("chunk_order", blocks(CHUNKS, "[source {n}] {}")),
    "examples in another order": ("example_order", blocks(EXAMPLES)),
    "a clock behind memories": ("clock", (MEMORIES.format("x") + "\nCurrent time: 09:41",
                                          MEMORIES.format("x") + "\nCurrent time: 09:42")),
    "a clock within a section": ("clock", ("# Memory\nThe time is now 09:41", "# Memory\nThe time is now 09:42")),
    "words": ("text", ("You are Ada.", "You are Grace.")),
    "another chunk": ("text", ("\n\n".join(CHUNKS[:2]), "\n\n".join(CHUNKS[1:]))),
    "a number": ("text", ("Flights left: 12", "Flights left: 14")),
    "words under another heading": ("text", ("# Memory\n- a\n# Rules\nBe kind.", "# Memory\n- a\n# Rules\nBe brief.")),
}  # fmt: skip


@pytest.mark.parametrize("name", SYSTEM_TEXTS)
def test_the_kind_of_what_changes_in_a_system_prompt(tmp_path: Path, name: str) -> None:
    kind, (before, after) = SYSTEM_TEXTS[name]
    rig = DiagnosisRig(tmp_path)
    rig.call(chat(f"{before}\n{STABLE}"))
    rig.call(chat(f"{after}\n{STABLE}", *LATER))
    assert [(b.kind, b.place) for b in rig.breaks] == [(kind, "messages[0]")]
    (finding,) = report(rig.rows).findings
    assert finding.advice or finding.proposals


UNMOVED = [
    "epoch seconds", "an id behind a sign", "a date in prose", "changed files", "a memory", "examples in another order",
    "unmarked chunks in another order", "words",
]  # fmt: skip


@pytest.mark.parametrize("name", UNMOVED)
def test_what_no_transform_moves_gets_advice_and_no_proposal(tmp_path: Path, name: str) -> None:
    rig = DiagnosisRig(tmp_path)
    for minute in range(4):
        rig.call(chat(f"{SYSTEM_TEXTS[name][1][minute % 2]}\n{STABLE}", *LATER * minute))
    found = report(rig.rows)
    assert found.proposals == []
    assert all(finding.advice for finding in found.findings)


def test_marked_chunks_in_another_order_are_put_into_one(tmp_path: Path) -> None:
    """Found among calls about other chunks, since the same lines are recognised in any order."""
    rig = DiagnosisRig(tmp_path)
    texts = [f"<document id='{n}'>{text * 20}</document>" for n, text in enumerate(CHUNKS)]
    for n, order in enumerate([(0, 1, 2), (2, 0, 1), (1, 2, 0)]):
        rig.call(chat(user="\n".join(texts[i] for i in order) + f"\nQuestion {n}?"))
        rig.call(chat(user=f"something else {n}"))
    assert {b.kind for b in rig.breaks} == {"chunk_order"}
    found = report(rig.rows)
    assert [proposal.opt_in for proposal in found.proposals] == [("chunk_order",)]
    assert [finding.proposals for finding in found.findings] == [(0,)]


def test_examples_as_messages_in_another_order(tmp_path: Path) -> None:
    rig = DiagnosisRig(tmp_path)
    pairs = [
        [{"role": "user", "content": f"May I {verb}?" * 9}, {"role": "assistant", "content": f"You may {verb}." * 9}]
        for verb in ("fly", "smoke", "sing")
    ]
    for order in ((0, 1, 2), (2, 0, 1)):
        examples = [message for i in order for message in pairs[i]]
        system = {"role": "system", "content": STABLE}
        rig.call({"model": "m", "messages": [system, *examples, {"role": "user", "content": "And now?"}]})
    (broken,) = rig.breaks
    assert broken.kind == "example_order"
    assert broken.lost_tokens > 6 * 20


def test_a_date_in_a_tools_description(tmp_path: Path) -> None:
    rig = DiagnosisRig(tmp_path)
    for day in (20, 21):
        rig.call(chat(tools=[tool("f", words=f"Searches flights. Today is 2026-11-{day}. "), tool("g")]))
    found = report(rig.rows)
    assert [(f.kind, f.place, f.proposals) for f in found.findings] == [("date", "tools", ())]
    assert "descriptions of tools" in found.findings[0].advice


@pytest.mark.parametrize("text", ["#" * 20_000, "<doc id='1'>" * 2000, "Memory:\n" * 3000, "- [2026-11-20] x\n" * 3000])
def test_long_texts_of_one_form_take_no_longer_than_they_are_long(tmp_path: Path, text: str) -> None:
    rig = DiagnosisRig(tmp_path)
    for number in "12":
        rig.call(chat(f"{text}{number}\n{STABLE}"))
    assert len(rig.breaks) == 1


def test_no_text_is_in_the_journal(tmp_path: Path) -> None:
    rig = DiagnosisRig(tmp_path)
    bodies: list[Any] = [chat(f"{before}\n{STABLE}") for _, pair in SYSTEM_TEXTS.values() for before in pair]
    for body in bodies:
        rig.call(body)
    (written,) = (file.read_text() for file in rig.folder.rglob("*.jsonl"))
    words = {
        word for body in bodies for message in body["messages"] for word in re.findall(r"\w{8,}", message["content"])
    }
    assert len(words) > 10
    assert [word for word in words if word in written] == []
