"""Every block of the tutorial is run, and prints what the page says it prints: see `commands.py`."""

from __future__ import annotations

import re

import pytest

from tests.docs import commands
from tests.docs.conftest import Stack
from tests.docs.markdown import ROOT, Block, blocks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE = ROOT / "docs" / "tutorial.md"
BLOCKS = blocks(PAGE)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block(stack: Stack, block: Block) -> None:
    commands.run(stack, block)


def test_later_requests_of_the_agent_are_mostly_cached(stack: Stack) -> None:
    (agent,) = [block for block in BLOCKS if block.language == "python" and "OpenAI()" in block.text]
    commands.run(stack, agent)
    tokens = [tuple(map(int, re.findall(r"\d+", line))) for line in stack.printed[agent].splitlines()]
    assert len(tokens) == 3
    assert all(cached > 0.9 * prompt for prompt, cached in tokens[1:])
