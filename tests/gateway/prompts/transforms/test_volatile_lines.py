"""Volatile lines of system prompts: `volatile_to_end` and `volatile_to_user`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.prompts.transforms.forms import canonical_form, system

CLOCKED = "You are X.\nCurrent time: {}\nBe brief. Refund what was booked before 2024-05-16."


def test_volatile_lines_move_behind_stable_ones() -> None:
    assert system(CLOCKED.format("09:41:07"), "volatile_to_end") == (
        "You are X.\nBe brief. Refund what was booked before 2024-05-16.\nCurrent time: 09:41:07"
    )
    part = {"type": "text", "text": "Today is Friday, 20 November 2026"}
    rest = {"type": "text", "text": "You are X."}
    assert system([part, rest], "volatile_to_end") == [rest, part]


def test_a_sentence_moves_out_of_its_line() -> None:
    prose = "You are X. Today is Friday, 20 November 2026. Ask Mr. Smith about dates. Be brief."
    assert system(prose, "volatile_to_end") == (
        "You are X. Ask Mr. Smith about dates. Be brief.\nToday is Friday, 20 November 2026."
    )


def test_a_tag_moves_from_the_beginning() -> None:
    for tag in ("[3f2a9c1e]", "[session 3f2a9c1e]", "[2026-11-20T09:41:07Z]", "[req_8f3a2b1c9d]"):
        assert system(f"{tag} You are X.\nBe brief.", "volatile_to_end") == f"You are X.\nBe brief.\n{tag}"


def test_marks_move_only_from_the_beginning() -> None:
    """Elsewhere they may be entries of a list."""
    for text in ("Holidays:\n2026-12-25\n2026-12-26", "See [3f2a9c1e] for it.\n[3f2a9c1e] is a commit."):
        assert system(text, "volatile_to_end") == text
    assert system("\n[3f2a9c1e]\n1763631667\nYou are X.", "volatile_to_end") == "\nYou are X.\n[3f2a9c1e]\n1763631667"


def test_a_clock_moves_to_the_last_user_message() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": CLOCKED.format("2026-11-20T09:41:07Z")},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    told = canonical_form({"messages": messages}, "volatile_to_user")["messages"]
    assert told[0]["content"] == "You are X.\nBe brief. Refund what was booked before 2024-05-16."
    assert told[3]["content"] == [
        messages[3]["content"][0], {"type": "text", "text": "Current time: 2026-11-20T09:41:07Z"}
    ]  # fmt: skip
    assert [*told[1:3], told[4]] == [*messages[1:3], messages[4]]


def test_lines_never_move_backwards() -> None:
    clock = {"role": "system", "content": CLOCKED.format("2026-11-20T09:41:07Z")}
    marked = {"role": "user", "content": "go", "cache_control": {"type": "ephemeral"}}
    hello = {"role": "user", "content": "hi"}
    for messages in ([clock, hello, marked], [hello, clock, marked], [hello, clock]):
        assert canonical_form({"messages": messages}, "volatile_to_user")["messages"] == messages


@pytest.mark.parametrize(
    "line",
    [
        "Working directory: /home/ada/x",
        "cwd=C:\\Users\\ada",
        "Today's date is 11/20/2026.",
        "<current_datetime>2026-11-20 09:41</current_datetime>",
        "Session: 3f2a9c1e-7b54-4d2e-9d0a-0f6f2c1b7a11",
        "Request id: req_8f3a2b1c9d",
        "The current time is 2024-05-15 15:00:00 EST.",
        "timestamp: 1763631667",
        "epoch=1763631667.25",
        "It is Friday, the 20th of November 2026.",
        "It's November 20, 2026.",
        "Today is the twentieth of November.",
        "Today is November 20th.",
        "now: 1763631667123456789",
        "Run (3f2a9c1e)",
        "As of Nov. 20th, 2026, you are on duty.",
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-request-id: 5f2b7c1a-9f3e-4c55-8d0e-1c2d3e4f5a6b",
        "[1763631667]",
        "[3f2a9c1e]",
        "2026-11-20 09:41",
    ],
)
def test_volatile_lines(line: str) -> None:
    assert system(f"{line}\nYou are X.", "volatile_to_end") == f"You are X.\n{line}"


@pytest.mark.parametrize(
    "line",
    [
        "Refund what was booked before 2024-05-16.",
        "Python 3.11 has a time module, and /v1/chat is no folder.",
        "Flights leave at 09:15 from gate 4.",
        "The id of a user is a name and a number, as in mia_li_3668.",
        "Update the record sometimes.",
        "current " * 30 + "2026-11-20",
        "It is important that the flight was booked before 2024-05-16.",
        "It is 3 days before 2024-05-16.",
        "Written on the 20th of November.",
        "In May 5 people may fly.",
        "Agent #a3f9c21b",
        "The current budget of Marketing 20 is spent.",
        "Friday",
        "[1]",
        "[draft] You write letters.",
        "/home/ada/project",
    ],
)
def test_lines_that_are_not_volatile(line: str) -> None:
    assert system(f"{line}\nYou are X.", "volatile_to_end") == f"{line}\nYou are X."
