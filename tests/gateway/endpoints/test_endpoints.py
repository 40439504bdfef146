"""What each endpoint reads from its body, through the real canonicaliser."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.errors import BadRequest, GatewayError
from gateway.endpoints import ENDPOINTS
from gateway.prompts.reader import MAX_TOKENS
from gateway.types import Call, Operation
from tests.gateway.calls import a_call

USER = {"role": "user", "content": "hello"}
LEAST: dict[Operation, dict[str, Any]] = {
    Operation.CHAT: {"model": "m", "messages": [USER]},
    Operation.COMPLETION: {"model": "m", "prompt": "hello"},
    Operation.EMBEDDING: {"model": "m", "input": "hello"},
}


def through(operation: Operation, **fields: Any) -> Call:
    return a_call({**LEAST[operation], **fields}, operation=operation)


def test_every_operation_has_one_native_endpoint() -> None:
    native = [endpoint for endpoint in ENDPOINTS if endpoint.translator("id") is None]
    assert sorted(endpoint.path for endpoint in native) == sorted(operation.value for operation in LEAST)
    assert len({endpoint.path for endpoint in ENDPOINTS}) == len(ENDPOINTS)


@pytest.mark.parametrize("operation", LEAST)
def test_unknown_fields_pass_byte_for_byte(operation: Operation) -> None:
    raw = b'{"x_new" : {"b":1.50,  "a":"\\u00e9"}, ' + json.dumps(LEAST[operation]).encode()[1:]
    assert bytes(a_call(raw, operation=operation).fields["x_new"]) == b'{"b":1.50,  "a":"\\u00e9"}'


@pytest.mark.parametrize(
    ("operation", "fields", "param"),
    [
        (Operation.CHAT, {"messages": []}, "messages"),
        (Operation.CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (Operation.CHAT, {"messages": [USER, {"role": 1}]}, "messages[1].role"),
        (Operation.CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (Operation.CHAT, {"messages": "hello"}, "messages"),
        (Operation.CHAT, {"stream": "yes"}, "stream"),
        (Operation.CHAT, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (Operation.CHAT, {"n": 0}, "n"),
        (Operation.CHAT, {"n": 129}, "n"),
        (Operation.CHAT, {"max_tokens": -1}, "max_tokens"),
        (Operation.CHAT, {"max_completion_tokens": MAX_TOKENS + 1}, "max_completion_tokens"),
        (Operation.CHAT, {"metadata": [1]}, "metadata"),
        (Operation.CHAT, {"model": None}, "model"),
        (Operation.COMPLETION, {"prompt": {}}, "prompt"),
        (Operation.COMPLETION, {"prompt": [1.5]}, "prompt[0]"),
        (Operation.COMPLETION, {"best_of": "two"}, "best_of"),
        (Operation.EMBEDDING, {"input": None}, "input"),
        (Operation.EMBEDDING, {"input": True}, "input"),
    ],
)
def test_an_invalid_field_is_rejected_by_its_name(operation: Operation, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as rejection:
        through(operation, **fields)
    assert rejection.value.param == param


@pytest.mark.parametrize(
    ("operation", "fields", "tokens"),
    [
        (Operation.CHAT, {}, None),
        (Operation.CHAT, {"max_tokens": 7}, 7),
        (Operation.CHAT, {"max_tokens": 7, "max_completion_tokens": 5, "n": 3}, 15),
        (Operation.CHAT, {"max_tokens": MAX_TOKENS, "n": 128}, MAX_TOKENS),
        (Operation.COMPLETION, {}, 16),
        (Operation.COMPLETION, {"max_tokens": 0}, 0),
        (Operation.COMPLETION, {"prompt": ["a", "b"], "max_tokens": 5}, 10),
        (Operation.COMPLETION, {"prompt": [[1], [2], [3]], "max_tokens": 5, "n": 2, "best_of": 4}, 60),
        (Operation.COMPLETION, {"prompt": [1, 2, 3], "max_tokens": 5}, 5),
        (Operation.EMBEDDING, {"input": ["a", "b"]}, 0),
    ],
)
def test_max_output_tokens_counts_choices_and_prompts(
    operation: Operation, fields: dict[str, Any], tokens: int | None
) -> None:
    assert through(operation, **fields).max_output_tokens == tokens


@pytest.mark.parametrize("operation", [Operation.COMPLETION, Operation.EMBEDDING])
def test_token_ids_are_counted(operation: Operation) -> None:
    name = "input" if operation is Operation.EMBEDDING else "prompt"
    assert through(operation, **{name: [1, 2, 3]}).prompt_tokens_estimate == 3
    assert through(operation, **{name: [[1, 2], [3]]}).prompt_tokens_estimate == 3


def test_embeddings_do_not_stream_and_have_no_prefix() -> None:
    call = through(Operation.EMBEDDING, stream=True)
    assert not call.stream and call.fingerprint == () and call.deterministic


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    ["model", "messages", "prompt", "input", "stream", "stream_options", "n", "best_of", "max_tokens", "metadata",
     "temperature", "seed", "user", "service_tier", "tools", "role", "content", "type", "text"]
)  # fmt: skip
parts = st.lists(st.fixed_dictionaries({"type": values, "text": values}) | values, max_size=2)
messages = st.lists(st.fixed_dictionaries({"role": st.just("user") | values, "content": parts | values}), max_size=2)


@given(st.sampled_from(sorted(LEAST)), st.dictionaries(names, values), messages)
@example(Operation.CHAT, {}, [{"role": "user", "content": ["text"]}])
def test_any_json_is_read_or_rejected(operation: Operation, fields: dict[str, Any], chat: list[Any]) -> None:
    try:
        through(operation, **{**fields, **({"messages": chat} if chat else {})})
    except GatewayError as rejection:
        assert rejection.status in (400, 404)
        msgspec.json.encode(rejection.body())


@given(st.binary(max_size=60) | st.binary(max_size=20).map(lambda noise: b'{"model":"m","messages":' + noise + b"}"))
def test_any_bytes_are_rejected_without_a_crash(noise: bytes) -> None:
    with pytest.raises(BadRequest):
        a_call(noise)
