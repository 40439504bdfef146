"""Every format of tool calls and reasoning: parsing of whole outputs, and independence of how text is split."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.parsers import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format
from backend.parsers.base import CallableTool, ContentText, OutputEvent, ReasoningText, ToolCallArguments, ToolCallStart
from backend.parsers.chained import ChainedParser
from tests.tool_calls import written

TYPED = {
    "code": {"type": "string"},
    "n": {"$ref": "#/$defs/number"},
    "on": {"enum": [True, False]},
    "any": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOLS = [
    CallableTool("weather", {"type": "object"}),
    CallableTool("now"),
    CallableTool("typed", {"type": "object", "properties": TYPED, "$defs": {"number": {"type": ["number"]}}}),
]
ZIP = '{"zip": "8004", "deep": {"a": [1, "}]\\"{"]}}'
W, N = '{"name": "weather", "arguments": ' + ZIP + "}", '{"name": "now", "arguments": {}}'
THOUGHT = "<think>\nLet me see: <b>.\n\nYes.\n</think>\n\n"


@dataclass(frozen=True)
class Parsed:
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""


SEVENS = "<parameter=n>7</parameter><parameter=code>7</parameter>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
TO = "<|channel|>commentary to=functions."
BOTH = (("weather", ZIP), ("now", "{}"))
# By format: outputs as models write them, well-formed and malformed, and the expected result.
CASES: dict[str, dict[str, Parsed]] = {
    "hermes": {
        "Nothing to call. \n": Parsed("Nothing to call. \n"),
        f"<tool_call>\n{W}\n</tool_call>": Parsed("", BOTH[:1]),
        f"Sure!\n\n<tool_call>\n{W}\n</tool_call>\n<tool_call>{N}</tool_call>\n": Parsed("Sure!", BOTH),
        f"<tool_call>{N}</tool_call> and then\n": Parsed(" and then", BOTH[1:]),
        '<tool_call>{"arguments": {"x": 1}, "name": "now"}</tool_call>': Parsed("", (("now", '{"x": 1}'),)),
        '<tool_call>{"name": "now"}</tool_call>': Parsed("", (("now", "{}"),)),
        '<tool_call>{"name": "now", "arguments": "{\\"x\\": \\"\\u00e9\\"}"}</tool_call>': Parsed(
            "", (("now", '{"x": "é"}'),)
        ),
        '<tool_call>{"name": "now", "arguments": null, "id": 7}</tool_call>': Parsed("", (("now", "{}"),)),
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>': Parsed("", (("other", "{}"),)),
        "a <tool_call> is <not> JSON </tool_call>": Parsed("a <tool_call> is <not> JSON </tool_call>"),
        '<tool_call>{"nom": "now"}</tool_call> x': Parsed('<tool_call>{"nom": "now"}</tool_call> x'),
        '<tool_call>{"name": "weather", "arguments": {"zip": "80': Parsed("", (("weather", '{"zip": "80'),)),
        '<tool_call>\n{"name": "wea': Parsed('<tool_call>\n{"name": "wea'),
        f"<tool_call>{N}</tool_c": Parsed("", BOTH[1:]),
        "1 < 2 <tool": Parsed("1 < 2 <tool"),
    },
    "llama3": {
        "Nothing to call. \n": Parsed("Nothing to call. \n"),
        W: Parsed("", BOTH[:1]),
        '\n{"name": "weather", "parameters": ' + ZIP + "}; " + N: Parsed("", BOTH),
        f"<|python_tag|>{W}\n{N}": Parsed("", BOTH),
        f"Let me look. <|python_tag|>{W}": Parsed("Let me look.", BOTH[:1]),
        '{"type": "function", "name": "now", "parameters": {}}': Parsed("", BOTH[1:]),
        '{"answer": 42}': Parsed('{"answer": 42}'),
        '{"name": "Ada", "age": 36}': Parsed('{"name": "Ada", "age": 36}'),
        '{"name": {"first": "Ada"}}': Parsed('{"name": {"first": "Ada"}}'),
        " [1, 2]": Parsed(" [1, 2]"),
        '<|python_tag|>search.call(query="x")': Parsed('<|python_tag|>search.call(query="x")'),
        '{"name": "weather", "parameters": {"zip"': Parsed("", (("weather", '{"zip"'),)),
        f"{N};": Parsed("", BOTH[1:]),
    },
    "mistral": {
        "Nothing to call. \n": Parsed("Nothing to call. \n"),
        f"[TOOL_CALLS][{W}, {N}]": Parsed("", BOTH),
        f"Sure.[TOOL_CALLS] [{W}]": Parsed("Sure.", BOTH[:1]),
        f"[TOOL_CALLS]weather[ARGS]{ZIP}[TOOL_CALLS]now[ARGS]{{}}": Parsed("", BOTH),
        f"[TOOL_CALLS]weather{ZIP}": Parsed("", BOTH[:1]),
        f"[TOOL_CALLS]weather[CALL_ID]abc123DEF[ARGS]{ZIP} done": Parsed(" done", BOTH[:1]),
        f"[TOOL_CALLS]{N}": Parsed("", BOTH[1:]),
        "[TOOL_CALLS] none, really": Parsed("[TOOL_CALLS] none, really"),
        "[TOOL_CALLS][1, 2]": Parsed("[TOOL_CALLS][1, 2]"),
        '[TOOL_CALLS]weather[ARGS]{"zip": "8': Parsed("", (("weather", '{"zip": "8'),)),
        f"[TOOL_CALLS][{N},": Parsed("", BOTH[1:]),
        "[TOOL_CALLS]wea": Parsed("[TOOL_CALLS]wea"),
    },
    "harmony": {
        "Nothing to call. \n": Parsed("Nothing to call. \n"),
        f"{TO}weather <|constrain|>json<|message|>{ZIP}<|call|>": Parsed("", BOTH[:1]),
        f"{TO}weather <|constrain|>json<|message|>{ZIP}<|call|>{TO}now<|message|>": Parsed("", BOTH),
        f"Sure.\n{TO}now json<|message|><|call|>": Parsed("Sure.", BOTH[1:]),
        f"{TO}weather <|constrain|>json<|message|>" + '{"zip': Parsed("", (("weather", '{"zip'),)),
        f"{TO}weather <|constrain|>js": Parsed(f"{TO}weather <|constrain|>js"),
        f"{TO} <|message|>{{}}": Parsed(f"{TO} <|message|>{{}}"),
        "<|channel|>final<|message|>x": Parsed("<|channel|>final<|message|>x"),
    },
    "qwen3_coder": {
        "Nothing to call. \n": Parsed("Nothing to call. \n"),
        "Sure.\n<tool_call>\n<function=weather>\n<parameter=zip>\n8004\n</parameter>\n<parameter=deep>\n"
        '{"a": [1]}\n</parameter>\n</function>\n</tool_call>\n<tool_call><function=now></function></tool_call>': Parsed(
            "Sure.", (("weather", '{"zip": "8004", "deep": {"a": [1]}}'), ("now", "{}"))
        ),
        "<function=now>\n</function>\n and then": Parsed("\n and then", BOTH[1:]),
        '<tool_call><function=typed><parameter=code>\n\na "b"\n</p>\n\n</parameter><parameter=n>\n08\n</parameter>'
        "<parameter=on>True</parameter><parameter=any>\nnull\n</parameter></function>": Parsed(
            "", (("typed", '{"code": "\\na \\"b\\"\\n</p>\\n", "n": "08", "on": true, "any": null}'),)
        ),
        f"<tool_call><function=typed>{SEVENS}</function></tool_call>": Parsed(
            "", (("typed", '{"n": 7, "code": "7"}'),)
        ),
        "<tool_call><function=weather><parameter=zip>\n80": Parsed("", (("weather", '{"zip": "80'),)),
        "<tool_call><function=weather><parameter=zi": Parsed("", (("weather", ""),)),
        "<tool_call>\n<function=wea": Parsed("<tool_call>\n<function=wea"),
        "<tool_call> or <function= are tags": Parsed("<tool_call> or <function= are tags"),
        "<tool_call><function=now></function></tool_c": Parsed("", BOTH[1:]),
        "<tool_call><function=now>oops</function>": Parsed("oops</function>", BOTH[1:]),
    },
    "glm": {
        "Nothing to call. \n": Parsed("Nothing to call. \n"),
        "Sure.\n<tool_call>weather\n<arg_key>zip</arg_key>\n<arg_value>8004</arg_value>\n<arg_key>deep</arg_key>"
        '<arg_value>{"a": [1]}</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>': Parsed(
            "Sure.", (("weather", '{"zip": "8004", "deep": {"a": [1]}}'), ("now", "{}"))
        ),
        "<tool_call>now</tool_call> and then": Parsed(" and then", BOTH[1:]),
        "<tool_call>typed<arg_key>code</arg_key><arg_value>\n x</arg_value><arg_key>n</arg_key>"
        "<arg_value>1e3</arg_value></tool_call>": Parsed("", (("typed", '{"code": "\\n x", "n": 1e3}'),)),
        "<tool_call>weather<arg_key>zip</arg_key><arg_value>80</arg": Parsed("", (("weather", '{"zip": "80'),)),
        "<tool_call>wea": Parsed("<tool_call>wea"),
        "<tool_call> two words </tool_call>": Parsed("<tool_call> two words </tool_call>"),
    },
    "deepseek_v3": {
        "Nothing to call. \n": Parsed("Nothing to call. \n"),
        **{written(name, *BOTH): Parsed("", BOTH) for name in ("deepseek_v3", "deepseek_v31")},
        f"Sure.\n{DEEPSEEK}function<｜tool▁sep｜>now\n```json\n{{}}\n```<｜tool▁call▁end｜>": Parsed("Sure.", BOTH[1:]),
        f"{DEEPSEEK}now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜> done": Parsed(" done", BOTH[1:]),
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}": Parsed("", BOTH[1:]),
        f'{DEEPSEEK}weather<｜tool▁sep｜>{{"zip": "8': Parsed("", (("weather", '{"zip": "8'),)),
        f"{DEEPSEEK}wea": Parsed(f"{DEEPSEEK}wea"),
        "<｜tool▁calls▁begin｜> none": Parsed("<｜tool▁calls▁begin｜> none"),
    },
    "kimi": {
        "Nothing to call. \n": Parsed("Nothing to call. \n"),
        f"Sure.{written('kimi', *BOTH)}": Parsed("Sure.", BOTH),
        "<|tool_call_begin|>now:12<|tool_call_argument_begin|> {} <|tool_call_end|>": Parsed("", BOTH[1:]),
        "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{": Parsed("", (("weather", "{"),)),
        "<|tool_calls_section_begin|>?": Parsed("<|tool_calls_section_begin|>?"),
    },
    "granite": {
        "Nothing to call. \n": Parsed("Nothing to call. \n"),
        f"<|tool_call|>[{W}, {N}]": Parsed("", BOTH),
        f"Sure.\n<tool_call>[{W}]": Parsed("Sure.", BOTH[:1]),
        f"<|tool_call|>{N} then": Parsed(" then", BOTH[1:]),
        "<|tool_call|> is a token": Parsed("<|tool_call|> is a token"),
    },
    "phi4": {
        "Nothing to call. \n": Parsed("Nothing to call. \n"),
        f"<|tool_call|>[{W}, {N}]<|/tool_call|>": Parsed("", BOTH),
        f"functools[{N}]": Parsed("", BOTH[1:]),
        f"Sure. <|tool_call|>[{W}]<|/tool_c": Parsed("Sure.", BOTH[:1]),
        "functools is a module": Parsed("functools is a module"),
    },
    "pythonic": {
        "Nothing to call. \n": Parsed("Nothing to call. \n"),
        '[weather(zip="8004", at=[1, {"a": None, "b": true}], quick=False), now()]': Parsed(
            "", (("weather", '{"zip": "8004", "at": [1, {"a": null, "b": true}], "quick": false}'), ("now", "{}"))
        ),
        "[weather(zip='it\\'s (8004]')]": Parsed("", (("weather", '{"zip": "it\'s (8004]"}'),)),
        "Sure. <|python_start|>[now()]<|python_end|>": Parsed("Sure.", BOTH[1:]),
        "[now()]\nDone.": Parsed("\nDone.", BOTH[1:]),
        "[weather(8004)]": Parsed("", (("weather", "8004"),)),
        '[weather(zip="80': Parsed("", (("weather", "{"),)),
        "[other(a=1)]": Parsed("[other(a=1)]"),
        " [1, 2]": Parsed(" [1, 2]"),
        "[wea": Parsed("[wea"),
    },
}
# Whole outputs of gpt-oss, for its two chained parsers.
ANALYSIS, NEXT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
HARMONY: dict[str, Parsed] = {
    f"{ANALYSIS}Let me see: <b>.{NEXT}<|channel|>final<|message|>42\n": Parsed("42\n", reasoning="Let me see: <b>."),
    "<|channel|>final<|message|>42<|return|>": Parsed("42"),
    f"{ANALYSIS}Rain?{NEXT}{TO}weather <|constrain|>json<|message|>{ZIP}<|call|>": Parsed("", BOTH[:1], "Rain?"),
    f"{ANALYSIS}Rain?{NEXT} to=functions.now<|channel|>commentary json<|message|>{{}}": Parsed("", BOTH[1:], "Rain?"),
    "<|channel|>analysis to=functions.now code<|message|>{}<|call|>": Parsed("", BOTH[1:]),
    f"<|channel|>commentary<|message|>I look.{NEXT}{TO}now <|constrain|>json<|message|>": Parsed("I look.", BOTH[1:]),
    f"{ANALYSIS}One.{NEXT}{ANALYSIS} Two.{NEXT}<|channel|>final<|message|>3": Parsed("3", reasoning="One. Two."),
    f"{ANALYSIS}No end<|start|>assistant<|channel|>final<|message|>x": Parsed("x", reasoning="No end"),
    f"{ANALYSIS}cut <|en": Parsed("", reasoning="cut <|en"),
    "<|channel|>fin": Parsed(""),
    "Without any channel. <|end|>\n": Parsed("Without any channel. <|end|>\n"),
    "<|channel|>" + "x" * 600: Parsed("<|channel|>" + "x" * 600),
}
THOUGHTS: dict[str, Parsed] = {
    THOUGHT + "42\n": Parsed("42\n", reasoning="Let me see: <b>.\n\nYes."),
    " <think>a</think>b": Parsed("b", reasoning="a"),
    "<think>\n\n</think>\n\n42": Parsed("42"),
    "<think>cut </thi": Parsed("", reasoning="cut </thi"),
    "<thin": Parsed("<thin"),
    "\n 42 <think>no</think>": Parsed("\n 42 <think>no</think>"),
}
ALL = [(name, text, read) for name, cases in CASES.items() for text, read in cases.items()]


def fold(events: list[OutputEvent]) -> Parsed:
    text, reasoning, calls = "", "", dict[int, list[str]]()
    for event in events:
        match event:
            case ContentText(content):
                text += content
            case ReasoningText(thought):
                reasoning += thought
            case ToolCallStart(index, name):
                assert index == len(calls)
                calls[index] = [name, ""]
            case ToolCallArguments(index, piece):
                assert piece
                calls[index][1] += piece
    return Parsed(text, tuple((name, arguments) for name, arguments in calls.values()), reasoning)


def read(name: str, pieces: list[str], *, prompt: str = "", with_reasoning: bool = True) -> Parsed:
    reasoning = REASONING_FORMATS["think"].parser(prompt) if with_reasoning else None
    parser = ChainedParser(reasoning, TOOL_FORMATS[name].parser(TOOLS))
    return fold([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def read_harmony(pieces: list[str]) -> Parsed:
    parser = ChainedParser(REASONING_FORMATS["harmony"].parser(""), TOOL_FORMATS["harmony"].parser(TOOLS))
    return fold([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def split(text: str, positions: set[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in positions)
    return [text[start:end] for start, end in pairwise([0, *ends, len(text)])]


@pytest.mark.parametrize(("name", "text", "expected"), ALL)
def test_calls_and_content_of_an_output(name: str, text: str, expected: Parsed) -> None:
    assert read(name, [text]) == expected
    assert read(name, [*text]) == expected
    for size in (2, 3, 5, 7):
        assert read(name, [text[i : i + size] for i in range(0, len(text), size)]) == expected


@pytest.mark.parametrize(("text", "expected"), HARMONY.items())
def test_harmony_channels(text: str, expected: Parsed) -> None:
    for size in (1, 2, 3, 5, 7, len(text)):
        assert read_harmony([text[i : i + size] for i in range(0, len(text), size)]) == expected


@settings(max_examples=500, derandomize=True)
@given(
    text=st.lists(
        st.sampled_from(
            [*TOOL_FORMATS["harmony"].markers, "analysis", "final", " to=functions.", "now", "{}", TO, " <|"]
        ),
        max_size=12,
    ).map("".join),
    positions=st.sets(st.integers(0, 300), max_size=12),
)
def test_splitting_the_text_does_not_change_harmony_channels(text: str, positions: set[int]) -> None:
    assert read_harmony(split(text, positions)) == read_harmony([*text]) == read_harmony([text])


@pytest.mark.parametrize(("text", "expected"), THOUGHTS.items())
@pytest.mark.parametrize("name", [*TOOL_FORMATS])
def test_reasoning_of_an_output(name: str, text: str, expected: Parsed) -> None:
    assert read(name, [text]) == read(name, [*text]) == expected


@pytest.mark.parametrize("name", [*TOOL_FORMATS])
def test_reasoning_that_starts_in_the_prompt(name: str) -> None:
    for pieces in (["I see.</think>\n", "Yes."], [*"I see.</think>\nYes."]):
        assert read(name, pieces, prompt="<|assistant|>\n<think>\n") == Parsed("Yes.", reasoning="I see.")
    assert read(name, ["Yes."], prompt="<think>\n\n</think>\n\n") == Parsed("Yes.")


@pytest.mark.parametrize(("name", "text", "expected"), ALL)
def test_calls_after_reasoning(name: str, text: str, expected: Parsed) -> None:
    whole = read(name, [THOUGHT + text.lstrip("\n")])
    assert whole.reasoning == "Let me see: <b>.\n\nYes."
    assert whole.calls == expected.calls
    assert read(name, [*(THOUGHT + text.lstrip("\n"))]) == whole


def garbled() -> Iterator[st.SearchStrategy[tuple[str, str]]]:
    """Random sequences of the formats' elements."""
    common = [
        "<think>",
        "</think>",
        '{"name": "now"',
        ', "arguments": {',
        '"parameters": 1',
        W,
        N,
        "now",
        "text",
        " \n",
    ]
    for name, tools in TOOL_FORMATS.items():
        parts = [*common, *'"}],;\\é', *tools.markers, *(marker[:4] for marker in tools.markers)]
        yield st.tuples(st.just(name), st.lists(st.sampled_from(parts), max_size=9).map("".join))


@settings(max_examples=1500, derandomize=True)
@given(
    answer=st.one_of(*garbled()) | st.sampled_from([(name, text) for name, text, _ in ALL]),
    positions=st.sets(st.integers(0, 300), max_size=12),
    prompt=st.sampled_from(["", "<think>"]),
    with_reasoning=st.booleans(),
)
def test_splitting_the_text_does_not_change_the_result(
    answer: tuple[str, str], positions: set[int], prompt: str, with_reasoning: bool
) -> None:
    name, text = answer
    whole = read(name, [text], prompt=prompt, with_reasoning=with_reasoning)
    assert read(name, split(text, positions), prompt=prompt, with_reasoning=with_reasoning) == whole
    assert read(name, [*text], prompt=prompt, with_reasoning=with_reasoning) == whole
    # Without calls and reasoning, the content is the whole text.
    if not whole.calls and not with_reasoning:
        assert whole.text == text


@pytest.mark.parametrize(("name", "text", "expected"), [case for case in ALL if case[2].calls])
def test_arguments_are_streamed(name: str, text: str, expected: Parsed) -> None:
    """Every character of the arguments is emitted at once, not at the end of the call."""
    parser = TOOL_FORMATS[name].parser(TOOLS)
    num_emitted = 0
    for i, character in enumerate(text):
        for event in parser.push(character):
            num_emitted += len(event.text) if isinstance(event, ToolCallArguments) else 0
        if expected.calls[0][1] == ZIP and (at := text.find(ZIP)) >= 0 and at <= i < at + len(ZIP) - 1:
            assert num_emitted == i - at + 1


@pytest.mark.parametrize("name", [*TOOL_FORMATS])
def test_call_ids_are_unique(name: str) -> None:
    ids = {TOOL_FORMATS[name].new_id("now", number) for number in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch(r"[\w.:]+", id) for id in ids)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ '<tool_call>\\n' }} {% if '</think>' in content %}", "hermes", "think"),
        ("[TOOL_CALLS] [THINK]x[/THINK]", "mistral", "mistral"),
        ("<|start_header_id|>assistant<|end_header_id|>", "llama3", None),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
        ("'<tool_call>\\n<function=' ~ name '<parameter='", "qwen3_coder", None),
        ("<tool_call>{{ name }}<arg_key></think>", "glm", "think"),
        ("'<｜tool▁sep｜>' + name + '\\n' + '```json'", "deepseek_v3", None),
        ("name + '<｜tool▁sep｜>' + arguments", "deepseek_v31", None),
        ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi", None),
        ("write <|tool_call|> followed by a JSON list", "granite", None),
        ("<|tool|>{{ tools }}<|/tool|>", "phi4", None),
        ("in the format of [func_name1(params_name1=params_value1)] <|python_start|>", "pythonic", None),
        ("{{ message.content }}", None, None),
    ],
)
def test_formats_are_detected_in_the_chat_template(template: str, tools: str | None, reasoning: str | None) -> None:
    assert tool_format("auto", template) is (TOOL_FORMATS[tools] if tools else None)
    assert reasoning_format("auto", template) is (REASONING_FORMATS[reasoning] if reasoning else None)
    assert tool_format("none", template) is None
    assert tool_format("hermes", template) is TOOL_FORMATS["hermes"]


@pytest.mark.parametrize(("name", "text", "expected"), ALL)
def test_arguments_of_complete_calls_are_json(name: str, text: str, expected: Parsed) -> None:
    for _, arguments in read(name, [text]).calls[:-1]:
        json.loads(arguments)


@pytest.mark.parametrize("name", [*TOOL_FORMATS])
@pytest.mark.parametrize("reasoning", [None, "think"])
def test_forced_calls_that_are_cut_off_leak_no_markers(name: str, reasoning: str | None) -> None:
    """`max_tokens` may end the output anywhere. What arguments arrived is the beginning of their JSON."""
    calls = [("weather", ZIP)] if name == "harmony" else [("weather", ZIP), ("now", "{}")]
    output = written(name, *calls)
    for end in range(len(output) + 1):
        thinking = REASONING_FORMATS[reasoning].parser("<think>\n") if reasoning else None
        parser = ChainedParser(thinking, TOOL_FORMATS[name].parser(TOOLS), calls_only=True)
        before = "Rain?</think>\n\n" if reasoning else ""
        events = parser.push(before + output[:end]) + parser.finish()
        assert not [event for event in events if isinstance(event, ContentText)], output[:end]
        assert not reasoning or [e.text for e in events if isinstance(e, ReasoningText)] == ["Rain?"]
        for call in (event for event in events if isinstance(event, ToolCallStart)):
            pieces = [e.text for e in events if isinstance(e, ToolCallArguments) and e.index == call.index]
            arguments = "".join(pieces)
            assert arguments in ("", "{", "{}") or (call.name == "weather" and ZIP.startswith(arguments)), output[:end]


def test_arguments_of_a_python_call_that_is_cut_off_are_the_beginning_of_json() -> None:
    """They were Python, which no client expects."""
    output = 'weather(city="Bern, \\"CH\\"", days=[1, 2], exact=True, zip="80'
    expected = '{"city": "Bern, \\"CH\\"", "days": [1, 2], "exact": true'
    parser = TOOL_FORMATS["pythonic"].parser(TOOLS)
    events = parser.push("[" + output) + parser.finish()
    assert "".join(event.text for event in events if isinstance(event, ToolCallArguments)) == expected
