"""Each transform by example: what it changes, and what it does not."""

from __future__ import annotations

import json
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.endpoints import ENDPOINTS
from gateway.policy.traffic import OptIn
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.prompts.reader import read_fields
from gateway.prompts.transforms import OPT_IN, VERSION, SharedDecisions, TransformPipeline, TransformPlan
from gateway.prompts.transforms.chunk_order import MAX_RUNS
from gateway.types import Principal
from tests.gateway.calls import UNTRACED, a_call, a_policy
from tests.gateway.prompts.transforms.test_promises import canonical

BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch={};\n"


def canonical_form(body: dict[str, Any], *opt_in: str, pipeline: TransformPipeline | None = None, **plan: Any) -> Any:
    wanted = TransformPlan(VERSION, "full" if opt_in else "safe", opt_in, **plan)
    return json.loads(canonical(json.dumps({"model": "m", **body}).encode(), wanted, pipeline))


def system(content: Any, *opt_in: str, **more: Any) -> Any:
    body = {"messages": [{"role": "system", "content": content, **more}, {"role": "user", "content": "go"}]}
    return canonical_form(body, *opt_in)["messages"][0]["content"]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": sorted(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


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


HELLO = [{"role": "user", "content": "hi"}]
FIRST = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"b": {"type": "number", "minimum": 1}, "a": {"enum": ["y", "x"]}},
    "required": ["b", "a"]}}}  # fmt: skip
LATER = {"function": {"parameters": {
    "required": ["a", "b"], "properties": {"b": {"minimum": 1, "type": "number"}, "a": {"enum": ["y", "x"]}},
    "type": "object"}, "name": "f"}, "type": "function"}  # fmt: skip
SHUFFLED = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"a": {"enum": ["y", "x"]}, "b": {"type": "number", "minimum": 1}},
    "required": ["b", "a"]}}}  # fmt: skip


def tools_sent(*tools: Any, opt_in: tuple[str, ...] = ()) -> list[str]:
    """The tools of consecutive requests, as JSON with the order of keys."""
    pipeline = TransformPipeline(SharedDecisions())
    forms = [canonical_form({"messages": HELLO, "tools": [t]}, *opt_in, pipeline=pipeline)["tools"] for t in tools]
    return [json.dumps(form[0]) for form in forms]


def formats_sent(*schemas: Any, opt_in: tuple[str, ...] = ()) -> list[str]:
    """The response schemas of consecutive requests, as JSON with the order of keys."""
    pipeline = TransformPipeline(SharedDecisions())
    formats = [{"type": "json_schema", "json_schema": {"name": "n", "schema": schema}} for schema in schemas]
    forms = [
        canonical_form({"messages": HELLO, "response_format": f}, *opt_in, pipeline=pipeline)["response_format"]
        for f in formats
    ]
    return [json.dumps(form["json_schema"]["schema"]) for form in forms]


def test_schemas_with_one_meaning_take_the_first_form() -> None:
    assert tools_sent(FIRST, LATER) == [json.dumps(FIRST)] * 2
    assert formats_sent(FIRST["function"]["parameters"], LATER["function"]["parameters"]) == (
        [json.dumps(FIRST["function"]["parameters"])] * 2
    )


@pytest.mark.parametrize("strict", [{}, {"strict": False}, {"strict": True}])
def test_the_order_of_properties_is_meaning(strict: Any) -> None:
    """A model that may think before it answers gives another answer than one that must answer first."""
    one, other = (
        {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": sorted(names)}
        for names in (["reasoning", "answer"], ["answer", "reasoning"])
    )
    for nest in (
        lambda schema: schema,
        lambda schema: {"type": "object", "properties": {"steps": {"type": "array", "items": schema}}},
        lambda schema: {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}], "$defs": {"x": schema}},
    ):
        schemas = [nest(one), nest(other)]
        assert formats_sent(*schemas) == [json.dumps(schema) for schema in schemas]
        tools = [{"type": "function", "function": {"name": "f", "parameters": s, **strict}} for s in schemas]
        assert tools_sent(*tools) == [json.dumps(tool) for tool in tools]


def test_the_policy_may_ignore_the_order_of_properties() -> None:
    assert tools_sent(FIRST, SHUFFLED, opt_in=("property_order",)) == [json.dumps(FIRST)] * 2
    schemas = [tool["function"]["parameters"] for tool in (FIRST, SHUFFLED, LATER)]
    assert formats_sent(*schemas, opt_in=("property_order",)) == [json.dumps(schemas[0])] * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"enum": ["a", "b"]}, {"enum": ["b", "a"]}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"anyOf": [{"type": "null"}, {"type": "string"}]}),
        ({"type": ["string", "integer"]}, {"type": ["integer", "string"]}),
        ({"required": ["a", "b"]}, {"required": ["b", "a"]}),
        ({"default": {"required": ["a", "b"]}}, {"default": {"required": ["b", "a"]}}),
        ({"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}),
        ({"examples": [{"a": 1, "b": 2}]}, {"examples": [{"b": 2, "a": 1}]}),
        ({"x-unknown": {"a": 1, "b": 2}}, {"x-unknown": {"b": 2, "a": 1}}),
        ({"const": 1}, {"const": True}),
        ({"const": 1}, {"const": "1"}),
        ({"const": 1}, {"const": 1.0}),
        ({"maximum": 2**53 + 1}, {"maximum": float(2**53)}),
    ],
)
@pytest.mark.parametrize("opt_in", [(), ("property_order",)])
def test_schemas_with_different_meanings_stay_different(one: Any, other: Any, opt_in: tuple[str, ...]) -> None:
    assert formats_sent(one, other, opt_in=opt_in) == [json.dumps(one), json.dumps(other)]
    tools = [tool("f", a=schema) for schema in (one, other)]
    assert tools_sent(*tools, opt_in=opt_in) == [json.dumps(tool) for tool in tools]


@pytest.mark.parametrize("bad", [b'"type":"object","type":"object"', b'"type":"object","minLength":-0'])
def test_a_form_that_some_parsers_refuse_replaces_no_other(bad: bytes) -> None:
    pipeline = TransformPipeline(SharedDecisions())
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"tools":[{"name":"f","parameters":{%b}}]}'
    good = b'"type":"object"' + (b',"minLength":0' if b"-0" in bad else b"")
    for schema in (bad, good, bad):
        assert canonical(body % schema, TransformPlan(VERSION, "safe"), pipeline) == body % schema


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    pipeline = TransformPipeline(SharedDecisions())
    hello = [{"role": "user", "content": "hi"}]
    both = {"a": {}, "b": {}}
    one, other = (
        tool("f", default={"type": "object", "properties": both, "required": order})
        for order in (["a", "b"], ["b", "a"])
    )
    for tools in ([one], [other]):
        assert canonical_form({"messages": hello, "tools": tools}, pipeline=pipeline)["tools"] == [one]


@pytest.mark.parametrize(("group", "shared"), [(None, False), ("public", True)])
def test_first_forms_are_shared_within_a_cache_group_only(group: str | None, shared: bool) -> None:
    """Otherwise the token count of one tenant's schema would reveal what another tenant has sent."""
    policy = a_policy(tenants=[{"name": name, "cache_group": group} for name in "tu"])
    canonicaliser = Canonicaliser(b"secret")
    hello = [{"role": "user", "content": "hi"}]
    first = tool("f", b={"type": "string"})
    second = dict(reversed(first.items()))
    calls = [
        canonicaliser.canonicalise(
            ENDPOINTS[0], json.dumps({"model": "m", "messages": hello, "tools": [t]}).encode(), {}, call_id="c",
            principal=Principal(policy.tenants_by_name[name], "k"), policy=policy, now=0.0, trace=UNTRACED,
        )
        for name, t in (("t", first), ("u", second))
    ]  # fmt: skip
    assert (bytes(calls[0].fields["tools"]) == bytes(calls[1].fields["tools"])) is shared
    assert ("order_memo" in calls[1].canonical_steps) is shared


CLOCKED = "You are X.\nCurrent time: {}\nBe brief. Refund what was booked before 2024-05-16."


def test_volatile_lines_move_behind_stable_ones() -> None:
    assert system(CLOCKED.format("09:41:07"), "volatile_to_end") == (
        "You are X.\nBe brief. Refund what was booked before 2024-05-16.\nCurrent time: 09:41:07"
    )
    part = {"type": "text", "text": "Today is Friday, 20 November 2026"}
    rest = {"type": "text", "text": "You are X."}
    assert system([part, rest], "volatile_to_end") == [rest, part]


def test_a_sentence_moves_out_of_its_line() -> None:
    prose = "You are X. Today is Friday, 20 November 2026. Ask Mr. Smith about dates. Be brief."
    assert system(prose, "volatile_to_end") == (
        "You are X. Ask Mr. Smith about dates. Be brief.\nToday is Friday, 20 November 2026."
    )


def test_a_tag_moves_from_the_beginning() -> None:
    for tag in ("[3f2a9c1e]", "[session 3f2a9c1e]", "[2026-11-20T09:41:07Z]", "[req_8f3a2b1c9d]"):
        assert system(f"{tag} You are X.\nBe brief.", "volatile_to_end") == f"You are X.\nBe brief.\n{tag}"


def test_marks_move_only_from_the_beginning() -> None:
    """Elsewhere they may be entries of a list."""
    for text in ("Holidays:\n2026-12-25\n2026-12-26", "See [3f2a9c1e] for it.\n[3f2a9c1e] is a commit."):
        assert system(text, "volatile_to_end") == text
    assert system("\n[3f2a9c1e]\n1763631667\nYou are X.", "volatile_to_end") == "\nYou are X.\n[3f2a9c1e]\n1763631667"


def test_a_clock_moves_to_the_last_user_message() -> None:
    messages = [
        {"role": "system", "content": CLOCKED.format("2026-11-20T09:41:07Z")},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    told = canonical_form({"messages": messages}, "volatile_to_user")["messages"]
    assert told[0]["content"] == "You are X.\nBe brief. Refund what was booked before 2024-05-16."
    assert told[3]["content"] == [
        messages[3]["content"][0], {"type": "text", "text": "Current time: 2026-11-20T09:41:07Z"}
    ]  # fmt: skip
    assert [*told[1:3], told[4]] == [*messages[1:3], messages[4]]


def test_lines_never_move_backwards() -> None:
    clock = {"role": "system", "content": CLOCKED.format("2026-11-20T09:41:07Z")}
    marked = {"role": "user", "content": "go", "cache_control": {"type": "ephemeral"}}
    hello = {"role": "user", "content": "hi"}
    for messages in ([clock, hello, marked], [hello, clock, marked], [hello, clock]):
        assert canonical_form({"messages": messages}, "volatile_to_user")["messages"] == messages


@pytest.mark.parametrize(
    "line",
    [
        "Working directory: /home/ada/x",
        "cwd=C:\\Users\\ada",
        "Today's date is 11/20/2026.",
        "<current_datetime>2026-11-20 09:41</current_datetime>",
        "Session: 3f2a9c1e-7b54-4d2e-9d0a-0f6f2c1b7a11",
        "Request id: req_8f3a2b1c9d",
        "The current time is 2024-05-15 15:00:00 EST.",
        "timestamp: 1763631667",
        "epoch=1763631667.25",
        "It is Friday, the 20th of November 2026.",
        "It's November 20, 2026.",
        "Today is the twentieth of November.",
        "Today is November 20th.",
        "now: 1763631667123456789",
        "Run (3f2a9c1e)",
        "As of Nov. 20th, 2026, you are on duty.",
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-request-id: 5f2b7c1a-9f3e-4c55-8d0e-1c2d3e4f5a6b",
        "[1763631667]",
        "[3f2a9c1e]",
        "2026-11-20 09:41",
    ],
)
def test_volatile_lines(line: str) -> None:
    assert system(f"{line}\nYou are X.", "volatile_to_end") == f"You are X.\n{line}"


@pytest.mark.parametrize(
    "line",
    [
        "Refund what was booked before 2024-05-16.",
        "Python 3.11 has a time module, and /v1/chat is no folder.",
        "Flights leave at 09:15 from gate 4.",
        "The id of a user is a name and a number, as in mia_li_3668.",
        "Update the record sometimes.",
        "current " * 30 + "2026-11-20",
        "It is important that the flight was booked before 2024-05-16.",
        "It is 3 days before 2024-05-16.",
        "Written on the 20th of November.",
        "In May 5 people may fly.",
        "Agent #a3f9c21b",
        "The current budget of Marketing 20 is spent.",
        "Friday",
        "[1]",
        "[draft] You write letters.",
        "/home/ada/project",
    ],
)
def test_lines_that_are_not_volatile(line: str) -> None:
    assert system(f"{line}\nYou are X.", "volatile_to_end") == f"{line}\nYou are X."


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


def chunk(number: int, name: str = "document", words: str = "text") -> str:
    return f"<{name} rank='' id=\"{number}\">{words} {number}</{name}>"


def asked(content: Any, pipeline: TransformPipeline, role: str = "user") -> Any:
    body = {"messages": [{"role": role, "content": content}, {"role": "user", "content": "go"}]}
    return canonical_form(body, "chunk_order", pipeline=pipeline)["messages"][0]["content"]


def test_the_same_chunks_take_the_order_that_was_seen_first() -> None:
    pipeline = TransformPipeline(SharedDecisions())
    first = f"Answer from these:\n{chunk(3)}\n\n{chunk(1)} {chunk(2)}\nWhy?"
    assert asked(first, pipeline) == first
    assert asked(f"Use:{chunk(1)} {chunk(2)}\n{chunk(3)}\nHow?", pipeline) == (
        f"Use:{chunk(3)} {chunk(1)}\n{chunk(2)}\nHow?"
    )
    assert asked(f"{chunk(1)}{chunk(2)}", pipeline) == f"{chunk(1)}{chunk(2)}", "another set has an order of its own"
    twice = [f"{chunk(1)}{chunk(1)}{chunk(2)}", f"{chunk(1)}{chunk(2)}{chunk(1)}"]
    assert [asked(text, pipeline) for text in twice] == twice[:1] * 2
    apart = f"{chunk(2)} and {chunk(1)}"
    assert asked(apart, pipeline) == apart, "words between two chunks make them two runs"
    assert asked(f"{chunk(2)} {chunk(1)}", TransformPipeline(SharedDecisions())) == f"{chunk(2)} {chunk(1)}"


def test_chunks_in_parts_of_their_own() -> None:
    pipeline = TransformPipeline(SharedDecisions())
    one, two, three = ({"type": "text", "text": f"\n{chunk(n, 'chunk')}\n"} for n in (1, 2, 3))
    words, image = {"type": "text", "text": "Why?"}, {"type": "image_url", "image_url": {"url": "http://x.invalid/y"}}
    assert asked([words, two, one, image, three], pipeline) == [words, two, one, image, three]
    assert asked([one, two, words], pipeline) == [two, one, words]
    marked = {**two, "cache_control": {"type": "ephemeral"}}
    for parts in ([marked, one, words], [one, marked, words]):
        assert asked(parts, pipeline) == parts, "a part with a cache breakpoint stays"


@pytest.mark.parametrize(
    "text",
    [
        "<document index='2'>b</document><document index='1'>a</document>",
        "<doc id=''>b</doc><doc id=''>a</doc>",
        "<document id='2'>b <document id='1'>a</document></document><document id='0'>c</document>",
        "<file id='2'>b</file><file id='1'>a</file>",
        "<document id='2'/><document id='1'/>",
        "<document id='2'>b\n\n<document id='1'>a",
        "b</document></document>a",
        "[2] b\n\n[1] a",
    ],
)
def test_text_without_marks_is_never_touched(text: str) -> None:
    pipeline = TransformPipeline(SharedDecisions())
    half = len(text) // 2
    for form in (text, text[half:] + text[:half], "\n\n".join(reversed(text.split("\n\n")))):
        assert asked(form, pipeline) == form


def test_elements_in_elements_of_their_name_have_no_clear_end_and_stay() -> None:
    pipeline = TransformPipeline(SharedDecisions())
    nested = f"<document id='9'>{chunk(1)}"
    for text in (nested + chunk(2), chunk(2) + nested):
        assert asked(text, pipeline) == text
    inner = [f"<document>{chunk(n, 'passage')}{chunk(3 - n, 'passage')}</document>" for n in (1, 2)]
    assert [asked(text, pipeline) for text in inner] == inner[:1] * 2


def test_chunks_in_answers_and_tool_results_stay() -> None:
    pipeline = TransformPipeline(SharedDecisions())
    asked(chunk(1) + chunk(2), pipeline)
    for role in ("assistant", "tool"):
        assert asked(chunk(2) + chunk(1), pipeline, role) == chunk(2) + chunk(1)
    assert asked(chunk(2) + chunk(1), pipeline, "system") == chunk(1) + chunk(2)


def test_many_unclosed_chunks_take_no_longer_than_they_are_long() -> None:
    """A quadratic search would take hours."""
    text = "<doc id='1'>" * 100_000 + "<chunk " * 100_000
    assert asked(text, TransformPipeline(SharedDecisions())) == text
    runs = " x ".join(f"{chunk(n)}{chunk(-n)}" for n in range(1, MAX_RUNS + 2))
    pipeline = TransformPipeline(SharedDecisions())
    asked(runs, pipeline)
    turned = " x ".join(f"{chunk(-n)}{chunk(n)}" for n in range(1, MAX_RUNS + 2))
    last = f"{chunk(-MAX_RUNS - 1)}{chunk(MAX_RUNS + 1)}"
    assert asked(turned, pipeline) == f"{runs.rpartition(' x ')[0]} x {last}"


@given(
    chunks=st.lists(st.integers(0, 9), min_size=2, max_size=8),
    order=st.randoms(use_true_random=False),
    around=st.tuples(*[st.text("ab \n<>/\x1bé", max_size=5)] * 2),
)
@settings(max_examples=60)
def test_only_marked_chunks_move_and_none_is_lost(chunks: list[int], order: Random, around: tuple[str, str]) -> None:
    pipeline = TransformPipeline(SharedDecisions())
    shuffled = order.sample(chunks, len(chunks))
    before, after = around
    one, other = (
        asked(f"{before} {' '.join(map(chunk, numbers))} {after}", pipeline) for numbers in (chunks, shuffled)
    )
    assert one == other == f"{before} {' '.join(map(chunk, chunks))} {after}"


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
