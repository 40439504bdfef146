"""Requests of every API are changed as the documentation says, and in no other way."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.endpoints.base import Endpoint
from gateway.endpoints.chat import ChatEndpoint
from gateway.endpoints.messages import MessagesEndpoint
from gateway.endpoints.responses import ResponsesEndpoint
from gateway.policy import Policy
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.types import Principal
from tests.gateway.calls import UNTRACED, a_policy
from tests.gateway.prompts.transforms.requests import text, written
from tests.gateway.prompts.transforms.schemas import meaning, object_schema, reordered

Json = Any
BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"
LINES = st.sampled_from(("You are X.", BILLING, "x-anthropic-style: formal", "x-request-id: 0123456789abcdef", ""))
systems = st.lists(LINES, min_size=1, max_size=4).map("\n".join).filter(str.strip)
OFF, SAFE = a_policy(canonicalise={"level": "off"}), a_policy()
REORDERED = ("tools", "response_format")
CHANGED = {*REORDERED, "messages"}


def chat_body(system: Json, question: Json, schema: Json, strict: bool) -> Json:
    function = {"name": "f", "description": "Does it.", "parameters": schema, "strict": strict}
    json_schema = {"name": "n", "schema": schema, "strict": strict}
    return {
        "model": "m",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "tools": [{"type": "function", "function": function}],
        "response_format": {"type": "json_schema", "json_schema": json_schema},
    }


def messages_body(system: Json, question: Json, schema: Json, strict: bool) -> Json:
    return {
        "model": "m",
        "max_tokens": 9,
        "system": system,
        "messages": [{"role": "user", "content": question}],
        "tools": [{"name": "f", "description": "Does it.", "input_schema": schema, "strict": strict}],
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }


def responses_body(system: Json, question: Json, schema: Json, strict: bool) -> Json:
    as_text = system if isinstance(system, str) else "\n".join(part["text"] for part in system)
    content = question if isinstance(question, str) else [{"type": "input_text", "text": p["text"]} for p in question]
    return {
        "model": "m",
        "instructions": as_text,
        "input": [{"role": "user", "content": content}],
        "tools": [{"type": "function", "name": "f", "parameters": schema, "strict": strict}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": strict}},
    }


WIRES: list[tuple[Endpoint, Callable[..., Json]]] = [
    (ChatEndpoint(), chat_body),
    (MessagesEndpoint(), messages_body),
    (ResponsesEndpoint(), responses_body),
]


def content_of(said: st.SearchStrategy[str]) -> st.SearchStrategy[Json]:
    part = st.builds(lambda words: {"type": "text", "text": words}, said)
    return said | st.lists(part, min_size=1, max_size=3)


@pytest.mark.parametrize(("endpoint", "body_of"), WIRES, ids=("chat", "messages", "responses"))
@given(
    random=st.integers(0, 2**32 - 1).map(Random),
    system=content_of(systems),
    question=content_of(text.filter(str.strip) | LINES.filter(bool)),
    strict=st.booleans(),
    styles=st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
@settings(max_examples=80)
def test_a_request_is_changed_only_as_documented(
    endpoint: Endpoint, body_of: Callable[..., Json], random: Random, system: Json, question: Json, strict: bool,
    styles: tuple[int, int],
) -> None:  # fmt: skip
    """The second of two requests whose schemas mean the same."""
    first = object_schema(random)
    second = reordered({"schema": first}, random)["schema"]
    bodies = [
        written(body_of(system, question, schema, strict), style)
        for schema, style in zip((first, second), styles, strict=True)
    ]
    canonicaliser = Canonicaliser(b"secret")
    sent = [fields(canonicaliser, endpoint, body, SAFE) for body in bodies]
    as_sent = [fields(Canonicaliser(b"secret"), endpoint, body, OFF) for body in bodies]
    for before, after in zip(as_sent, sent, strict=True):
        assert before.keys() == after.keys()
        assert {name: before[name] for name in before.keys() - CHANGED} == {
            name: after[name] for name in after.keys() - CHANGED
        }
        for name in REORDERED:
            assert _meanings(json.loads(before[name])) == _meanings(json.loads(after[name]))
        assert json.dumps(json.loads(after["messages"])) == json.dumps(_quiet(json.loads(before["messages"])))
    for name in REORDERED:
        assert sent[0][name] == sent[1][name]
        assert json.loads(sent[0][name]) == json.loads(as_sent[0][name])


def fields(canonicaliser: Canonicaliser, endpoint: Endpoint, body: bytes, policy: Policy) -> dict[str, bytes]:
    """The fields of the request that a deployment gets."""
    call = canonicaliser.canonicalise(
        endpoint, body, {}, call_id="c", principal=Principal(policy.tenants_by_name["t"], "k"), policy=policy, now=0.0,
        trace=UNTRACED,
    )  # fmt: skip
    return {name: bytes(value) for name, value in call.fields.items()}


def _meanings(value: Json) -> Json:
    return [meaning(tool) for tool in value] if isinstance(value, list) else meaning(value)


def _quiet(messages: Json) -> Json:
    """The messages without a billing line at the beginning of the first system message."""
    first = messages[0]
    if first["role"] == "system":
        content = first["content"]
        if isinstance(content, str):
            line, _, rest = content.partition("\n")
            first["content"] = rest if line == BILLING and rest else content
        else:
            line, _, rest = content[0]["text"].partition("\n")
            if line == BILLING and (rest or content[1:]):
                first["content"] = [*([{**content[0], "text": rest}] if rest else []), *content[1:]]
    return messages
