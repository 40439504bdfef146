"""A client's cache breakpoints reach deployments that support them, at their positions, and no others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.cache_breakpoints import without_breakpoints
from gateway.core.errors import BadRequest
from gateway.endpoints.chat import ChatEndpoint
from gateway.endpoints.messages import CountTokensEndpoint, MessagesEndpoint
from gateway.policy import Deployment, Policy
from gateway.prompts.reader import ParsedBody, read_fields
from gateway.prompts.transforms import VERSION, SharedDecisions, TransformPipeline, TransformPlan
from gateway.providers import make_provider
from gateway.providers.transport import HTTPTransport
from gateway.settings import resolve_secret
from tests.gateway.calls import a_call, a_policy
from tests.gateway.providers.scripted_server import ReceivedRequest, ScriptedServer, json_response

FIVE_MINUTES, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
MESSAGES = MessagesEndpoint()
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
FILE = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
WEATHER = {"name": "weather", "input_schema": {"type": "object"}}

marks = st.sampled_from(({}, {}, {"cache_control": FIVE_MINUTES}, {"cache_control": HOUR}, {"cache_control": None}))


def with_marks(blocks: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda block, mark: {**block, **mark}, blocks, marks)


texts = with_marks(
    st.builds(lambda text: {"type": "text", "text": text}, st.sampled_from(("a", "b", 'of "cache_control"')))
)
shown = texts | with_marks(st.sampled_from((IMAGE, FILE)))
results = with_marks(
    st.fixed_dictionaries(
        {
            "type": st.just("tool_result"),
            "tool_use_id": st.just("c"),
            "content": st.lists(texts, max_size=2) | st.just("r"),
        },
        optional={"is_error": st.booleans()},
    )
)
calls = with_marks(
    st.just({"type": "tool_use", "id": "c", "name": "weather", "input": {"cache_control": {"type": "ephemeral"}}})
)
users = st.builds(
    lambda blocks: {"role": "user", "content": blocks},
    st.just("hi") | st.lists(shown | results, min_size=1, max_size=3),
)
answers = st.builds(
    lambda blocks: {"role": "assistant", "content": blocks}, st.lists(texts | calls, min_size=1, max_size=3)
)
bodies = st.fixed_dictionaries(
    {"model": st.just("m"), "max_tokens": st.just(9), "messages": st.lists(users | answers, min_size=1, max_size=4)},
    optional={"system": st.lists(texts, max_size=2), "tools": st.lists(with_marks(st.just(WEATHER)), max_size=2),
              "cache_control": st.just(HOUR)},
)  # fmt: skip


def read(body: dict[str, Any]) -> ParsedBody:
    raw = json.dumps(body).encode()
    return MESSAGES.read(read_fields(raw), raw)


def without_marks(value: Any) -> Any:
    """Return the value without breakpoints. The arguments of a call are data, and stay."""
    if isinstance(value, list):
        return [without_marks(each) for each in value]
    if isinstance(value, dict):
        return {
            name: one if name == "input" else without_marks(one)
            for name, one in value.items()
            if name != "cache_control"
        }
    return value


@given(body=bodies)
@settings(max_examples=150)
def test_without_breakpoints_the_prompt_is_as_if_none_were_set(body: dict[str, Any]) -> None:
    parsed, plain = read(body), read(without_marks(body))
    assert (parsed.fields, parsed.pieces, parsed.hints) == (plain.fields, plain.pieces, plain.hints)
    if parsed.with_breakpoints is None:
        assert body == without_marks(body)
        return
    marked = parsed.with_breakpoints()
    assert marked.pieces == plain.pieces, "the pieces have none either"
    assert without_breakpoints(marked.fields) == plain.fields


def policy_of(*providers: str) -> Policy:
    servers = [
        {"name": name, "provider": name, "base_url": f"http://{name}.invalid/v1", "model": "served", "native": []}
        for name in providers
    ]
    return a_policy(deployments=servers, models=[{"name": "m", "deployments": list(providers)}])


def sent(body: dict[str, Any], *providers: str) -> list[dict[str, Any]]:
    """Return the upstream request of each provider."""
    policy = policy_of(*providers)
    call = a_call(body, policy, endpoint=MESSAGES)
    return [
        json.loads(make_provider(deployment, HTTPTransport(), resolve_secret).render(call))
        for deployment in policy.deployments
    ]


def breakpoints_in(request: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each breakpoint with the kind of block that has it."""
    if given := request.get("cache_control"):
        yield "the request", given
    turns = [turn["content"] for turn in request["messages"]]
    for blocks in (request.get("tools", ()), request.get("system", ()), *turns):
        for block in blocks if not isinstance(blocks, str) else ():
            inner = block.get("content")
            within = inner[-1].get("cache_control") if inner and isinstance(inner, list) else None
            if given := block.get("cache_control") or within:
                yield block.get("type", "tool"), given
            for each in inner[:-1] if isinstance(inner, list) else ():
                if given := each.get("cache_control"):
                    yield "inside a result", given


@given(body=bodies)
@settings(max_examples=150)
def test_anthropic_deployments_get_breakpoints_where_they_were_set(body: dict[str, Any]) -> None:
    """Tool results are moved to the beginning of a turn, so only the order within a kind is the same."""
    wanted = list(breakpoints_in(body))
    (request,) = sent(body, "anthropic")
    if wanted:
        assert sorted(map(str, breakpoints_in(request))) == sorted(map(str, wanted))
    else:
        assert all(mark == FIVE_MINUTES for _, mark in breakpoints_in(request)), "the gateway's own"


def test_a_breakpoint_inside_a_tool_result_is_preserved() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [
        {"type": "text", "text": "a", "cache_control": HOUR}, {"type": "text", "text": "b"},
    ]}  # fmt: skip
    (request,) = sent({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [result]}]}, "anthropic")
    assert request["messages"][0]["content"] == [result]


def test_a_request_as_the_sdk_sends_it() -> None:
    body = {
        "model": "m", "max_tokens": 9,
        "system": [{"type": "text", "text": "Be exact.", "cache_control": HOUR}, {"type": "text", "text": "Be kind."}],
        "tools": [{**WEATHER, "cache_control": HOUR}],
        "messages": [
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {}, "cache_control": FIVE_MINUTES},
                {"type": "tool_use", "id": "c2", "name": "weather", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "sun"},
                {"type": "tool_result", "tool_use_id": "c2", "content": "rain", "is_error": True,
                 "cache_control": FIVE_MINUTES},
            ]},
        ],
    }  # fmt: skip
    (request,) = sent(body, "anthropic")
    assert request["system"] == body["system"]
    assert request["tools"][0]["cache_control"] == HOUR
    marked = [[block.get("cache_control") for block in turn["content"]] for turn in request["messages"]]
    assert marked == [[None], [FIVE_MINUTES, None], [None, FIVE_MINUTES]]


@pytest.mark.parametrize("others", [("vllm",), ("openai", "trtllm"), ("warmpath", "llamacpp", "sglang")])
def test_other_deployments_of_the_model_get_no_breakpoints(others: tuple[str, ...]) -> None:
    body = {
        "model": "m", "max_tokens": 9, "cache_control": HOUR, "tools": [{**WEATHER, "cache_control": HOUR}],
        "system": [{"type": "text", "text": "Be exact.", "cache_control": HOUR}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": FIVE_MINUTES}]}],
    }  # fmt: skip
    _, *requests = sent(body, "anthropic", *others)
    _, *plain = sent(without_marks(body), "anthropic", *others)
    assert requests == plain and "cache_control" not in json.dumps(requests)


def test_known_fields_of_a_breakpoint_are_checked_and_others_dropped() -> None:
    """For example the `scope` of coding agents, which needs a header that is not forwarded."""
    text = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "scope": "global"}}
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [text]}]}
    assert sent(body, "anthropic")[0]["messages"][0]["content"][0]["cache_control"] == FIVE_MINUTES
    text["cache_control"] = {"type": "ephemeral", "ttl": "2h"}
    with pytest.raises(BadRequest) as rejection:
        read(body)
    assert rejection.value.param == "messages[0].content[0].cache_control.ttl"


def test_token_counting_at_anthropic_gets_breakpoints() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": HOUR}]}],
    }
    call = a_call(body, policy_of("anthropic"), endpoint=CountTokensEndpoint())
    assert "cache_control" in bytes(call.fields["messages"]).decode()


async def test_token_counting_at_other_deployments_gets_no_breakpoints() -> None:
    body = {
        "model": "m", "tools": [{**WEATHER, "cache_control": HOUR}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": HOUR}]}],
    }  # fmt: skip
    call = a_call(body, policy_of("anthropic", "vllm"), endpoint=CountTokensEndpoint())

    async def tokenize(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_response(b'{"count": 7}'))

    async with ScriptedServer(tokenize) as server, HTTPTransport() as transport:
        deployment = Deployment(name="d", provider="vllm", base_url=server.base_url, model="served")
        assert await make_provider(deployment, transport, resolve_secret).count_prompt_tokens(call) == 7
        request = json.loads(server.requests[0].body)
    assert request["messages"] == [{"role": "user", "content": "hi"}]
    assert "cache_control" not in request["tools"][0] and request["model"] == "served"


def test_a_moved_breakpoint_does_not_change_the_prefix() -> None:
    """At both endpoints, the second turn's prompt begins with the first one's."""

    def turns(*marked: bool) -> list[dict[str, Any]]:
        turns_text = [("user", "x" * 5000), ("assistant", "y" * 5000), ("user", "z" * 5000)]
        return [
            {"role": role, "content": [{"type": "text", "text": text, **({"cache_control": HOUR} if mark else {})}]}
            for (role, text), mark in zip(turns_text, marked, strict=False)
        ]

    policy = policy_of("anthropic")
    for endpoint in (None, MESSAGES):
        first, second = (
            a_call({"model": "m", "max_tokens": 9, "messages": turns(*marks)}, policy, endpoint=endpoint)
            for marks in ((True,), (False, False, True))
        )
        shared = len(first.fingerprint) - 1  # the last block contains the end of the first prompt
        assert shared > 1 and first.fingerprint[:shared] == second.fingerprint[:shared]


def test_a_conversation_is_recognised_with_and_without_breakpoints() -> None:
    plans, old, new = (
        TransformPipeline(SharedDecisions()).plans,
        TransformPlan(VERSION, "off"),
        TransformPlan(VERSION, "safe"),
    )
    question: Any = {"type": "text", "text": "hi"}
    answer: Any = {"role": "assistant", "content": "ho"}

    def plan(wanted: TransformPlan, content: Any, *rest: Any) -> TransformPlan:
        body: Any = {"model": "m", "messages": [{"role": "user", "content": content}, *rest]}
        raw = json.dumps(body).encode()
        return plans.plan_for(wanted, "t", "m", ChatEndpoint().read(read_fields(raw), raw).messages)

    assert plan(old, "before") == old
    assert plan(new, [{**question, "cache_control": HOUR}]) == new
    assert plan(new, [question], answer) == plan(new, "hi", answer) == new
    assert plan(new, "another", answer) == old
