"""Hypothesis strategies for request bodies of the Messages and Responses APIs, valid ones and mutated ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]
Found = st.SearchStrategy[Any]

text = st.sampled_from(("", "hi", "naïve 日本語 \U0001f600", 'say "error"\n', "\x00\x7f", "data: [DONE]"))
names = st.sampled_from(("look", "ask_2", "mcp-x"))
ids = st.sampled_from(("c1", "toolu_01", "call|fc_1"))
schemas = st.sampled_from(({"type": "object"}, {"type": "object", "properties": {"a": {"enum": ["é", 1.0]}}}))
mark = st.sampled_from((None, {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h", "scope": "global"}))
IMAGE = "data:image/png;base64,iVBORw0KGgo="


# Anthropic's Messages API

sources = st.sampled_from(
    ({"type": "base64", "media_type": "image/png", "data": "iVBO"}, {"type": "url", "url": "https://x.invalid/a.png"})
)
texts = st.fixed_dictionaries({"type": st.just("text"), "text": text}, optional={"cache_control": mark})
images = st.fixed_dictionaries({"type": st.just("image"), "source": sources}, optional={"cache_control": mark})
files = st.fixed_dictionaries(
    {
        "type": st.just("document"),
        "source": st.sampled_from(
            (
                {"type": "base64", "media_type": "application/pdf", "data": "JVBE"},
                {"type": "text", "media_type": "text/plain", "data": "said"},
            )
        ),
    },
    optional={"title": text, "citations": st.just({"enabled": False})},
)
shown = texts | images | files
results = st.fixed_dictionaries(
    {"type": st.just("tool_result"), "tool_use_id": ids},
    optional={"content": text | st.lists(shown, max_size=2), "is_error": st.booleans(), "cache_control": mark},
)
calls = st.fixed_dictionaries(
    {"type": st.just("tool_use"), "id": ids, "name": names, "input": st.sampled_from(({}, {"a": "é"}))},
    optional={"cache_control": mark, "caller": st.just({"type": "direct"})},
)
thinking = st.sampled_from(
    (
        {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "redacted_thinking", "data": "c2VjcmV0"},
    )
)
turns = st.one_of(
    st.builds(lambda content: {"role": "user", "content": content}, text | st.lists(shown | results, max_size=3)),
    st.builds(
        lambda content: {"role": "assistant", "content": content}, text | st.lists(texts | calls | thinking, max_size=4)
    ),
    st.builds(lambda content: {"role": "system", "content": content}, text | st.lists(texts, max_size=2)),
)
tools = st.fixed_dictionaries(
    {"name": names, "input_schema": schemas},
    optional={"description": text, "type": st.just("custom"), "strict": st.booleans(), "cache_control": mark},
)
messages_bodies = st.fixed_dictionaries(
    {"model": st.just("m"), "max_tokens": st.sampled_from((1, 2**31 - 1)),
     "messages": st.lists(turns, min_size=1, max_size=4)},
    optional={
        "system": text | st.lists(texts, max_size=2),
        "tools": st.lists(tools, max_size=2),
        "tool_choice": st.sampled_from(
            ({"type": "auto"}, {"type": "any", "disable_parallel_tool_use": True}, {"type": "none"},
             {"type": "tool", "name": "look"})
        ),
        "thinking": st.sampled_from(
            ({"type": "enabled", "budget_tokens": 9}, {"type": "adaptive", "display": "omitted"}, {"type": "disabled"})
        ),
        "output_config": st.sampled_from(
            ({"effort": "xhigh"}, {"format": {"type": "json_schema", "schema": {"type": "object"}}}, {})
        ),
        "stop_sequences": st.lists(text, max_size=2),
        "temperature": st.sampled_from((0, 0.5, 1.0)),
        "top_p": st.just(0.9),
        "top_k": st.just(5),
        "stream": st.booleans(),
        "metadata": st.sampled_from(({"user_id": "u"}, {})),
        "service_tier": st.sampled_from(("auto", "standard_only")),
        "cache_control": mark,
        "context_management": st.just({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    },
)  # fmt: skip

# OpenAI's Responses API

input_texts = st.fixed_dictionaries(
    {"type": st.just("input_text"), "text": text}, optional={"prompt_cache_breakpoint": st.just({"mode": "explicit"})}
)
input_parts = input_texts | st.sampled_from(
    (
        {"type": "input_image", "image_url": IMAGE, "detail": "low"},
        {"type": "input_file", "file_data": "data:application/pdf;base64,JVBE", "filename": "a.pdf"},
    )
)
output_parts = st.sampled_from(
    (
        {"type": "output_text", "text": "said é", "annotations": [], "logprobs": []},
        {"type": "refusal", "refusal": "no"},
    )
)
items = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("user", "system", "developer")), "content": text | st.lists(input_parts, max_size=3)},
        optional={"type": st.just("message")},
    ),
    st.fixed_dictionaries(
        {"type": st.just("message"), "role": st.just("assistant"),
         "content": text | st.lists(output_parts, max_size=2)},
        optional={"id": ids, "status": st.just("completed")},
    ),
    st.fixed_dictionaries(
        {"type": st.just("function_call"), "call_id": ids, "name": names,
         "arguments": st.sampled_from(("{}", '{"a":1}'))},
        optional={"id": ids, "namespace": st.just("crm")},
    ),
    st.fixed_dictionaries(
        {"type": st.just("function_call_output"), "call_id": ids, "output": text | st.lists(input_parts, max_size=2)}
    ),
    st.fixed_dictionaries(
        {"type": st.just("reasoning"), "summary": st.just([])},
        optional={"content": st.just([{"type": "reasoning_text", "text": "hm"}]), "id": ids},
    ),
)  # fmt: skip
functions = st.fixed_dictionaries(
    {"type": st.just("function"), "name": names},
    optional={"parameters": schemas, "description": text, "strict": st.booleans() | st.none()},
)
responses_bodies = st.fixed_dictionaries(
    {
        "model": st.just("m"),
        "input": text | st.lists(items, max_size=5).map(lambda rest: [{"role": "user", "content": "hi"}, *rest]),
    },
    optional={
        "instructions": text | st.none(),
        "tools": st.lists(functions, max_size=2, unique_by=lambda tool: tool["name"]),
        "tool_choice": st.sampled_from(("auto", "none")),
        "parallel_tool_calls": st.booleans(),
        "max_output_tokens": st.integers(0, 2**31 - 1),
        "temperature": st.sampled_from((0, 1.0)),
        "reasoning": st.sampled_from(({"effort": "minimal"}, {"effort": "none", "summary": "auto"}, {}, None)),
        "text": st.sampled_from(
            ({"format": {"type": "text"}}, {"format": {"type": "json_object"}}, {"verbosity": "medium"},
             {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}})
        ),
        "include": st.sampled_from(([], ["reasoning.encrypted_content"], ["message.output_text.logprobs"])),
        "top_logprobs": st.sampled_from((0, 2)),
        "stream": st.booleans(),
        "stream_options": st.sampled_from(({}, {"include_obfuscation": True}, {"include_obfuscation": False})),
        "store": st.just(False),
        "metadata": st.just({"a": "b"}),
        "user": text,
        "prompt_cache_key": text,
        "service_tier": st.sampled_from(("auto", "flex", "priority")),
        "truncation": st.sampled_from(("disabled", None)),
    },
)  # fmt: skip

# Mutations

junk: st.SearchStrategy[Any] = st.sampled_from(
    (None, True, -1, 1.5, 10**30, "", "x", "\ud800", [], {}, [[]], [None], {"type": "x"}, {"type": 5})
)


def _positions(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each value inside, as its container and its key."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _positions(value[key])


@st.composite
def mutated(draw: st.DrawFn, bodies: Found) -> bytes:
    """Return a body as JSON with up to two random mutations. Some results are still valid."""
    body = copy.deepcopy(draw(bodies))
    for _ in range(draw(st.integers(0, 2))):
        if not (positions := list(_positions(body))):
            break
        holder, key = draw(st.sampled_from(positions))
        match draw(st.sampled_from(("replace", "drop", "double", "add"))):
            case "replace":
                holder[key] = copy.deepcopy(draw(junk))
            case "drop":
                del holder[key]
            case "double" if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            case _ if isinstance(holder, dict):
                holder[draw(st.sampled_from(("type", "extra", "name", "content", "id")))] = copy.deepcopy(draw(junk))
    return json.dumps(body).encode()
