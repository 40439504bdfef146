"""Output that follows a grammar: JSON schemas, regular expressions and Lark grammars by llguidance, or a set of tokens.

A grammar is compiled once, in the server, and every sequence walks through its own copy. The engine knows no more of
that than `Grammar` in request.py, and runs without llguidance.
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

COMPILED_MAX = 64  # grammars kept; the least recently used goes first

# The model's own spaces would only cost tokens, and a model that has none to say can repeat them for ever.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarError(Exception):
    """What was asked for is no grammar, or none that can be followed."""


def nested(rules: str, answer: str) -> str:
    """A Lark grammar in which `@answer` stands for what another grammar allows."""
    (inner,) = json.loads(answer)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": rules}, {**inner, "name": "answer"}]})


def json_schema(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of JSON that validates against a schema, without spaces but behind commas and colons.

    Raises GrammarError for `False`, against which nothing validates.
    """
    if schema is False:
        raise GrammarError("nothing validates against `false`")
    schema = {} if schema is True else schema
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)


def json_object() -> str:
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def lark(grammar: str) -> str:
    """Raises GrammarError if it is GBNF, which llama.cpp and xgrammar read, and cannot be put as Lark."""
    try:
        return json.dumps({"grammars": [{"lark_grammar": any_to_lark(grammar)}]})
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    except Exception as error:  # GbnfToLarkError for its syntax, and Exception itself for a rule that is not there
        raise GrammarError(str(error)) from error


class GrammarCompiler:
    """For one tokenizer. Safe to call from several threads."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`vocab_size`: the model's, which may be larger than the tokenizer's."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> CompiledGrammar:
        """Takes milliseconds, or a second for a large schema. Raises GrammarError."""
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
            if len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        return CompiledGrammar(matcher)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Takes up to a second, so that it is made for the first grammar only."""
        if not self._eos_token_ids:
            raise GrammarError("this model names no token that ends an answer")
        return LLTokenizer(self._tokenizer_json, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)


class CompiledGrammar:
    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> GrammarMatcher:
        """A walk from the beginning, for one sequence."""
        return GrammarMatcher(self._matcher.deep_copy())


class GrammarMatcher:
    """A `Grammar` of one request."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fill_mask(self, address: int, num_bytes: int) -> str:
        self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        return self._matcher.get_error()

    def accept(self, token_id: int) -> None:
        # Behind the end only the token that ends the sequence can come, and there is nothing left to walk.
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)


class TokenSet:
    """The only tokens that may come, in any order: a `Constraint`, and the `Grammar` of each of its answers."""

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
