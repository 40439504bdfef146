"""Every block of the how-to pages is run, or checked as far as can be without what it needs: see `commands.py`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.docs import commands
from tests.docs.conftest import Stack
from tests.docs.markdown import ROOT, Block, blocks, links

PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
READERS = ("application-developer.md", "platform-team.md", "finance.md", "on-call.md")
BLOCKS = [block for page in PAGES for block in blocks(page)]
JAVASCRIPT = [block for block in BLOCKS if (block.mark or block.language) == "js"]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("block", JAVASCRIPT, ids=str)
def test_javascript(stack: Stack, node_project: Path, block: Block) -> None:
    example = node_project / "example.mjs"
    example.write_text(block.text)
    assert stack.bash(block, f"node {shlex.quote(str(example))}").stdout.strip()


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if block not in JAVASCRIPT], ids=str)
def test_block(stack: Stack, block: Block) -> None:
    commands.run(stack, block)


def test_every_page_is_one_that_a_reader_is_led_to() -> None:
    led_to = {target for name in READERS for target in links(ROOT / "docs" / "how-to" / name)}
    assert {page.name for page in PAGES} - set(READERS) <= led_to
    assert set(READERS) <= {Path(target).name for target in links(ROOT / "docs" / "index.md")}
