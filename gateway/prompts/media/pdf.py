"""Counts the pages of a PDF from its first and last bytes.

The number is in the root of the page tree (`/Type /Pages ... /Count 12`), or in the first object of a file that is
optimised for the web (`/Linearized ... /N 12`). Newer files compress the page tree into object streams, which are
decompressed up to a bound. Cross-reference tables are not read: they may lead anywhere, and are often damaged.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

from gateway.prompts.media.encoded import EncodedFile

WINDOW_BYTES = 128 * 1024  # read at the beginning and at the end
INFLATED_MAX_BYTES = 512 * 1024  # of all object streams together
STREAMS_MAX = 64  # object streams that are decompressed
NODES_MAX = 256  # of the page tree that are looked at
NODE_BYTES = 8 * 1024  # around `/Type /Pages` in which its `/Count` is searched
PAGES_MAX = 10_000  # a higher count is taken to be a lie

_LINEARIZED = re.compile(rb"/Linearized\b.{0,300}?/N\s{1,8}(\d{1,6})\b", re.DOTALL)
_TREE_NODE = re.compile(rb"/Type\s{0,8}/Pages\b")
_COUNT = re.compile(rb"/Count\s{1,8}(\d{1,7})\b")
_PAGE = re.compile(rb"/Type\s{0,8}/Page\b")
_OBJECT_STREAM = re.compile(rb"/ObjStm\b[^>]{0,300}>>\s{0,8}stream\r?\n")


def pdf_pages(file: EncodedFile) -> int:
    """The number of pages, at most `PAGES_MAX`. 0 if the file is no PDF or its pages cannot be counted."""
    windows = [file.read(0, WINDOW_BYTES)]
    if b"%PDF-" not in windows[0][:1_024]:
        return 0
    if (linearized := _LINEARIZED.search(windows[0][:2_048])) is not None:
        return min(int(linearized[1]), PAGES_MAX)
    if file.size > WINDOW_BYTES:
        windows.append(file.read(max(WINDOW_BYTES, file.size - WINDOW_BYTES), WINDOW_BYTES))
    pages = max(map(_tree_count, windows))
    if not pages:
        pages = max(map(_tree_count, _object_streams(windows)), default=0)
    if not pages and file.size <= 2 * WINDOW_BYTES:  # the whole file was read
        pages = sum(len(_PAGE.findall(window)) for window in windows)
    return min(pages, PAGES_MAX)


def _tree_count(text: bytes) -> int:
    """The highest count of a page tree's nodes: that of its root."""
    highest = 0
    for number, node in enumerate(_TREE_NODE.finditer(text)):
        if number >= NODES_MAX:
            break
        before = text[max(0, node.start() - NODE_BYTES) : node.start()]
        after = text[node.end() : node.end() + NODE_BYTES]
        # Only in the node's own object: an outline has a count, too. Object streams do not mark where objects end, so
        # the nearest count is taken.
        before = before[max(0, before.rfind(b"obj")) :]
        after = after[: end if (end := after.find(b"endobj")) >= 0 else None]
        counts = [(len(before) - count.start(), int(count[1])) for count in _COUNT.finditer(before)]
        counts += [(count.start(), int(count[1])) for count in _COUNT.finditer(after)]
        highest = max(highest, min(counts, default=(0, 0))[1])
    return highest


def _object_streams(windows: list[bytes]) -> Iterator[bytes]:
    """The decompressed object streams, up to `INFLATED_MAX_BYTES` in all."""
    left = INFLATED_MAX_BYTES
    for window in windows:
        for number, stream in enumerate(_OBJECT_STREAM.finditer(window)):
            if left <= 0 or number >= STREAMS_MAX:
                return
            try:
                inflated = zlib.decompressobj().decompress(memoryview(window)[stream.end() :], left)
            except zlib.error:  # encrypted, cut, or compressed otherwise
                continue
            left -= len(inflated) or 1
            yield inflated
