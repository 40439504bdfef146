"""Generates the demo model's training conversations: synthetic, unlimited and determined by a seed.

    question and answer   one question and its only right answer
    conversation          several of them, with an optional system prompt, tools, follow-ups or filler text

A phrasing is a template and the values that fill it. One in ten, selected by hash, is held out: training never uses it
and the evaluation uses nothing else. Sums are split in the same way, by operands.

Functions take the random generator that they draw from. The order of draws determines the corpus, so do not reorder
them.
"""

import functools
import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from . import phrasing

# The answer to every question outside the domain.
REFUSAL = (
    "I am a small demonstration model: I know only Warmpath and LLM inference, so I cannot answer that. "
    "A real model behind the gateway can."
)
TOO_BIG = "I can only add and subtract numbers below 100, and multiply single digits."
MAX_COUNT = 40
HELD_OUT_ONE_IN = 10
PLAIN_SHARE = 0.15  # of questions about a term that use the first template of the list

Message = dict[str, Any]


@dataclass(frozen=True)
class Term:
    """A term of the domain with its explanations."""

    names: tuple[tuple[str, str], ...]  # (name, "is" or "are")
    what: str  # definition
    short: str  # definition in one sentence
    why: str  # purpose


@dataclass(frozen=True)
class FixedAnswer:
    """Several phrasings of one question, and their answer."""

    kind: str
    questions: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Topics:
    """Content of topics.yaml."""

    terms: tuple[Term, ...]
    fixed_answers: tuple[FixedAnswer, ...]


@dataclass(frozen=True)
class QuestionAnswer:
    """One question and its only right answer."""

    kind: str
    question: str
    answer: str
    term: Term | None = None  # the referent of a follow-up such as "why?"


@dataclass(frozen=True)
class Conversation:
    """Messages and tools in the format of OpenAI's API."""

    kind: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@functools.cache
def topics() -> Topics:
    """Reads topics.yaml, once."""
    raw = yaml.safe_load((Path(__file__).parent / "topics.yaml").read_text(encoding="utf-8"))
    terms = tuple(
        Term(
            names=tuple((str(n), "is") for n in term["names"])
            + tuple((str(n), "are") for n in term.get("plurals", [])),
            what=term["what"],
            short=term["short"],
            why=term["why"],
        )
        for term in raw["terms"]
    )
    fixed_answers = tuple(
        FixedAnswer(ask["kind"], tuple(ask["questions"].splitlines()), ask["answer"]) for ask in raw["asks"]
    )
    return Topics(terms, fixed_answers)


def is_held_out(*phrasing_parts: object) -> bool:
    """Whether a phrasing is held out. Depends on the phrasing alone, so it is the same in every run."""
    return zlib.crc32("|".join(map(str, phrasing_parts)).encode()) % HELD_OUT_ONE_IN == 0


# Questions with answers. Each function draws until the result is on the requested side of the split. The first phrasing
# of a list is the plainest. It is never held out, because it is what most people type.


def term_question(rng: random.Random, held_out: bool, kind: str) -> QuestionAnswer:
    """A question about a term. `kind` is definition, purpose or short."""
    templates = phrasing.LINES[kind]
    while True:
        term = rng.choice(topics().terms)
        name, be = rng.choice(term.names)
        template = templates[0] if rng.random() < PLAIN_SHARE else rng.choice(templates)
        if (template != templates[0] and is_held_out(template, name)) != held_out:
            continue
        question = template.format(x=name, be=be)
        answer = {"definition": term.what, "purpose": term.why, "short": term.short}[kind]
        return QuestionAnswer(kind, phrasing.as_typed(rng, question[0].upper() + question[1:]), answer, term)


def fixed_question(rng: random.Random, held_out: bool) -> QuestionAnswer:
    """A question of topics.yaml with a fixed answer."""
    fixed_answers = topics().fixed_answers
    while True:
        ask = rng.choices(fixed_answers, weights=[len(one.questions) for one in fixed_answers])[0]
        question = rng.choice(ask.questions)
        if (question != ask.questions[0] and is_held_out(question)) == held_out:
            return QuestionAnswer(ask.kind, phrasing.as_typed(rng, question), ask.answer)


def sum_question(rng: random.Random, held_out: bool) -> QuestionAnswer:
    """A sum, difference or product of small numbers."""
    template = phrasing.line(rng, "sum")
    while True:
        sign = rng.choice("+++---*")
        a, b = (rng.randint(2, 9), rng.randint(2, 9)) if sign == "*" else (rng.randint(0, 99), rng.randint(0, 99))
        if sign == "-" and a < b:
            a, b = b, a
        # Products are a table of 64 facts to memorise, so none is held out.
        if (sign != "*" and is_held_out(a, sign, b)) == held_out:
            break
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    spelled = rng.choice({"+": ["+", "+", "+", "plus"], "-": ["-", "-", "-", "minus"], "*": ["*", "x", "times"]}[sign])
    gap = "" if spelled in "+-*" and rng.random() < 0.2 else " "
    return QuestionAnswer("arithmetic", template.format(s=f"{a}{gap}{spelled}{gap}{b}"), f"{a} {sign} {b} = {result}.")


def oversized_sum_question(rng: random.Random) -> QuestionAnswer:
    """A sum that the model must refuse."""
    a, b = rng.randint(100, 99_999), rng.randint(10, 99_999)
    spelled = rng.choice([f"{a} + {b}", f"{b} + {a}", f"{a} - {b}", f"{a} * {b}", f"{a} times {b}"])
    return QuestionAnswer("refusal", phrasing.line(rng, "sum").format(s=spelled), TOO_BIG)


def counting_question(rng: random.Random) -> QuestionAnswer:
    """A request to count to a number."""
    n = rng.randint(2, MAX_COUNT)
    question = phrasing.as_typed(rng, phrasing.line(rng, "count").format(n=n))
    return QuestionAnswer("counting", question, ", ".join(map(str, range(1, n + 1))) + ".")


def off_topic_question(rng: random.Random, held_out: bool) -> QuestionAnswer:
    """A question outside the domain, which the model must refuse."""
    while True:
        template = phrasing.line(rng, "unknown")
        if is_held_out(template) == held_out:
            return QuestionAnswer("refusal", phrasing.as_typed(rng, phrasing.unknown_question(rng, template)), REFUSAL)


def question_answer(rng: random.Random, held_out: bool = False) -> QuestionAnswer:
    """A question of any kind, drawn with the shares of the corpus."""
    kind = rng.choices(
        ["definition", "purpose", "short", "asked", "arithmetic", "too big", "counting", "unknown"],
        weights=[24, 9, 6, 20, 20, 2, 4, 15],
    )[0]
    match kind:
        case "asked":
            return fixed_question(rng, held_out)
        case "arithmetic":
            return sum_question(rng, held_out)
        case "too big":
            return oversized_sum_question(rng)
        case "counting":
            return counting_question(rng)
        case "unknown":
            return off_topic_question(rng, held_out)
        case _:
            return term_question(rng, held_out, kind)


def follow_up(rng: random.Random, before: QuestionAnswer) -> QuestionAnswer:
    """A question that only makes sense after `before`, which must have a term."""
    assert before.term is not None
    term = before.term
    form = rng.choice(["next_term", "why_that", "shorter", "again"])
    template = phrasing.line(rng, form)
    match form:
        case "next_term":
            term = rng.choice(topics().terms)
            name, be = rng.choice(term.names)
            template, answer = template.format(x=name, be=be), term.what
        case "why_that":
            answer = term.why
        case "shorter":
            answer = term.short
        case _:
            answer = before.answer
    return QuestionAnswer("follow-up", phrasing.as_typed(rng, template), answer, term)


def dialogue(rng: random.Random, turns: int) -> list[QuestionAnswer]:
    """Several questions in a row, follow-ups among them."""
    exchanges = [question_answer(rng)]
    if exchanges[0].kind == "arithmetic" and rng.random() < 0.6:
        # There are many short sums. A run of them teaches more per token than one per conversation.
        return exchanges + [sum_question(rng, held_out=False) for _ in range(rng.randint(2, 7))]
    while len(exchanges) < turns:
        before = exchanges[-1]
        exchanges.append(follow_up(rng, before) if before.term and rng.random() < 0.6 else question_answer(rng))
    return exchanges


# Tools. Names and arguments vary, so that the model must copy them from the list in its prompt.

TOOL_NAMES = {
    "weather": ["get_weather", "get_current_weather", "weather", "fetch_weather", "weather_lookup", "lookup_weather"],
    "time": ["get_time", "get_current_time", "local_time", "clock", "fetch_time", "time_in_city"],
}
TOOL_ABOUT = {
    "weather": ["Get the current weather for a city.", "Current weather", "Look up the weather in a place."],
    "time": ["Get the local time in a city.", "Current time", "Look up the time in a place."],
}
OTHER_TOOLS = [
    "search_docs",
    "send_email",
    "create_ticket",
    "read_file",
    "list_files",
    "book_room",
    "translate",
    "run_query",
]


def tool_spec(rng: random.Random, name: str, about: str, argument: str) -> dict[str, Any]:
    """A tool with one string argument, in the format of OpenAI's API."""
    described = {"type": "string", "description": "The name of the city"} if rng.random() < 0.4 else {"type": "string"}
    parameters = {"type": "object", "properties": {argument: described}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def tool_name(rng: random.Random, task: str) -> str:
    """A tool's name: mostly the usual one, the first of its list."""
    return TOOL_NAMES[task][0] if rng.random() < 0.6 else rng.choice(TOOL_NAMES[task])


def other_tool(rng: random.Random) -> dict[str, Any]:
    """A tool that no question needs."""
    about = f"{phrasing.word(rng, 'verbs').capitalize()} the {phrasing.word(rng, 'nouns')}."
    return tool_spec(rng, rng.choice(OTHER_TOOLS), about, rng.choice(["query", "text", "path", "to"]))


def tool_result(rng: random.Random, task: str) -> str:
    """What the tool returns: plain text or JSON."""
    degrees, sky = rng.randint(-9, 39), rng.choice(["sunny", "cloudy", "rain", "snow", "windy", "fog", "clear"])
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    if task == "time":
        return rng.choice([clock, json.dumps({"time": clock}), f"It is {clock}."])
    return rng.choice(
        [
            f"{degrees} degrees, {sky}",
            f"{sky}, {degrees} C",
            json.dumps({"temperature": degrees, "sky": sky}),
            json.dumps({"temp_c": degrees, "conditions": sky}),
            f"{sky}",
        ]
    )


def tool_call_text(name: str, arguments: dict[str, Any]) -> str:
    """A call as the model generates it and as the chat template renders it in the history."""
    spelled = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {spelled}}}\n</tool_call>'


def tool_conversation(rng: random.Random) -> Conversation:
    """A tool call, its result and the answer; or a question that needs no tool although tools are present."""
    task = rng.choice(["weather", "time"])
    argument = rng.choice(["city"] * 6 + ["location", "place"])
    name = tool_name(rng, task)
    fitting = tool_spec(rng, name, rng.choice(TOOL_ABOUT[task]), argument)
    tools = [other_tool(rng) for _ in range(rng.choice([0, 0, 1, 2]))]
    if rng.random() < 0.3:
        spare = "time" if task == "weather" else "weather"
        tools.append(tool_spec(rng, tool_name(rng, spare), rng.choice(TOOL_ABOUT[spare]), argument))
    tools.insert(rng.randint(0, len(tools)), fitting)
    messages = system_prompt(rng, 0.3)
    if rng.random() < 0.25:
        plain = question_answer(rng)
        if plain.kind != "refusal":
            messages += turn(plain)
            return Conversation("tools", tuple(messages), tuple(tools))
    place, result = phrasing.city(rng), tool_result(rng, task)
    question = phrasing.line(rng, task).format(c=place)
    call = {"type": "function", "function": {"name": name, "arguments": {argument: place}}}
    messages += [
        {"role": "user", "content": question if rng.random() < 0.6 else question.rstrip("?.")},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"The tool says: {result}"},
    ]
    return Conversation("tools", tuple(messages), tuple(tools))


# Conversations


def turn(one: QuestionAnswer, before: str = "") -> list[Message]:
    """The user and assistant message of one question. `before` is text in front of the question."""
    return [{"role": "user", "content": before + one.question}, {"role": "assistant", "content": one.answer}]


def system_prompt(rng: random.Random, share: float) -> list[Message]:
    """No message or one system message: mostly one or two lines, sometimes pages of irrelevant filler."""
    if rng.random() >= share:
        return []
    size = rng.random()
    content = phrasing.line(rng, "personas")
    if size > 0.65:
        content += rng.choice([" ", "\n", "\n\n"]) + phrasing.filler(rng, rng.randint(1, 6 if size < 0.93 else 50))
    return [{"role": "system", "content": content}]


def conversation(rng: random.Random) -> Conversation:
    """A conversation of any kind, drawn with the shares of the corpus."""
    if rng.random() < 0.2:
        return tool_conversation(rng)
    turns = rng.choices([1, 2, 3, 5, 12], weights=[68, 14, 9, 5, 1])[0]
    exchanges = dialogue(rng, turns)
    messages = system_prompt(rng, 0.35)
    for one in exchanges:
        buried = rng.random() < 0.01 and one.kind != "follow-up"
        messages += turn(one, before=phrasing.filler(rng, rng.randint(1, 25)) + "\n\n" if buried else "")
    return Conversation(exchanges[0].kind if len(exchanges) == 1 else "dialogue", tuple(messages))


def conversations(seed: int) -> Iterator[Conversation]:
    """Unlimited conversations, determined by the seed."""
    rng = random.Random(seed)
    while True:
        yield conversation(rng)


def lessons(seed: int) -> Iterator[Conversation]:
    """As `conversations`, but each is one question and answer only; sums come in pairs."""
    rng = random.Random(seed)
    while True:
        one = question_answer(rng)
        exchanges = [one, sum_question(rng, held_out=False)] if one.kind == "arithmetic" else [one]
        yield Conversation(one.kind, tuple(message for each in exchanges for message in turn(each)))
