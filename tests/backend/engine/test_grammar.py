"""Structured output: it parses and validates whatever the model prefers, and does not depend on the batch."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from backend.engine import grammar, grammar_worker
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.grammar import GrammarCompiler, GrammarError, GrammarsExhausted
from backend.engine.masks import MaskCollector
from backend.engine.outputs import FinishReason
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from tests.backend.checkpoints import VOCAB_SIZE

EOS = 2
PROMPT = [7, 99, 13, 7]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{4}$"}},
            "additionalProperties": False,
        }
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per byte, as many as fit beside the special tokens, so that a random model can generate any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE({"<pad>": 0, "<s>": 1, "</s>": EOS} | {c: i for i, c in enumerate(alphabet[:253], 3)}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<s>", "</s>"])
    return made


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_str(), VOCAB_SIZE, [EOS])


@pytest.fixture
def load(checkpoint_dir: Callable[[str], Path]) -> Callable[..., Engine]:
    def load(**options: Any) -> Engine:
        defaults: dict[str, Any] = {"num_blocks": 400, "block_size": 4, "num_threads": 1, "max_num_seqs": 8}
        return Engine.load(EngineConfig(model_dir=checkpoint_dir("llama"), **(defaults | options)))

    return load


def make_request(
    name: str, compiler: GrammarCompiler, source: str | None, seed: int = 0, max_tokens: int = 200, **sampling: Any
) -> Request:
    wanted = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=frozenset({EOS}), **sampling)
    return Request(name, list(PROMPT), wanted, grammar=compiler.compile(source).start() if source else None)


def run(engine: Engine, requests: list[Request]) -> list[Request]:
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    return requests


def text_of(tokenizer: Tokenizer, request: Request) -> str:
    assert request.finish_reason is FinishReason.STOP
    return str(tokenizer.decode(request.token_ids[len(PROMPT) : -1]))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_json_follows_its_schema(
    load: Callable[..., Engine], compiler: GrammarCompiler, tokenizer: Tokenizer, temperature: float
) -> None:
    source = grammar.json_schema(PERSON)
    requests = [make_request(f"r{i}", compiler, source, seed=i, temperature=temperature) for i in range(8)]
    texts = [text_of(tokenizer, request) for request in run(load(), requests)]
    for text in texts:
        jsonschema_rs.validate(PERSON, json.loads(text))
    assert len(set(texts)) == 1 if temperature == 0.0 else len(set(texts)) > 3


def test_tokens_do_not_depend_on_the_batch_on_chunks_or_on_preemption(
    load: Callable[..., Engine], compiler: GrammarCompiler
) -> None:
    sources = [grammar.json_schema(PERSON), None, grammar.regex("[a-f]{12}(xy)+"), grammar.json_schema(PERSON), None]

    def requests() -> list[Request]:
        return [
            make_request(f"r{i}", compiler, source, seed=i, max_tokens=60, repetition_penalty=1.1)
            for i, source in enumerate(sources)
        ]

    alone = [run(load(), [request])[0].token_ids for request in requests()]
    cramped = load(num_blocks=80, block_size=1)
    for engine in (load(), load(max_num_batched_tokens=8, enable_prefix_caching=False), cramped):
        assert [request.token_ids for request in run(engine, requests())] == alone
    assert cramped.stats().preemptions_total > 2


def test_a_regular_expression_and_a_lark_grammar(
    load: Callable[..., Engine], compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    pattern = r"(?:yes|no), [0-9]{2,4}!"
    sums = 'start: term ("+" term){1,3}\nterm: /[0-9]/ | "(" /[0-9]/ "*" /[0-9]/ ")"\n'
    by_regex, by_lark = run(
        load(),
        [
            make_request("r", compiler, grammar.regex(pattern)),
            make_request("l", compiler, grammar.lark(sums), temperature=0.5, seed=3, max_tokens=400),
        ],
    )
    assert re.fullmatch(pattern, text_of(tokenizer, by_regex))
    assert re.fullmatch(r"(?:\d|\(\d\*\d\))(?:\+(?:\d|\(\d\*\d\))){1,3}", text_of(tokenizer, by_lark))


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer"},
            {"type": "string", "maxLength": 3},
            {"enum": ["x", 1, None]},
            {"type": "number", "minimum": 0, "maximum": 9},
        ]
    ),
    lambda inner: (
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3))
        | st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": [name for name in properties if name in required],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b c", "é"]), inner, max_size=3),
            st.sets(st.sampled_from(["a", "b c", "é"])),
        )
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=5,
)


@settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_random_output_within_the_masks_validates(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], seed: int
) -> None:
    """Without a model: tokens are drawn uniformly from those that the mask allows."""
    rng = random.Random(seed)
    matcher = compiler.compile(grammar.json_schema(schema)).start()
    request = Request("r", [0], SamplingParams(max_tokens=1), grammar=matcher)
    masks = MaskCollector(VOCAB_SIZE, torch.device("cpu"))
    tokens: list[int] = []
    while True:
        assert matcher.is_ready(60)
        filled = masks.collect([request])
        assert filled is not None
        assert filled.errors == {}
        words = filled.bitmask[0].tolist()
        allowed = [token for token in range(VOCAB_SIZE) if words[token // 32] >> (token % 32) & 1]
        token = EOS if EOS in allowed else rng.choice(allowed)
        if token == EOS:
            break
        matcher.accept(token)
        tokens.append(token)
    jsonschema_rs.validate(schema, json.loads(tokenizer.decode(tokens)))


@pytest.mark.parametrize(
    "source",
    [
        grammar.json_schema({"type": "no such type"}),
        grammar.json_schema({"$ref": "#/nowhere"}),
        grammar.json_schema({"contains": {"type": "integer"}}),  # an unsupported keyword must not be ignored silently
        grammar.regex("(a"),
        grammar.lark("start: nothing"),
    ],
)
def test_a_grammar_that_cannot_be_enforced_is_rejected(compiler: GrammarCompiler, source: str) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(source)


def test_a_failing_grammar_ends_only_its_own_request(load: Callable[..., Engine], compiler: GrammarCompiler) -> None:
    class Broken:
        error = "too complex"
        forced: tuple[int, ...] = ()

        def is_ready(self, seconds: float = 0.0) -> bool:
            return True

        def fill_mask(self, address: int, num_bytes: int) -> str:
            return self.error

        def accept(self, token_id: int) -> None:
            raise AssertionError("nothing was allowed")

    engine = load()
    broken = make_request("broken", compiler, None)
    broken.grammar = Broken()
    other = make_request("other", compiler, grammar.regex("[a-c]{3}"))
    engine.add(broken)
    engine.add(other)
    (failed,) = (output for output in engine.step() if output.finish_reason)
    assert (failed.request_id, failed.finish_reason, failed.error) == ("broken", FinishReason.ERROR, "too complex")
    while engine.has_unfinished:
        engine.step()
    assert other.finish_reason is FinishReason.STOP


class Delayed:
    """A grammar whose masks come only when the test says so."""

    error = ""
    forced: tuple[int, ...] = ()

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.matcher = compiler.compile(grammar.regex("[a-c]{3}")).start()
        self.is_released = True

    def is_ready(self, seconds: float = 0.0) -> bool:
        return self.is_released and self.matcher.is_ready(60)

    def fill_mask(self, address: int, num_bytes: int) -> str:
        assert self.is_released
        return self.matcher.fill_mask(address, num_bytes)

    def accept(self, token_id: int) -> None:
        self.is_released = False
        self.matcher.accept(token_id)


def test_a_late_mask_delays_only_its_own_request(load: Callable[..., Engine], compiler: GrammarCompiler) -> None:
    (expected,) = run(load(), [make_request("r", compiler, grammar.regex("[a-c]{3}"))])
    engine = load()
    late = make_request("late", compiler, None)
    delayed = Delayed(compiler)
    late.grammar = delayed
    other = make_request("other", compiler, None, max_tokens=30)
    engine.add(late)
    engine.add(other)
    engine.step()  # the first masks are known
    assert (late.num_output_tokens, other.num_output_tokens) == (1, 1)
    engine.step()  # computed, but no token could be sampled
    assert (late.num_output_tokens, late.mask_is_late, other.num_output_tokens) == (1, True, 2)
    engine.step()  # not in the plan
    assert (late.num_computed_tokens, other.num_output_tokens) == (len(PROMPT), 3)
    while engine.has_unfinished:
        delayed.is_released = True
        engine.step()
    assert late.token_ids == expected.token_ids


def test_an_engine_whose_requests_all_wait_for_masks(load: Callable[..., Engine], compiler: GrammarCompiler) -> None:
    engine = load()
    late = make_request("late", compiler, None)
    delayed = late.grammar = Delayed(compiler)
    engine.add(late)
    engine.step()
    engine.step()
    launches: list[str] = []
    assert engine.step(lambda: launches.append("outputs of the previous step are handed out")) == []
    assert launches
    delayed.is_released = True
    assert engine.step()


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
