"""What each transform changes in the prompts of model families: nothing, or exactly what its documentation says."""

from __future__ import annotations

import json
import re
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompts.transforms import VERSION, SharedDecisions, TransformPipeline, TransformPlan
from tests.gateway.prompts.transforms.dialects import CHAT, DIALECTS, TOOL, Dialect
from tests.gateway.prompts.transforms.requests import bodies, parts, written
from tests.gateway.prompts.transforms.requests import text as texts
from tests.gateway.prompts.transforms.schemas import meaning, object_schema, reordered, tool_of, without_order
from tests.gateway.prompts.transforms.test_promises import canonical

SAFE = TransformPlan(VERSION, "safe")
BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={:05x};"
each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
randoms = st.integers(0, 2**32 - 1).map(Random)


def body_of(messages: Any, tools: Any = None, **fields: Any) -> bytes:
    return written({"model": "m", "messages": messages, **({"tools": tools} if tools else {}), **fields}, 0)


def second_form(first: bytes, second: bytes, plan: TransformPlan = SAFE) -> bytes:
    """What a deployment gets for the second of two requests."""
    pipeline = TransformPipeline(SharedDecisions())
    canonical(first, plan, pipeline)
    return canonical(second, plan, pipeline)


@each_dialect
def test_a_conversation_with_tools_is_rendered(dialect: Dialect) -> None:
    """The following tests do not compare refusals only, and tools are printed as `prints_tools` says."""
    prompt = dialect.prompt(body_of(dialect.conversation, [TOOL]))
    assert not prompt.startswith("refused"), prompt
    assert ("And now?" in prompt) is dialect.reads_text
    assert ("city" in prompt, "properties" in prompt) == {
        "as JSON": (True, True), "as a list of properties": (True, False), "not": (False, False),
    }[dialect.prints_tools]  # fmt: skip


@each_dialect
@given(random=randoms)
@settings(max_examples=40)
def test_order_memo_changes_only_the_order_of_keys(dialect: Dialect, random: Random) -> None:
    """The same words, with properties, alternatives and values in the same order."""
    tools = [tool_of(object_schema(random), random, strict=random.random() < 0.5) for _ in range(2)]
    others = [reordered(tool, random) for tool in tools]
    messages = dialect.conversation
    form = second_form(body_of(messages, tools), body_of(messages, others))
    assert json.dumps(json.loads(form)["tools"]) == json.dumps(tools)
    before, after = dialect.prompt(body_of(messages, others)), dialect.prompt(form)
    assert Counter(before) == Counter(after)
    if dialect.prints_tools != "as JSON":
        assert before == after
    assert _ordered_words(before) == _ordered_words(after)
    assert before.rpartition("And now?")[2] == after.rpartition("And now?")[2]


@given(random=randoms)
@settings(max_examples=150)
def test_order_memo_replaces_only_forms_of_one_meaning(random: Random) -> None:
    first = tool_of(object_schema(random), random)
    other = without_order(first, random) if random.random() < 0.5 else reordered(first, random)
    form = json.loads(second_form(body_of(CHAT, [first]), body_of(CHAT, [other])))["tools"][0]
    assert meaning(form) == meaning(other)
    assert json.dumps(form) == json.dumps(first if meaning(first) == meaning(other) else other)


@each_dialect
def test_property_order_changes_what_a_model_reads(dialect: Dialect) -> None:
    """So it is no part of level `safe`."""
    names = ["reasoning", "answer"]
    one, other = (
        tool_of(
            {"type": "object", "properties": {name: {"type": "string", "description": "words"} for name in order}},
            Random(1),
        )
        for order in (names, names[::-1])
    )
    first, second = (body_of(dialect.conversation, [tool]) for tool in (one, other))
    assert dialect.prompt(second_form(first, second)) == dialect.prompt(second)
    ignored = second_form(first, second, TransformPlan(VERSION, "full", ("property_order",)))
    assert dialect.prompt(ignored) == dialect.prompt(first)
    assert (dialect.prompt(first) == dialect.prompt(second)) is (dialect.prints_tools == "not")


@each_dialect
@given(content=texts.filter(str.strip) | parts, number=st.integers(0, 2**20 - 1), data=st.data())
@settings(max_examples=30)
def test_noise_is_the_prompt_without_the_line(dialect: Dialect, content: Any, number: int, data: st.DataObject) -> None:
    line = BILLING.format(number)
    if isinstance(content, str):
        noisy: Any = f"{line}\n{content}"
    else:
        noisy = [{"type": "text", "text": data.draw(st.sampled_from((line, f"{line}\n")))}, *content]
    quiet, loud = (body_of([{"role": "system", "content": each}, *CHAT[1:]]) for each in (content, noisy))
    form = canonical(loud, SAFE)
    assert dialect.prompt(form) == dialect.prompt(canonical(quiet, SAFE)) == dialect.prompt(quiet)
    assert dialect.ids(form) == dialect.ids(quiet)


@each_dialect
@given(body=bodies())
@settings(max_examples=40)
def test_level_safe_changes_no_prompt_without_noise(dialect: Dialect, body: bytes) -> None:
    """The first request with its tools, with noise only where it may not be removed."""
    asked = json.loads(body)
    system = asked["messages"][0]
    if system["role"] == "system":
        system["content"] = (
            f"You are X.\n{system['content']}"
            if isinstance(system["content"], str)
            else [{"type": "text", "text": "You are X."}, *system["content"]]
        )
    asked = written(asked, 1)
    assert dialect.prompt(canonical(asked, SAFE)) == dialect.prompt(asked)


@each_dialect
def test_tool_order_and_template_date(dialect: Dialect) -> None:
    tools = [tool_of({"type": "object", "properties": {"a": {}}}, Random(seed)) for seed in (1, 2, 3)]
    in_order = sorted(tools, key=lambda tool: tool["function"]["name"])
    assert in_order != tools
    form = canonical(body_of(dialect.conversation, tools), TransformPlan(VERSION, "full", ("tool_order",)))
    assert dialect.prompt(form) == dialect.prompt(body_of(dialect.conversation, in_order))

    undated = body_of(CHAT[1:])
    asked = body_of(CHAT[1:], chat_template_kwargs={"date_string": "20 Nov 2026"})
    dated = canonical(undated, TransformPlan(VERSION, "full", ("template_date",), "20 Nov 2026"))
    assert dialect.prompt(dated) == dialect.prompt(asked)
    one, other = (re.sub(r"\d\d \w{3} \d{4}|(?<=Date: )unknown", "", dialect.prompt(b)) for b in (dated, undated))
    assert one == other


def _ordered_words(prompt: str) -> list[str]:
    """The generated names of properties and the keys of data, where they are defined, in order."""
    return re.findall(r"\b([pza]\d+)\"?\??: ?", prompt)
