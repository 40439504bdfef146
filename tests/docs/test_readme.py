"""Every block of the README is run, or checked as far as can be without what it needs: see `commands.py`."""

from __future__ import annotations

import pytest

from gateway.cli import VERBS
from tests.docs import commands
from tests.docs.conftest import README, Stack
from tests.docs.markdown import Block, blocks, section, table_rows

pytestmark = pytest.mark.e2e

BLOCKS = blocks(README)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block(stack: Stack, block: Block) -> None:
    commands.run(stack, block)


def test_the_commands_are_the_commands() -> None:
    rows = table_rows(section(README, "Commands"))
    assert [row[0] for row in rows] == [f"`warmpath {verb}`" for verb in VERBS]
