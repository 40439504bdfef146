"""Reading recorded traffic, and generating it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.simulator import generate
from gateway.simulator.traces import THINK_MAX_SECONDS, TraceError, TrafficTrace, read_trace, staggered


def write_trace(directory: Path, *rows: object) -> Path:
    path = directory / "trace.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_conversation_trace_is_an_open_loop_of_chains(tmp_path: Path) -> None:
    rows = (
        {"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 3]},
        {"timestamp": 1000, "input_length": 1024, "output_length": 7, "hash_ids": [0, 2]},
    )
    trace = read_trace(write_trace(tmp_path, *rows))
    assert not trace.closed_loop
    assert [session.starts_at_seconds for session in trace.sessions] == [1.0, 2.0]
    one, other = (session.requests[0].chain for session in trace.sessions)
    assert (len(one), len(other)) == (1024 // BLOCK_TOKENS, 1100 // BLOCK_TOKENS)
    shared = 512 // BLOCK_TOKENS
    assert one[:shared] == other[:shared] and not set(one[shared:]) & set(other[shared:])


def test_sessions_of_agents_share_no_blocks(tmp_path: Path) -> None:
    rows = (
        {"s": "a", "in": 200, "out": 5, "think": 0, "rl": [[1, 3]]},
        {"s": "b", "in": 200, "out": 5, "think": 0, "rl": [[1, 3]]},
        {"s": "a", "in": 330, "out": 5, "think": 900, "rl": [[1, 3], [7, 2]]},
    )
    trace = read_trace(write_trace(tmp_path, *rows))
    assert trace.closed_loop
    a, b = trace.sessions
    first, second = (request.chain for request in a.requests)
    assert second[:3] == first and len(second) == 5
    assert not set(b.requests[0].chain) & set(second)
    begun = staggered(trace, seed=1, max_requests=2, urgent_every=2)
    assert sorted(session.urgent for session in begun.sessions) == [False, True]
    assert max(r.after_seconds for session in begun.sessions for r in session.requests) == THINK_MAX_SECONDS


def test_chats_have_one_request_for_each_answer(tmp_path: Path) -> None:
    rules = {"role": "system", "content": "Be brief. " * 100}
    why, more = ({"role": "user", "content": words * 100} for words in ("Why? ", "And? "))
    so = {"role": "assistant", "content": "So. " * 50}
    calls: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
    path = tmp_path / "chats.json"
    path.write_text(
        json.dumps([{"traj": [rules, why, so, more, calls]}, {"messages": [rules, more, so]}, {"traj": [rules]}])
    )
    trace = read_trace(path)
    assert trace.closed_loop and trace.name == "chats"
    one, other = trace.sessions
    first, second = one.requests
    assert second.chain[: len(first.chain)] == first.chain and len(second.chain) > len(first.chain)
    assert [first.prompt_tokens, second.prompt_tokens] == [pytest.approx(375, abs=10), pytest.approx(550, abs=10)]
    assert first.output_tokens == pytest.approx(50, abs=5)
    shared = 1000 // 4 // BLOCK_TOKENS
    (exact,) = other.requests
    assert exact.chain[:shared] == first.chain[:shared] and not set(exact.chain[shared:]) & set(second.chain)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[", "chats.json: not JSON"),
        ("[3]", "chats.json: session 0: a list of messages is needed under traj or messages"),
        ('[{"traj": [{"content": "x"}]}]', r"chats.json: session 0: messages\[0\].role"),
        ("[]", "it contains no assistant message"),
    ],
)
def test_malformed_chats_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "chats.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=problem):
        read_trace(path)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "trace.jsonl:2: not JSON"),
        ("3", "trace.jsonl:2: not a JSON object"),
        ({"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": [1]}, "2: input_length: a whole number"),
        ({"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": ["x"]}, "2: hash_ids: a list of whole"),
    ],
)
def test_a_malformed_row_is_refused_with_its_line(tmp_path: Path, row: object, problem: str) -> None:
    good = {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}
    with pytest.raises(TraceError, match=problem):
        read_trace(write_trace(tmp_path, good, row))


def test_a_malformed_session_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace.jsonl:1: rl: a list of \[first, count\]"):
        read_trace(write_trace(tmp_path, {"s": "a", "in": 1, "out": 1, "rl": "all"}))
    with pytest.raises(TraceError, match="the trace is empty"):
        read_trace(write_trace(tmp_path))


@pytest.mark.parametrize(
    "made", [lambda seed: generate.conversation(seed, chats=50), lambda seed: generate.agents(seed, sessions=20)]
)
def test_generated_traffic_depends_on_the_seed_only(made: Callable[[int], TrafficTrace]) -> None:
    assert made(7) == made(7) != made(8)
    for session in made(7).sessions:
        for request in session.requests:
            assert len(request.chain) == len(set(request.chain)) == request.prompt_tokens // BLOCK_TOKENS
