"""Compiling grammars: budgets, tenants' shares, and the processes that compile and follow them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from backend.engine import grammar, grammar_worker
from backend.engine.grammar import GrammarCompiler, GrammarError, GrammarsExhausted
from tests.backend.checkpoints import VOCAB_SIZE
from tests.backend.engine.byte_tokenizer import EOS, compiler, tokenizer

__all__ = ["compiler", "tokenizer"]  # fixtures

HOSTILE = {
    "nested repetitions": (grammar.regex("(z{2000}){2000}"), "memory|expressions"),
    "a row of alternatives": (grammar.lark("start: " + " | ".join(f"/x{i}.*/" for i in range(5000))), "max is 2000"),
    "recursion without an end": (grammar.lark("start: start"), "no text satisfies it"),
    "GBNF without an end": (grammar.lark("root ::= root"), "no text satisfies it"),
    "a loop of references": (
        grammar.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        "no text satisfies it",
    ),
    "doubling rules": (
        grammar.lark("start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(30)) + '\nr30: "a"'),
        "Too many items",
    ),
    "deep parentheses": (grammar.lark("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), "nested too deeply"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_by_the_budget_that_it_exceeds(compiler: GrammarCompiler, name: str) -> None:
    source, problem = HOSTILE[name]
    with pytest.raises(GrammarError, match=problem):
        compiler.compile(source)
    assert compiler.compile(grammar.regex("[a-c]{3}")).start().is_ready()


@pytest.mark.slow
def test_a_grammar_over_its_cpu_time_ends_alone(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    other = compiler.compile(grammar.regex("[a-c]{3}")).start()
    patterns = {f"^(a|b)*{i}(a|b){{12}}$": {"type": "string"} for i in range(2000)}
    with pytest.raises(GrammarError, match="2 seconds of CPU time for compiling"):
        compiler.compile(grammar.json_schema({"type": "object", "patternProperties": patterns}))
    assert other.is_ready(60)
    assert not other.error


def test_a_grammar_whose_process_ends_fails_only_its_own_sequences(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(grammar.regex("[x-z]{3}"))
    ended, other = compiled.start(), compiler.compile(grammar.regex("[a-c]{3}")).start()
    os.kill(compiled._process._pid, signal.SIGKILL)
    ended.accept(3 + ord("x") - ord("!"))
    assert ended.is_ready(60)
    assert ended.error == "its process has ended"
    assert other.is_ready(60)
    assert not other.error
    assert compiler.compile(grammar.regex("[x-z]{3}")).start().is_ready(60)  # compiled again


def test_no_step_waits_for_the_end_of_a_process(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    ended_by_kernel = threading.Event()
    reap = compiler._worker.reap
    monkeypatch.setattr(compiler._worker, "reap", lambda pid: (ended_by_kernel.wait(60), reap(pid))[1])
    ended = compiler.compile(grammar.regex("[w-z]{3}")).start()
    os.kill(ended._process._pid, signal.SIGKILL)
    ended.accept(3 + ord("w") - ord("!"))
    assert not ended.is_ready(0.05)
    assert compiler.compile(grammar.regex("[w-z]{3}")).start().is_ready(60)
    ended_by_kernel.set()
    assert ended.is_ready(60)
    assert ended.error == "its process has ended"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads have their own priority on Linux only")
@pytest.mark.skipif(os.nice(0) > 0, reason="this process has a low priority itself")
def test_only_slow_calls_have_a_low_priority(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(grammar.regex("a" * 40_000)).start()  # slow to compile

    def priorities() -> set[int]:
        tasks = Path(f"/proc/{matcher._process._pid}/task")
        return {os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks.iterdir()}

    deadline = time.monotonic() + 300
    while grammar_worker.SLOW_NICE in priorities() and time.monotonic() < deadline:
        time.sleep(0.01)
    usual = priorities()
    assert len(usual) == 1
    while grammar_worker.SLOW_NICE not in priorities() and time.monotonic() < deadline:
        matcher.accept(3 + ord("a") - ord("!"))
        while not matcher.is_ready() and grammar_worker.SLOW_NICE not in priorities():
            pass
    assert not matcher.error
    assert priorities() == {*usual, grammar_worker.SLOW_NICE}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_slow_grammars_take_turns_and_end_with_their_worker(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer.to_str(), VOCAB_SIZE, [EOS])
    assert compiler.compile(grammar.regex("[a-c]{3}")).start().is_ready(60)
    worker = compiler._worker._process
    assert worker is not None

    def states() -> dict[int, str]:
        """The state of each child by its pid: T if it is stopped."""
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        return {int(pid): Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in children}

    slow = grammar.json_schema(
        {"type": "object", "patternProperties": {f"^(a|b)*{i}(a|b){{12}}$": {} for i in range(2000)}}
    )
    with ThreadPoolExecutor(3) as pool:
        failed = [pool.submit(compiler.compile, slow, str(i)) for i in range(3)]
        while list(states().values()).count("T") < 2:
            assert not failed[0].done()
        assert compiler.compile(grammar.regex("c" * 20_000)).start().is_ready(60)  # slow, too, but its turns are first
        assert not any(each.done() for each in failed)
        pids = list(states())
        worker.kill()
        assert all(isinstance(each.exception(60), GrammarError) for each in failed)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    compiler.close()


class Signals:
    """The signals that were sent: a process is stopped if the last one was SIGSTOP."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last: dict[int, int] = {}
        monkeypatch.setattr(os, "kill", lambda pid, number: self.last.update({pid: number}))

    def running(self, pids: Iterable[int]) -> list[int]:
        return [pid for pid in pids if self.last.get(pid) != signal.SIGSTOP]


def test_one_slow_call_runs_at_a_time_and_a_new_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    signals, turns = Signals(monkeypatch), grammar_worker._Turns()
    slow, done = (partial(grammar_worker.TURN.pack, kind) for kind in (grammar_worker.SLOW, grammar_worker.DONE))
    turns._take(slow(1))
    turns._take(slow(2))
    for _ in range(10):
        turns._next()
        assert len(signals.running([1, 2])) == 1
    turns._take(slow(3))
    for _ in range(5):
        turns._next()
        assert signals.running([1, 2, 3]) == [3]  # until it had as many turns
    turns._take(done(3))
    assert len(signals.running([1, 2])) == 1
    turns.remove(1)
    assert signals.running([1, 2, 3]) == [1, 2, 3]
    turns.close()
    assert signals.last == {1: signal.SIGCONT, 2: signal.SIGKILL, 3: signal.SIGCONT}


def test_a_large_grammar_is_refused_with_its_size(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match=f"a grammar may have {grammar.MAX_GRAMMAR_BYTES}"):
        grammar.json_schema({"enum": ["x" * grammar.MAX_GRAMMAR_BYTES]})
    with pytest.raises(GrammarError, match=f"a grammar may have {grammar.MAX_GRAMMAR_BYTES}"):
        compiler.compile(grammar.regex("x" * grammar.MAX_GRAMMAR_BYTES))


def test_a_schema_that_is_not_strict_is_relaxed(compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "contains": {"type": "integer"}}
    relaxed = compiler.compile(grammar.json_schema(schema, strict=False))
    assert list(relaxed.ignored) == ['Unimplemented keys: ["contains"]']
    with pytest.raises(GrammarError, match="contains"):
        compiler.compile(grammar.json_schema(schema))


def test_a_tenants_grammars_are_bounded_and_leave_those_of_others(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MAX_GRAMMARS_PER_SALT", 2)
    compiler = GrammarCompiler(tokenizer.to_str(), VOCAB_SIZE, [EOS])
    kept = compiler.compile(grammar.regex("[a-c]{3}"), "other").start()
    first = compiler.compile(grammar.regex("a{1}"), "one").start()
    for i in range(2, 5):  # no sequence follows these, so that each makes room for the next
        compiler.compile(grammar.regex(f"a{{{i}}}"), "one")
    second = compiler.compile(grammar.regex("a{5}"), "one").start()
    with pytest.raises(GrammarsExhausted, match="2 grammars of your requests"):
        compiler.compile(grammar.regex("a{6}"), "one")
    assert len(compiler._compiled) == 3
    compiler.compile(grammar.regex("a{6}"), "other")
    for matcher in (kept, first, second):
        matcher.accept(3 + ord("a") - ord("!"))
        assert matcher.is_ready(60)
        assert not matcher.error
    compiler.close()


def test_closing_the_compiler_ends_all_processes(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer.to_str(), VOCAB_SIZE, [EOS])
    matcher = compiler.compile(grammar.regex("[a-c]{3}")).start()
    worker = compiler._worker._process
    assert worker is not None
    compiler.close()
    assert worker.returncode is not None
    matcher.accept(3 + ord("a") - ord("!"))
    assert matcher.is_ready(60)
