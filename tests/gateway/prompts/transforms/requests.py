"""Generated chat requests in the notations of JSON that clients use, and recorded requests if available."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

ROOT = Path(__file__).parents[4]
SHARED = Path(os.environ.get("WARMPATH_SHARED", ROOT.parent / "shared"))
TAU_BENCH = SHARED / "traces" / "taubench_gpt-4o-airline.json"

Body = dict[str, Any]

CACHED = {"cache_control": {"type": "ephemeral"}}
LINES = (
    "You are a helpful airline agent.",
    "Today's date: 2026-11-20",
    "Current time: 2026-11-20T09:41:07Z",
    "Working directory: /home/ada/project",
    "Session id: 3f2a9c1e-7b54-4d2e-9d0a-0f6f2c1b7a11",
    "Refund only what was booked before 2024-05-16.",
    "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;",
    "x-request-id: 0123456789abcdef",
    "",
)

text = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(
    ('say "hi"\n', "naïve café", "日本語 \U0001f600", "a/b\\u0041\\", "\x1b[31mred\x7f", " padded ", "<b>&amp;</b>")
)
numbers = (
    st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from((1.0, 100.0))
)
scalars = st.none() | st.booleans() | numbers | text
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6
)
types = st.sampled_from(("string", "number", ["string", "null"]))
names = st.text("abcde_", min_size=1, max_size=4)
schemas = st.recursive(
    st.fixed_dictionaries({"type": types}, optional={"default": values}),
    lambda inner: st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(names, inner, max_size=3)},
        optional={"required": st.lists(st.sampled_from(("b", "a", "c")), unique=True), "description": text},
    ),
    max_leaves=5,
)
tools = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function"),
         "function": st.fixed_dictionaries({"name": st.text("abcdef_", min_size=1, max_size=8), "parameters": schemas},
                                           optional={"description": text})},
        optional={"cache_control": st.just(CACHED["cache_control"])},
    ),
    max_size=3,
)  # fmt: skip
parts = st.lists(
    st.builds(
        lambda words, more: {"type": "text", "text": words, **more}, text, st.sampled_from(({}, {}, {}, CACHED))
    )
    | st.just({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}),
    min_size=1, max_size=3,
)  # fmt: skip
system_text = st.lists(st.sampled_from(LINES), min_size=1, max_size=6).map("\n".join)
system_parts = st.lists(
    st.builds(
        lambda words, more: {"type": "text", "text": words, **more}, system_text, st.sampled_from(({}, {}, CACHED))
    ),
    min_size=1, max_size=3,
)  # fmt: skip
calls = st.lists(
    st.builds(
        lambda name, arguments, number: {
            "id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)},
        },
        st.text("abc_", min_size=1, max_size=5), st.dictionaries(st.text("ab", max_size=2), values, max_size=2),
        st.integers(0, 9),
    ),
    min_size=1, max_size=2,
)  # fmt: skip
messages = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": text | parts})
    | st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": text | parts},
        optional={
            "reasoning_content": text, "tool_calls": calls,
            "thinking_blocks": st.just([{"type": "thinking", "thinking": "hm\u00e9", "signature": "Eq/o\u002f=="}]),
        },
    )
    | st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": st.just("call_1"), "content": text | parts}),
    min_size=1, max_size=5,
)  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A request in the notation of some client."""
    body: Body = {"model": "m", "messages": draw(messages)}
    if draw(st.booleans()):
        body["messages"].insert(0, {"role": "system", "content": draw(system_text | system_parts)})
    if draw(st.booleans()):
        body["tools"] = draw(tools)
    if draw(st.booleans()):
        schema = {"name": "answer", "schema": draw(schemas)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return written(body, draw(st.integers(0, 4)))


def written(body: Any, style: int) -> bytes:
    """Compact, as Python's json, indented, ASCII only, or with escaped slashes as PHP does."""
    match style:
        case 0:
            return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
        case 1:
            return json.dumps(body).encode()
        case 2:
            return json.dumps(body, indent=2, ensure_ascii=False).encode("utf-8", "surrogatepass")
        case 3:
            return json.dumps(body, separators=(" , ", " : ")).encode()
        case _:
            return json.dumps(body).replace("/", "\\/").encode()


def recorded() -> list[Body]:
    """The requests of recorded conversations, one for each answer. Empty if the recording is not available."""
    if not TAU_BENCH.exists():
        return []
    turns: list[Body] = []
    for session in json.loads(TAU_BENCH.read_text("utf-8")):
        told = session["traj"]
        answers = [i for i, message in enumerate(told) if message["role"] == "assistant"]
        turns += [{"model": "m", "messages": told[:i]} for i in answers[::8] if i]
    return turns
