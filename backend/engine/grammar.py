"""Structured output: JSON schemas, regular expressions and Lark grammars by llguidance, or a set of allowed tokens.

The server compiles a grammar once (`GrammarCompiler`), and every sequence gets its own copy of the matcher
(`GrammarMatcher`). The engine itself knows only the protocols in constraint.py and runs without llguidance.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_COMPILED = 64  # grammars in the cache; the least recently used is dropped first

# No free whitespace: it only costs tokens, and a model that does not know how to continue can repeat it for ever.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarError(Exception):
    """The request's grammar is malformed or cannot be enforced."""


def nested(rules: str, answer: str) -> str:
    """A Lark grammar in which `@answer` stands for another grammar."""
    (inner,) = json.loads(answer)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": rules}, {**inner, "name": "answer"}]})


def json_schema(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of JSON that validates against a schema, with one space after commas and colons and no other.

    Raises GrammarError for the schema `False`, which no value satisfies.
    """
    if schema is False:
        raise GrammarError("no value satisfies the schema `false`")
    schema = {} if schema is True else schema
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)


def json_object() -> str:
    """The grammar of any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """The grammar of text that matches a regular expression as a whole."""
    return LLMatcher.grammar_from_regex(pattern)


def lark(grammar: str) -> str:
    """The grammar of a Lark grammar, or of GBNF, which llama.cpp and xgrammar read.

    Raises GrammarError if it is GBNF that cannot be translated to Lark.
    """
    try:
        return json.dumps({"grammars": [{"lark_grammar": any_to_lark(grammar)}]})
    except RecursionError as error:
        raise GrammarError("the grammar is nested too deeply") from error
    except Exception as error:  # GbnfToLarkError for a syntax error, and plain Exception for an undefined rule
        raise GrammarError(str(error)) from error


class GrammarCompiler:
    """Compiles grammars for one tokenizer and caches the results. Thread-safe."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`vocab_size`: the model's, which may be larger than the tokenizer's."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> CompiledGrammar:
        """Takes milliseconds, or up to a second for a large schema. Raises GrammarError."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
                return CompiledGrammar(matcher)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return CompiledGrammar(matcher)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Made for the first grammar only, because it takes up to a second."""
        if not self._eos_token_ids:
            raise GrammarError("this model has no end-of-sequence token")
        return LLTokenizer(self._tokenizer_json, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)


class CompiledGrammar:
    """A `Constraint`: a compiled grammar, shared by all sequences that follow it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> GrammarMatcher:
        """A matcher at the beginning, for one sequence."""
        return GrammarMatcher(self._matcher.deep_copy())


class GrammarMatcher:
    """A `Grammar`: one sequence's position in a compiled grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fill_mask(self, address: int, num_bytes: int) -> str:
        self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        return self._matcher.get_error()

    def accept(self, token_id: int) -> None:
        # After the end of the grammar, only the end-of-sequence token can follow, which the matcher need not see.
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)


class TokenSet:
    """Allows a fixed set of tokens at every position: a `Constraint`, and stateless, so also its own `Grammar`."""

    def __init__(self, token_ids: Iterable[int], vocab_size: int) -> None:
        allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
        allowed[[*token_ids]] = True
        self._bitmask = np.packbits(allowed, bitorder="little").tobytes()

    def start(self) -> TokenSet:
        return self

    def fill_mask(self, address: int, num_bytes: int) -> str:
        ctypes.memmove(address, self._bitmask, num_bytes)
        return ""

    def accept(self, token_id: int) -> None:
        pass
