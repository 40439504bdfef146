"""Counts the pages of a PDF from its first and last bytes.

The number is in the root of the page tree (`/Type /Pages ... /Count 12`), or in the first object of a file that is
optimised for the web (`/Linearized ... /N 12`). Newer files compress the page tree into object streams, which are
decompressed up to a bound. Cross-reference tables are not read: they may lead anywhere, and are often damaged.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect
from collections.abc import Iterator
from itertools import islice

from gateway.prompts.media.encoded import EncodedFile, HeaderBudget

WINDOW_BYTES = 64 * 1024  # read at the beginning and at the end
STREAMS_MAX = 32  # object streams that are decompressed
NODES_MAX = 256  # of a page tree, and their counts, that are looked at in one object or object stream
NODE_BYTES = 16 * 1024  # between `/Type /Pages` and its `/Count`
PAGES_MAX = 10_000  # a higher count is taken to be a lie

_LINEARIZED = re.compile(rb"/N\s{1,8}(\d{1,6})\b")
_TREE_NODE = re.compile(rb"/Type\s{0,8}/Pages\b")
_COUNT = re.compile(rb"/Count\s{1,8}(\d{1,7})\b")
_PAGE = re.compile(rb"/Type\s{0,8}/Page\b")
_OBJECT_STREAM = re.compile(rb"/ObjStm\b[^>]{0,300}>>\s{0,8}stream\r?\n")


def pdf_pages(file: EncodedFile) -> int:
    """The number of pages, at most `PAGES_MAX`. 0 if the file is no PDF or its pages cannot be counted."""
    if b"%PDF-" not in file.read(0, 1_024):
        return 0
    windows = [file.read(0, WINDOW_BYTES)]
    if (at := windows[0].find(b"/Linearized", 0, 2_048)) >= 0:
        pages = _LINEARIZED.search(windows[0], at, at + 300)
        if pages is not None:
            return min(int(pages[1]), PAGES_MAX)
    if file.size > WINDOW_BYTES:
        windows.append(file.read(max(WINDOW_BYTES, file.size - WINDOW_BYTES), WINDOW_BYTES))
    count = max(map(_tree_count, windows)) or max(map(_tree_count, _object_streams(windows, file.budget)), default=0)
    if not count and file.size <= 2 * WINDOW_BYTES:  # the whole file was read
        count = sum(len(_PAGE.findall(window)) for window in windows)
    return min(count, PAGES_MAX)


def _tree_count(text: bytes) -> int:
    """The highest count of a page tree's nodes: that of its root. Takes time linear in the length of the text."""
    if _TREE_NODE.search(text) is None:
        return 0
    return max((_count_of(part) for part in text.split(b"endobj") if b"/Pages" in part), default=0)


def _count_of(part: bytes) -> int:
    """The highest count of the tree nodes in one object, or in an object stream.

    An outline has a count, too. Object streams do not mark where objects end, so each node has the nearest count.
    """
    counts = [(count.start(), int(count[1])) for count in islice(_COUNT.finditer(part), NODES_MAX)]
    highest = 0
    for node in islice(_TREE_NODE.finditer(part), NODES_MAX if counts else 0):
        at = bisect(counts, (node.start(), 0))
        place, count = min(counts[max(0, at - 1) : at + 1], key=lambda count: abs(count[0] - node.start()))
        if abs(place - node.start()) <= NODE_BYTES:
            highest = max(highest, count)
    return highest


def _object_streams(windows: list[bytes], budget: HeaderBudget) -> Iterator[bytes]:
    """The decompressed object streams, as far as the budget allows."""
    streams = ((window, stream.end()) for window in windows for stream in _OBJECT_STREAM.finditer(window))
    for window, start in islice(streams, STREAMS_MAX):
        if budget.inflated_bytes <= 0:
            return
        try:
            inflated = zlib.decompressobj().decompress(memoryview(window)[start:], budget.inflated_bytes)
        except zlib.error:  # encrypted, cut, or compressed otherwise
            continue
        budget.inflated_bytes -= len(inflated)
        yield inflated
