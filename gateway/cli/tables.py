"""The layout of tables, within the width of a terminal.

A table that is too wide folds the cells of its widest columns at spaces. If words would have to be broken, each row
becomes a block of lines, with a column's name and value in each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

GAP = "  "
WORD_COLUMNS_MAX = 24  # a longer word, such as a URL, may be broken
VALUE_COLUMNS_MIN = 10  # of a row that is printed as a block


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> Iterator[tuple[str, bool]]:
    """The lines of a table, and whether each is the head. `width`: the most columns of a line; None: unlimited."""
    texts = [columns, *rows]
    natural = [max(map(cell_len, cells)) for cells in zip(*texts, strict=True)]
    if width is None or sum(natural) + len(GAP) * (len(columns) - 1) <= width:
        widths: list[int] | None = natural
    else:
        widths = _shrunk(natural, texts, width - len(GAP) * (len(columns) - 1))
    if widths is None:
        assert width is not None
        yield from ((line, False) for line in _blocks(texts[0], texts[1:], width))
        return
    for number, row in enumerate(texts):
        for line in _row_lines(row, widths):
            yield line, number == 0


def _shrunk(natural: Sequence[int], texts: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Widths of columns that take `width` together, by folding the widest. None if that would break words."""
    least = [
        min(WORD_COLUMNS_MAX, max((cell_len(word) for text in cells for word in text.split()), default=0))
        for cells in zip(*texts, strict=True)
    ]
    if sum(least) > width:
        return None
    widths = list(natural)
    while sum(widths) > width:
        widest = max(
            (column for column in range(len(widths)) if widths[column] > least[column]), key=widths.__getitem__
        )
        widths[widest] -= 1
    return widths


def _row_lines(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    folded = [_folded(cell, width) for cell, width in zip(row, widths, strict=True)]
    for number in range(max(map(len, folded))):
        cells = (lines[number] if number < len(lines) else "" for lines in folded)
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True))
        yield GAP.join(padded).rstrip()


def _blocks(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    label = max(map(cell_len, columns))
    for number, row in enumerate(rows):
        if number:
            yield ""
        for column, cell in zip(columns, row, strict=True):
            if column or cell:
                yield from _row_lines((column, cell), (label, max(VALUE_COLUMNS_MIN, width - label - len(GAP))))


def _folded(text: str, width: int) -> list[str]:
    """The text in lines of at most this many columns, broken at spaces, or in words that are longer."""
    if cell_len(text) <= width:
        return [text]
    return [line.plain.rstrip() for line in Text(text).wrap(Console(), width, overflow="fold")]
