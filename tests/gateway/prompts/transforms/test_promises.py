"""The promises of the safety classes, over generated and recorded requests."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.core.errors import BadRequest
from gateway.endpoints import ENDPOINTS
from gateway.prompts.canonicaliser import join_fields, with_canonical_body
from gateway.prompts.reader import read_fields
from gateway.prompts.transforms import (
    OPT_IN,
    VERSION,
    VERSIONS,
    Fields,
    Safety,
    SharedDecisions,
    TransformPipeline,
    TransformPlan,
)
from gateway.prompts.transforms.base import Message, MessagesTransform, TransformContext, ValueTransform
from gateway.prompts.transforms.order_memo import digest
from tests.gateway.prompts.transforms.dialects import DIALECTS, TOOL, Dialect
from tests.gateway.prompts.transforms.requests import CACHED, TAU_BENCH, bodies, recorded, written

CHAT = ENDPOINTS[0]
EVERYTHING = TransformPlan(VERSION, "full", OPT_IN, "26 Jul 2024")
MOVING = TransformPlan(VERSION, "full", ("volatile_to_end",))
IDS_EVERY = 10  # recorded turns, because tokenizing is slow
PROVEN = [transform for transform in VERSIONS[VERSION] if transform.safety is Safety.P0]


def canonical(body: bytes, plan: TransformPlan, pipeline: TransformPipeline | None = None) -> bytes:
    fields = read_fields(body)
    asked = CHAT.read(fields, body)
    form = (pipeline or TransformPipeline(SharedDecisions())).canonical_body(
        fields, asked.messages, plan, "salt", plain=asked.plain
    )
    if form is None:
        return join_fields(fields)
    read_anew, patched = CHAT.read(form.fields, join_fields(form.fields)), with_canonical_body(asked, form)
    assert patched.pieces == read_anew.pieces, "what is fingerprinted is what is sent"
    return join_fields(form.fields)


def with_all_p0_transforms(body: bytes) -> bytes:
    """The body after all P0 transforms, whether or not `may_apply` selects them."""
    fields: Fields = read_fields(body)
    context = TransformContext(EVERYTHING, "salt", SharedDecisions())
    for transform in PROVEN:
        for name in fields.keys() & set(transform.fields):
            if isinstance(transform, MessagesTransform):
                messages = msgspec.json.decode(fields[name], type=list[Message])
                if list(transform.change(messages, context)):
                    fields[name] = msgspec.Raw(msgspec.json.encode(messages))
                continue
            assert isinstance(transform, ValueTransform)
            if (form := transform.apply(bytes(fields[name]), context)) is not None:
                fields[name] = msgspec.Raw(form)
    return join_fields(fields)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@given(body=bodies())
@settings(max_examples=60)
def test_p0_is_the_same_prompt_in_text_and_in_token_ids(dialect: Dialect, body: bytes) -> None:
    form = with_all_p0_transforms(body)
    assert dialect.prompt(form) == dialect.prompt(body)
    assert dialect.ids(form) == dialect.ids(body)


@pytest.mark.slow
@pytest.mark.skipif(not TAU_BENCH.exists(), reason=f"no recorded conversations at {TAU_BENCH.name}")
@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d.reads_text], ids=lambda dialect: dialect.name)
def test_p0_is_the_same_prompt_of_recorded_conversations(dialect: Dialect) -> None:
    changed = compared = 0
    for number, turn in enumerate(recorded()):
        in_parts = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message.get("content"), str) and (number + i) % 2
            else message
            for i, message in enumerate(turn["messages"])
        ]
        for body in (written(turn, number % 5), written({**turn, "messages": in_parts}, number % 5)):
            form = with_all_p0_transforms(body)
            changed += form != body
            assert dialect.prompt(form) == dialect.prompt(body)
            if number % IDS_EVERY == 0:
                ids = dialect.ids(body)
                assert dialect.ids(form) == ids
                compared += not isinstance(ids, str)
    assert changed > 200
    assert compared > 20


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_different_prompts_have_different_token_ids(dialect: Dialect) -> None:
    """The check detects a changed word, and a special token of the template is one token."""
    warm, cold = (
        written({"messages": [{"role": "user", "content": [{"type": "text", "text": word}]}], "tools": [TOOL]}, 0)
        for word in ("warm", "cold")
    )
    one, other = dialect.ids(warm), dialect.ids(cold)
    assert not isinstance(one, str) and not isinstance(other, str)
    assert one != other
    assert len(one) < len(dialect.prompt(warm))


@given(body=bodies(), plan=st.sampled_from((TransformPlan(VERSION, "safe"), MOVING, EVERYTHING)))
@settings(max_examples=200)
def test_a_canonical_form_is_its_own_canonical_form(body: bytes, plan: TransformPlan) -> None:
    pipeline = TransformPipeline(SharedDecisions())
    form = canonical(body, plan, pipeline)
    if plan.level == "full" or body.count(b"x-anthropic") > 1:  # a line that is the first only in the form is kept
        assume(b"x-anthropic" not in form)
    assert canonical(form, plan, pipeline) == form


@given(body=bodies(), styles=st.tuples(st.integers(0, 4), st.integers(0, 4)))
@settings(max_examples=80)
def test_tools_in_any_notation_become_the_same_bytes(body: bytes, styles: tuple[int, int]) -> None:
    plan = TransformPlan(VERSION, "safe")
    value = json.loads(body)
    one, other = (read_fields(canonical(written(value, style), plan)) for style in styles)
    assert one.get("tools") == other.get("tools")
    assert one.get("response_format") == other.get("response_format")


@given(body=bodies())
@settings(max_examples=120)
def test_protected_messages_are_unchanged(body: bytes) -> None:
    """Only system messages and the last user message change. No turn is added or lost, and cache breakpoints stay."""
    before, after = json.loads(body), json.loads(canonical(body, EVERYTHING))
    assert _exact(_spoken(before)) == _exact(_spoken(after))
    assert len(before["messages"]) == len(after["messages"])
    assert [_plainly(message) for message in _users(before)[:-1]] == [
        _plainly(message) for message in _users(after)[:-1]
    ]
    assert _exact(_marked(before["messages"])) == _exact(_marked(after["messages"]))
    if CACHED["cache_control"] in [tool.get("cache_control") for tool in before.get("tools", ())]:
        assert [_named(tool) for tool in before["tools"]] == [_named(tool) for tool in after["tools"]]
        assert _exact(_marked(before["tools"])) == _exact(_marked(after["tools"]))
    untouched = before.keys() - {"messages", "tools", "response_format"}
    assert {name: before[name] for name in untouched} == {name: after[name] for name in untouched}


@given(body=bodies(), opt_in=st.sets(st.sampled_from(("volatile_to_end", "volatile_to_user")), min_size=1))
@settings(max_examples=120)
def test_p3_moves_lines_and_loses_none(body: bytes, opt_in: set[str]) -> None:
    """Lines move to the end of the system prompt or to the last user message. None is lost, changed or duplicated."""
    plan = TransformPlan(VERSION, "full", tuple(sorted(opt_in)))
    safe, moved = (json.loads(canonical(body, p)) for p in (TransformPlan(VERSION, "safe"), plan))
    assert _lines(safe) == _lines(moved)
    assert [message["role"] for message in safe["messages"]] == [message["role"] for message in moved["messages"]]
    for one, other in zip(_users(safe)[-1:], _users(moved)[-1:], strict=True):
        assert _texts(other)[0].startswith(_texts(one)[0]) if _texts(one) else True
    if "volatile_to_user" not in opt_in:
        assert _exact(_users(safe)) == _exact(_users(moved))


@pytest.mark.slow
@pytest.mark.skipif(not TAU_BENCH.exists(), reason=f"no recorded conversations at {TAU_BENCH.name}")
def test_p3_of_recorded_conversations() -> None:
    """A clock before a recorded system prompt: only the clock moves, and the history is unchanged."""
    plan, moved = TransformPlan(VERSION, "full", ("volatile_to_user",)), 0
    for number, turn in enumerate(recorded()):
        system, *said = turn["messages"]
        clock = f"Current time: 09:{number % 60:02}"
        told = json.loads(
            canonical(
                written({**turn, "messages": [{**system, "content": f"{clock}\n{system['content']}"}, *said]}, 0), plan
            )
        )["messages"]
        assert clock not in told[0]["content"]
        last = max(i for i, message in enumerate(said, start=1) if message["role"] == "user")
        assert told[last]["content"].split("\n\n", 1)[0] == said[last - 1]["content"].split("\n\n", 1)[0]
        assert clock in told[last]["content"]
        assert [m for i, m in enumerate(told) if i not in (0, last)] == [
            m for i, m in enumerate(turn["messages"]) if i not in (0, last)
        ]
        moved += 1
    assert moved > 100


@given(body=bodies())
@settings(max_examples=80)
def test_schemas_keep_their_meaning(body: bytes) -> None:
    before, after = (json.loads(form) for form in (body, canonical(body, EVERYTHING)))
    meanings = [sorted(str(digest(json.dumps(tool).encode())) for tool in b.get("tools", ())) for b in (before, after)]
    assert meanings[0] == meanings[1]


KEYS = ("role", "content", "type", "text", "function", "parameters", "system", "cache_control")
junk = st.recursive(
    st.none() | st.integers() | st.text("ab\x1bé"),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)


@given(junk=junk)
@settings(max_examples=80)
def test_values_of_unexpected_shape_are_passed_on(junk: Any) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "system", "content": "x"}], "tools": junk,
                       "response_format": junk, "functions": junk, "chat_template_kwargs": junk}).encode()  # fmt: skip
    try:
        form = canonical(body, EVERYTHING)
    except BadRequest:  # the endpoint refuses tools that are not a list
        return
    assert json.loads(form)["response_format"] == junk


def _spoken(body: Any) -> list[Any]:
    return [message for message in body["messages"] if message["role"] in ("assistant", "tool")]


def _users(body: Any) -> list[Any]:
    return [message for message in body["messages"] if message["role"] == "user"]


def _plainly(message: Any) -> str:
    """The text of a single text part, as P0 writes it."""
    match message["content"]:
        case [{"type": "text", "text": text, **more}] if not more:
            return _exact({**message, "content": text})
    return _exact(message)


def _texts(message: Any) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _lines(body: Any) -> list[str]:
    """The lines of system and user messages, in any order."""
    spoken = (message for message in body["messages"] if message["role"] in ("system", "user"))
    lines = (line for message in spoken for text in _texts(message) for line in text.split("\n"))
    return sorted(line for line in lines if line)


def _marked(value: Any) -> list[Any]:
    """Everything with a cache breakpoint, in order."""
    if isinstance(value, list):
        return [found for item in value for found in _marked(item)]
    if isinstance(value, dict):
        return [value] if "cache_control" in value else [found for item in value.values() for found in _marked(item)]
    return []


def _named(tool: Any) -> Any:
    return tool["function"]["name"]


def _exact(value: Any) -> str:
    """With the order of keys, and 1 different from 1.0."""
    return json.dumps(value)
