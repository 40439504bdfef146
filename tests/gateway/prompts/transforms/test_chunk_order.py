"""Retrieved chunks in the order that was seen first: `chunk_order`."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompts.transforms import SharedDecisions, TransformPipeline
from gateway.prompts.transforms.chunk_order import MAX_RUNS
from tests.gateway.prompts.transforms.forms import canonical_form


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
