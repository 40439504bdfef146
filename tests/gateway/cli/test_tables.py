"""Tables fit the width of the terminal."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from gateway.cli.tables import table_lines

COLUMNS = ("DEPLOYMENT", "STATE", "REASON")
ROWS = [
    ("gpu-a", "ok", "its prefix is cached and it has free slots"),
    ("gpu-很长的名字", "open", "the circuit breaker is open since three requests failed"),
]


def lines(width: int | None) -> list[str]:
    return [line for line, _ in table_lines(COLUMNS, ROWS, width)]


def test_without_a_width_every_row_is_one_line() -> None:
    assert lines(None) == lines(200) == [
        "DEPLOYMENT      STATE  REASON",
        "gpu-a           ok     its prefix is cached and it has free slots",
        "gpu-很长的名字  open   the circuit breaker is open since three requests failed",
    ]  # fmt: skip


def test_the_widest_column_is_folded_at_spaces() -> None:
    assert lines(50) == [
        "DEPLOYMENT      STATE  REASON",
        "gpu-a           ok     its prefix is cached and it",
        "                       has free slots",
        "gpu-很长的名字  open   the circuit breaker is open",
        "                       since three requests failed",
    ]


def test_if_words_would_be_broken_each_row_is_a_block() -> None:
    assert lines(30) == [
        "DEPLOYMENT  gpu-a",
        "STATE       ok",
        "REASON      its prefix is",
        "            cached and it has",
        "            free slots",
        "",
        "DEPLOYMENT  gpu-很长的名字",
        "STATE       open",
        "REASON      the circuit",
        "            breaker is open",
        "            since three",
        "            requests failed",
    ]


@pytest.mark.parametrize("width", range(22, 100))
def test_no_line_is_wider(width: int) -> None:
    url = "http://" + "x" * 80
    for line, _ in table_lines(("A", "", "URL"), [("1", "word " * 9, url), ("", "", "")], width):
        assert cell_len(line) <= width


def test_only_the_head_is_marked() -> None:
    assert [is_head for _, is_head in table_lines(COLUMNS, ROWS, 50)] == [True, False, False, False, False]
    assert list(table_lines(("A", "B"), [], 10)) == [("A  B", True)]
