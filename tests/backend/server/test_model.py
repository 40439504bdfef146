"""Defaults from the checkpoint's files, and limits of a served model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.engine.grammar import GrammarCompiler
from backend.parsers import REASONING_FORMATS, TOOL_FORMATS
from backend.server.constraints import chat_constraint
from backend.server.errors import ContextLengthError, InvalidRequest
from backend.server.model import ServedModel, load_model
from backend.server.request_body import decode_body
from backend.server.requests import ChatRequest


@pytest.fixture
def directory(checkpoint: Path, tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    return tmp_path


def load(directory: Path, **generation: Any) -> ServedModel:
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return load_model(directory, "m", "m", 100)


def request(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return decode_body(json.dumps(body).encode(), ChatRequest)


def test_the_checkpoints_sampling_defaults_apply_to_omitted_fields(directory: Path) -> None:
    model = load(directory, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05)
    sampling = model.sampling(request(top_p=0.5, top_k=0), 10, None, 0)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.5, 0)
    assert sampling.repetition_penalty == 1.05


def test_without_checkpoint_defaults_sampling_is_openais(directory: Path) -> None:
    sampling = load(directory).sampling(request(), 10, None, 0)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)


def test_a_checkpoint_that_does_not_sample_is_greedy(directory: Path) -> None:
    model = load(directory, do_sample=False)
    assert model.sampling(request(), 10, None, 0).temperature == 0
    assert model.sampling(request(temperature=0.7), 10, None, 0).temperature == 0.7


def test_every_end_of_text_token_stops_unless_eos_is_ignored(directory: Path) -> None:
    model = load(directory, eos_token_id=[7, 8])
    ends = {1, 7, 8, 3}  # config.json, generation_config.json, and the tokenizer's <|im_end|>
    assert model.sampling(request(stop_token_ids=[9]), 10, None, 0).stop_token_ids == ends | {9}
    assert model.sampling(request(stop_token_ids=[9], ignore_eos=True), 10, None, 0).stop_token_ids == {9}


def test_each_choice_has_its_own_seed(directory: Path) -> None:
    model = load(directory)
    assert [model.sampling(request(seed=5), 10, None, i).seed for i in range(3)] == [5, 6, 7]


def test_the_remaining_context_limits_the_output(directory: Path) -> None:
    model = load(directory)
    assert model.check_context(40, None, "messages") == 60
    assert model.check_context(40, 60, "messages") == 60
    with pytest.raises(ContextLengthError, match="100 tokens"):
        model.check_context(40, 61, "messages")
    with pytest.raises(ContextLengthError, match="100 tokens"):
        model.check_context(100, None, "messages")
    assert load(directory, max_new_tokens=32).check_context(40, None, "messages") == 32
    assert load(directory, max_new_tokens=32).check_context(90, None, "messages") == 10


def test_an_engine_rejection_names_the_field(directory: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(directory).sampling(request(min_tokens=11), 10, None, 0)
    assert caught.value.param == "min_tokens"


def test_formats_are_detected_in_the_template_or_selected(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ '<tool_call>' }}{{ '</think>' }}")
    guessed = load(directory)
    assert (guessed.tool_format, guessed.reasoning_format) == (TOOL_FORMATS["hermes"], REASONING_FORMATS["think"])
    chosen = load_model(directory, "m", "m", 100, tool_parser="mistral", reasoning_parser="none")
    assert (chosen.tool_format, chosen.reasoning_format) == (TOOL_FORMATS["mistral"], None)


def test_a_model_without_a_tool_format_rejects_forced_calls(directory: Path) -> None:
    model = load_model(directory, "m", "m", 100, tool_parser="none")
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(InvalidRequest, match="--tool-parser") as caught:
        chat_constraint(model, request(tools=tools, tool_choice="required"), "")
    assert caught.value.param == "tool_choice"


def test_a_model_without_an_eos_token_cannot_follow_a_grammar(directory: Path) -> None:
    model = load(directory)
    endless = replace(model, grammars=GrammarCompiler(model.codec.tokenizer.to_str(), model.vocab_size, []))
    with pytest.raises(InvalidRequest, match="this model has no end-of-sequence token"):
        chat_constraint(endless, request(guided_regex="a"), "")
