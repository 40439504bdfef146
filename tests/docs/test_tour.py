"""The tour leads through a marked minimal path: every file exists, says its number, names the next, and stays small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, section

PAGE = ROOT / "docs" / "tour.md"
HALVES = {"The gateway": ("gateway", 1300), "The engine": ("backend", 1500)}  # at most so many lines to read
MARK = re.compile(r"Minimal path (\d+) of (\d+)\.(?: Next:\s+`?([\w./]+?)`?\.)?\s")


def files(title: str) -> list[Path]:
    """The files of one half, in the order in which the tour visits them."""
    return [
        (PAGE.parent / link).resolve()
        for link in re.findall(r"^\d+\. \[[^\]]+\]\(([^)]+)\)", section(PAGE, title), re.M)
    ]


@pytest.mark.parametrize("title", HALVES)
def test_the_files_of_the_tour_are_the_marked_ones_in_their_order(title: str) -> None:
    visited, package = files(title), HALVES[title][0]
    marked = {path for path in (ROOT / package).rglob("*.py") if MARK.search(path.read_text())}
    assert marked == set(visited)
    for number, (file, following) in enumerate(zip(visited, [*visited[1:], None], strict=True), 1):
        found = MARK.search(file.read_text())
        assert found and (int(found[1]), int(found[2])) == (number, len(visited)), file
        assert (None if found[3] is None else (file.parent / found[3]).resolve()) == following, file


@pytest.mark.parametrize("title", HALVES)
def test_the_tour_stays_short(title: str) -> None:
    lines = sum(len(file.read_text().splitlines()) for file in files(title))
    assert lines <= HALVES[title][1]
    (told,) = re.findall(r"([\d,]+) lines", section(PAGE, title))
    assert abs(int(told.replace(",", "")) - lines) <= 50, f"the page says {told}, it is {lines}"
