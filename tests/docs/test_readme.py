"""Every block of the README is run, or checked as far as can be without what it needs: see `commands.py`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from gateway.cli import VERBS
from tests.docs import commands
from tests.docs.conftest import README, Stack
from tests.docs.markdown import Block, blocks, section, table_rows

pytestmark = pytest.mark.e2e

BLOCKS = blocks(README)
JAVASCRIPT = [block for block in BLOCKS if (block.mark or block.language) == "js"]


@pytest.mark.parametrize("block", JAVASCRIPT, ids=str)
def test_javascript(stack: Stack, node_project: Path, block: Block) -> None:
    example = node_project / "example.mjs"
    example.write_text(block.text)
    assert stack.bash(block, f"node {shlex.quote(str(example))}").stdout.strip()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block not in JAVASCRIPT], ids=str)
def test_block(stack: Stack, block: Block) -> None:
    commands.run(stack, block)


def test_the_commands_are_the_commands() -> None:
    rows = table_rows(section(README, "Commands"))
    assert [row[0] for row in rows] == [f"`warmpath {verb}`" for verb in VERBS]
