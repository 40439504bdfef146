"""Transforms by example: what they change, and what they do not.

`test_order_of_keys.py`, `test_volatile_lines.py` and `test_chunk_order.py` have the transforms with many examples.
"""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from gateway.policy.traffic import OptIn
from gateway.prompts.reader import read_fields
from gateway.prompts.transforms import OPT_IN, VERSION, TransformPlan
from tests.gateway.calls import a_call, a_policy
from tests.gateway.prompts.transforms.forms import canonical_form, system, tool
from tests.gateway.prompts.transforms.test_promises import canonical

BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch={};\n"


def test_the_policy_lists_the_opt_in_transforms() -> None:
    assert set(get_args(OptIn)) == set(OPT_IN)


def test_each_billing_line_of_the_coding_agent_is_removed() -> None:
    """As one of several parts, and at the beginning of a text."""
    told = [system([{"type": "text", "text": BILLING.format(n)}, {"type": "text", "text": "You are X."}]) for n in "ab"]
    assert told == [[{"type": "text", "text": "You are X."}]] * 2
    assert system(BILLING.format("36ee5") + "You are X.") == "You are X."
    assert system(BILLING.format("1").rstrip() + "\r\nYou are X.\n") == "You are X.\n"


def test_the_billing_line_of_other_versions_is_removed() -> None:
    """With more fields, with fewer, and in the notation of HTTP."""
    for line in (
        "x-anthropic-billing-header: cc_version=2.1.37.3a3; cc_entrypoint=cli;",
        "x-anthropic-billing-header: cc_version=2.1.200; cc_entrypoint=vscode; cch=0; cc_workload=cron;",
        "X-Anthropic-Billing-Header: cc_version=2.1.37.3a3; cc_entrypoint=cli; cch=36ee5;",
    ):
        assert system(f"{line}\nYou are X.") == "You are X."


@pytest.mark.parametrize(
    "line",
    [
        "x-anthropic-style: formal",
        "x-anthropic-billing-header: explain it",
        "x-anthropic-billing-header: cc_version=2.1.37.3a3; cc_entrypoint=cli; Explain this line.",
        "Explain x-anthropic-billing-header: cc_version=2.1.37.3a3; cc_entrypoint=cli; cch=36ee5;",
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-request-id: 5f2b7c1a-9f3e-4c55-8d0e-1c2d3e4f5a6b",
    ],
)
def test_text_that_looks_like_a_header_is_kept(line: str) -> None:
    for kept in (f"{line}\nYou are X.", [{"type": "text", "text": line}, {"type": "text", "text": "You are X."}]):
        assert system(kept) == kept


def test_noise_is_removed_only_where_the_client_puts_it() -> None:
    said = BILLING.format("1") + "hi"
    messages = [{"role": role, "content": said} for role in ("user", "system", "assistant", "developer", "tool")]
    assert canonical_form({"messages": messages})["messages"] == messages
    for kept in (
        f"You are X.\n{said}",
        f" {said}",
        BILLING.format("1"),
        [{"type": "text", "text": "You are X."}, {"type": "text", "text": said}],
        [{"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}],
    ):
        assert system(kept) == kept
    assert system(said, cache_control={"type": "ephemeral"}) == said


@pytest.mark.parametrize("length", [0, 1, 4_000, 16_300, 16_350, 16_400, 70_000])
@pytest.mark.parametrize("words", ["x", "é", "日本", '"}]\\', "😀"])
def test_the_other_messages_keep_their_bytes(length: int, words: str) -> None:
    """Only the first message is parsed, wherever its end is."""
    stable = (words * length)[:length] + "You are X."
    others = r'{ "role":"user", "content":"h\u0069" },{"role":"assistant","content":null,"x":1.50}'
    first = json.dumps({"role": "system", "content": BILLING.format(1) + stable}, ensure_ascii=False)
    body = f'{{"model":"m","messages":[{first},{others}]}}'.encode()
    form = bytes(read_fields(canonical(body, TransformPlan(VERSION, "safe")))["messages"])
    kept, _, rest = form.partition(b",{ ") if form.count(b"{ ") else form.partition(b',{"role":"user"')
    assert json.loads(kept.removeprefix(b"[")) == {"role": "system", "content": stable}
    assert json.loads(form)[1:] == json.loads(f"[{others}]")
    assert b"1.50" in rest


@pytest.mark.parametrize("length", [1, 200_000])
def test_roles_and_keys_may_be_written_with_escapes(length: int) -> None:
    """Also in a long prompt, whose JSON is not rewritten as a whole."""
    text = json.dumps(BILLING.format("1") + "Current time: 09:41\nYou are X.").replace("-", r"\u002d")
    parts = r'[{"t\u0079pe":"text","text":' + text + "}]"
    said = json.dumps("x" * length)
    plan = TransformPlan(VERSION, "full", ("volatile_to_user",))
    for content in (text, parts):
        turns = (("syst\\u0065m", content), ("us\\u0065r", said), ("\\u0061ssistant", text), ("us\\u0065r", said))
        written = ",".join(r'{"r\u006fle":"' + role + r'","c\u006fntent":' + content + "}" for role, content in turns)
        body = '{"model":"m","messages":[' + written + "]}"
        told = json.loads(canonical(body.encode(), plan))["messages"]
        assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
        assert told[0]["content"] in ("You are X.", [{"type": "text", "text": "You are X."}])
        assert told[2]["content"] == json.loads(text)
        assert told[3]["content"] == "x" * length + "\n\nCurrent time: 09:41"


def test_an_escaped_cache_breakpoint_is_a_breakpoint() -> None:
    marked = {"type": "text", "text": "Current time: 09:41", "cache_control": {"type": "ephemeral"}}
    content = [marked, {"type": "text", "text": "You are X."}]
    plain = json.dumps({"model": "m", "messages": [{"role": "system", "content": content}]})
    body = plain.replace("cache_control", r"cache\u005fcontrol")
    kept = json.loads(body)["messages"]
    assert (
        json.loads(canonical(body.encode(), TransformPlan(VERSION, "full", ("volatile_to_end",))))["messages"] == kept
    )


@pytest.mark.parametrize("number", ["-0", "-0.0", "1.50", "1E5", "123456789012345678901234567890"])
def test_numbers_keep_their_notation(number: str) -> None:
    """Also where escapes are removed. Python prints the integer -0 as 0, Rust and JavaScript do not."""
    body = r'{"model":"m","messages":[{"role":"user","content":"hi"}],"tools":[{"d":"\u00e9","n":[' + number + "]}]}"
    assert f'"n":[{number}]' in canonical(body.encode(), TransformPlan(VERSION, "safe")).decode()


def test_tools_are_sorted_by_name() -> None:
    hello = [{"role": "user", "content": "hi"}]
    tools = [tool("b"), tool("a"), {"type": "custom", "name": "aa"}]
    names = [
        t.get("function", t)["name"] for t in canonical_form({"messages": hello, "tools": tools}, "tool_order")["tools"]
    ]
    assert names == ["a", "aa", "b"]
    marked = [tool("b"), {**tool("a"), "cache_control": {"type": "ephemeral"}}]
    assert canonical_form({"messages": hello, "tools": marked}, "tool_order")["tools"] == marked


def test_template_date() -> None:
    hello = [{"role": "user", "content": "hi"}]
    told = canonical_form({"messages": hello}, "template_date", template_date="26 Jul 2024")
    assert told["chat_template_kwargs"] == {"date_string": "26 Jul 2024"}
    own = {"chat_template_kwargs": {"date_string": "1 Jan 2020", "x": 1.50}}
    assert canonical_form({"messages": hello, **own}, "template_date", template_date="26 Jul 2024") == {
        "model": "m", "messages": hello, **own
    }  # fmt: skip


@pytest.mark.parametrize("length", [10, 300_000])
def test_long_prompts_are_not_rewritten_without_effect(length: int) -> None:
    """Spaces between JSON tokens change neither the prompt nor its fingerprint, if all content is text.

    A short prompt is rewritten nevertheless, so that equal prompts are equal bytes; a long one is not.
    """
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * length}]}).encode()
    form = bytes(read_fields(canonical(body, TransformPlan(VERSION, "safe")))["messages"])
    assert (b": " in form) is (length > 10)
    noisy = [{"role": "system", "content": BILLING.format(1) + "You are X."}, {"role": "user", "content": "x" * length}]
    assert canonical_form({"messages": noisy})["messages"][0]["content"] == "You are X."


def test_levels_apply_by_tenant_and_model() -> None:
    policy = a_policy(
        canonicalise={
            "level": "safe",
            "exceptions": [
                {"tenant": "u", "level": "off"},
                {"model": "m", "tenant": ["t"], "level": "full", "opt_in": ["volatile_to_end"]},
            ],
        },
        tenants=[{"name": name} for name in "tuv"],
    )
    messages = [{"role": "system", "content": f"{BILLING.format(1)}Current time: 09:41\nYou are X."}]
    steps = {name: a_call({"model": "m", "messages": messages}, policy, tenant=name).canonical_steps for name in "tuv"}
    assert steps == {"t": ("json_form", "noise", "volatile_to_end"), "u": (), "v": ("json_form", "noise")}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"opt_in": ["tool_order"]}, "opt_in needs level: full"),
        ({"level": "full", "opt_in": ["sort"]}, "Input should be"),
        ({"level": "full", "opt_in": ["template_date"]}, "template_date must be set if opt_in names it, and only then"),
        ({"template_date": "26 Jul 2024"}, "template_date must be set if opt_in names it, and only then"),
        ({"exceptions": [{"tenant": "unknown"}]}, "there is no tenant 'unknown'"),
        ({"exceptions": [{"model": "alias"}]}, "there is no model 'alias'"),
    ],
)
def test_a_contradictory_policy_is_refused(form: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        a_policy(canonicalise=form)
