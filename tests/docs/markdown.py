"""Reads Markdown for the tests of the documentation: fenced blocks with their marks, links, code spans, tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(path for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md") for path in ROOT.glob(pattern))

_FENCED = re.compile(r"(?:^<!-- test: (?P<mark>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)")
_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block. `mark` is the MARK of `<!-- test: MARK -->` on the line before it, or empty."""

    language: str
    text: str
    mark: str
    line: int
    page: Path

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(path: Path) -> list[Block]:
    content = path.read_text(encoding="utf-8")
    return [
        Block(found["language"], found["text"], found["mark"] or "", content.count("\n", 0, found.start("text")), path)
        for found in _FENCED.finditer(content)
    ]


def links(path: Path) -> list[str]:
    """Targets of links, without those into the same page."""
    return _LINK.findall(path.read_text(encoding="utf-8"))


def code_spans(text: str) -> list[str]:
    return _CODE.findall(text)


def section(path: Path, title: str) -> str:
    """The text under a second-level heading, up to the next."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", path.read_text(encoding="utf-8"), re.M | re.S)
    assert found, f"{path} has no section {title!r}"
    return found[1]


def table_rows(text: str) -> list[list[str]]:
    """The cells of every table's rows, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = {i for i, row in enumerate(rows) if all(re.fullmatch(":?-+:?", cell) for cell in row)}
    return [row for i, row in enumerate(rows) if i not in rules and i + 1 not in rules]
