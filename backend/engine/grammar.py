"""Structured output: JSON schemas, regular expressions and Lark grammars by llguidance, or a set of allowed tokens.

The server compiles a grammar once (`GrammarCompiler`), and every sequence has its own matcher (`GrammarMatcher`). Both
only speak to the grammar's own process (grammar_process.py), in which llguidance runs. The engine itself knows only the
protocols in constraint.py and runs without llguidance.
"""

from __future__ import annotations

import ctypes
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from llguidance import LLMatcher

from backend.engine.grammar_positions import unpack_position
from backend.engine.grammar_process import GrammarError, GrammarProcess, GrammarWorker
from backend.engine.grammar_worker import EITHER_SYNTAX
from backend.engine.tenant_budgets import GrammarsExhausted, TenantBudgets

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarError", "GrammarMatcher", "GrammarsExhausted", "TokenSet"]

MAX_GRAMMARS = 128  # processes; the least recently used that no request needs ends first
MAX_GRAMMARS_PER_SALT = 64
MAX_SALT_KIB = 512 * 1024  # memory of a tenant's grammars, in KiB
MAX_GRAMMAR_BYTES = 512 * 1024  # of one request, as the compiler gets it: some hundred tools
FILL_WAIT_SECONDS = 1.0

# No free whitespace: it only costs tokens, and a model that does not know how to continue can repeat it for ever.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def nested(rules: str, answer: str) -> str:
    """A Lark grammar in which `@answer` stands for another grammar."""
    (inner,) = msgspec.json.decode(answer)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": rules}, {**inner, "name": "answer"}]})


def json_schema(schema: Mapping[str, Any] | bool, *, strict: bool = True) -> str:
    """The grammar of JSON that validates against a schema, with one space after commas and colons and no other.

    Unless `strict`, keywords that cannot be enforced are ignored. Raises GrammarError for a schema that is too large or
    nested too deeply, and for the schema `False`, which no value satisfies.
    """
    if schema is False:
        raise GrammarError("no value satisfies the schema `false`")
    text = schema_text({} if schema is True else schema)
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=json_options(strict=strict))
    except ValueError as error:  # llguidance reads some sixty levels of schemas
        raise GrammarError(str(error)) from error


def json_options(*, strict: bool) -> JsonCompileOptions:
    """How JSON is written, for llguidance."""
    return _JSON_OPTIONS if strict else {**_JSON_OPTIONS, "lenient": True}


def schema_text(schema: Mapping[str, Any]) -> str:
    """A schema as JSON. Raises GrammarError if it is too large or nested too deeply."""
    try:
        text = msgspec.json.encode(schema)  # some milliseconds at most, however large the body is
    except RecursionError as error:
        raise GrammarError("the schema is nested too deeply") from error
    if len(text) > MAX_GRAMMAR_BYTES:
        raise too_large(len(text))
    return text.decode()


def too_large(found: int) -> GrammarError:
    """The error for a grammar over the budget of bytes."""
    return GrammarError(f"it has {found} bytes; a grammar may have {MAX_GRAMMAR_BYTES}")


def json_object() -> str:
    """The grammar of any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """The grammar of text that matches a regular expression as a whole."""
    return LLMatcher.grammar_from_regex(pattern)


def lark(grammar: str) -> str:
    """The grammar of a Lark grammar, or of GBNF, which llama.cpp and xgrammar read."""
    return json.dumps({"grammars": [{EITHER_SYNTAX: grammar}]})


class GrammarCompiler:
    """Compiles grammars for one tokenizer, each in a process of its own, and keeps the processes. Thread-safe.

    Each tenant (`salt`) has its own processes and budgets, so that no other tenant's grammar slows or refuses its own.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`vocab_size` is that of the model, which may be larger than that of the tokenizer."""
        self._worker = GrammarWorker(tokenizer_json, vocab_size, eos_token_ids)
        self._compiled: OrderedDict[tuple[str, str], GrammarProcess] = OrderedDict()  # least recently used first
        self._budgets = TenantBudgets()
        self._lock = threading.Lock()

    def compile(self, grammar: str, salt: str = "", field: str = "grammar") -> CompiledGrammar:
        """Takes milliseconds, or seconds for a large schema. `field` is the request's field, for errors.

        Raises GrammarError for a grammar that cannot be enforced or exceeds a budget, and GrammarsExhausted if the
        tenant's other grammars leave no room.
        """
        key = (salt, grammar)
        with self._lock:
            process = self._compiled.get(key)
            if process is not None and process.is_usable:
                self._compiled.move_to_end(key)
                return CompiledGrammar(process, field)
            self._make_room(salt)
        process = self._compiled_now(grammar, salt)
        with self._lock:
            replaced = self._compiled.pop(key, None)
            self._compiled[key] = process
        if replaced is not None and replaced.is_idle:
            replaced.close()
        return CompiledGrammar(process, field)

    def check(self, grammar: str, salt: str = "") -> None:
        """Compiles a grammar without keeping it. Raises GrammarError or GrammarsExhausted."""
        self._budgets.check(salt)
        self._compiled_now(grammar, salt).close()

    def _compiled_now(self, grammar: str, salt: str) -> GrammarProcess:
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise too_large(len(grammar))
        try:
            return GrammarProcess(self._worker, grammar, low_priority=self._budgets.is_charged(salt))
        except GrammarError as error:
            self._budgets.charge(salt, error.cpu_seconds)
            raise

    def close(self) -> None:
        """Ends all processes. Safe to call twice."""
        self._worker.close()

    def _make_room(self, salt: str) -> None:
        """Ends processes that no request needs, down to the bounds. Raises GrammarsExhausted."""
        own = [process for (owner, _), process in self._compiled.items() if owner == salt]
        for process in own:
            spent, process.slow_seconds = process.slow_seconds, 0.0
            self._budgets.charge(salt, spent)
        self._budgets.check(salt)
        while own and (len(own) >= MAX_GRAMMARS_PER_SALT or sum(p.memory_kib for p in own) > MAX_SALT_KIB):
            own.remove(self._end_idle(own, f"{len(own)} grammars of your requests are in use at the same time"))
        while len(self._compiled) >= MAX_GRAMMARS:
            self._end_idle(list(self._compiled.values()), f"{MAX_GRAMMARS} grammars are in use at the same time")

    def _end_idle(self, processes: Sequence[GrammarProcess], problem: str) -> GrammarProcess:
        """Ends the least recently used idle process of these. Raises GrammarsExhausted if none is idle."""
        for key, process in self._compiled.items():
            if process.is_idle and process in processes:
                del self._compiled[key]
                self._budgets.charge(key[0], process.slow_seconds)
                process.close()
                return process
        raise GrammarsExhausted(problem)


class CompiledGrammar:
    """A `Constraint`: a compiled grammar, shared by all sequences that follow it."""

    def __init__(self, process: GrammarProcess, field: str) -> None:
        self.field = field
        self.ignored: Sequence[str] = process.warnings
        self._process = process

    def start(self) -> GrammarMatcher:
        """A matcher at the beginning, for one sequence."""
        return GrammarMatcher(self._process)


class GrammarMatcher:
    """A `Grammar`: one sequence's position in a compiled grammar. Its masks come from the grammar's process.

    The process is ahead of the sequence by the tokens in `forced`: its last mask is that after them.
    """

    forced: tuple[int, ...]

    def __init__(self, process: GrammarProcess) -> None:
        self.error = ""
        self._process = process
        self._sequence = process.start()
        self.forced, self._mask = process.first
        weakref.finalize(self, process.drop, self._sequence)

    def is_ready(self, seconds: float = 0.0) -> bool:
        if not self._mask and not self.error:
            answer = self._process.answer(self._sequence, seconds)
            if isinstance(answer, str):
                self.error = answer
            elif answer:
                self.forced, self._mask, _ = unpack_position(answer, self._process.vocab_size)
        return bool(self._mask or self.error)

    def fill_mask(self, address: int, num_bytes: int) -> str:
        while not self.is_ready(FILL_WAIT_SECONDS):
            pass  # the process answers, or the kernel ends it at its budget
        if self.forced and not self.error:
            ctypes.memset(address, 0, num_bytes)
            ctypes.c_ubyte.from_address(address + self.forced[0] // 8).value = 1 << self.forced[0] % 8
        elif not self.error:
            ctypes.memmove(address, self._mask, num_bytes)
        return self.error

    def accept(self, token_id: int) -> None:
        if not self.forced:
            self._mask = b""
            self._process.advance(self._sequence, token_id)
        elif token_id == self.forced[0]:
            self.forced = self.forced[1:]  # the process has passed it already
        else:  # only a bias of the request can forbid a forced token
            self.error = "the request's other parameters forbid the only token that it allows"


class TokenSet:
    """Allows a fixed set of tokens at every position: a `Constraint`, and stateless, so also its own `Grammar`."""

    forced: tuple[int, ...] = ()

    def __init__(self, token_ids: Iterable[int], vocab_size: int) -> None:
        allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
        allowed[[*token_ids]] = True
        self.field = "allowed_token_ids"
        self.ignored: Sequence[str] = ()
        self._bitmask = np.packbits(allowed, bitorder="little").tobytes()
        self.error = ""

    def start(self) -> TokenSet:
        return self

    def is_ready(self, seconds: float = 0.0) -> bool:
        return True

    def fill_mask(self, address: int, num_bytes: int) -> str:
        ctypes.memmove(address, self._bitmask, num_bytes)
        return ""

    def accept(self, token_id: int) -> None:
        pass
