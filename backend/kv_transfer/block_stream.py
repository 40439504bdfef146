"""The format in which blocks travel: the body of the response to POST /kv_blocks, whose request has only their hashes.

    request     the hashes of consecutive blocks of one prefix, 32 bytes each
    response    MAGIC, length of the layout (u32), the layout as JSON, then batches until an empty one
    batch       number of blocks (u32), then the hash (32 bytes) and the checksum (u64, xxh3) of each of them,
                then the contents of all of them, as many bytes each as the layout says

Integers are little-endian. The blocks come in the order of the request and end at the first one that is not cached. The
empty batch tells a complete response from one that was cut. `BlockReader` trusts nothing that it reads: each batch must
have the hashes that come next, matching checksums, and at most BATCH_BYTES.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import msgspec
import torch
import xxhash
from torch import Tensor

from backend.kv_transfer.block_layout import BlockLayout

MAGIC = b"WPKV\x01\r\n\x00"
HASH_BYTES = 32
BATCH_BYTES = 16 << 20  # of contents; a larger block is a batch of its own
LAYOUT_BYTES_MAX = 4096
END = struct.pack("<I", 0)

_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct(f"<{HASH_BYTES}sQ")

ReadInto = Callable[[memoryview], None]  # fills the buffer, or raises


class StreamFault(Exception):
    """The stream is not what it should be. `kind` is a value of `Outcome`, the message says what was wrong."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def blocks_per_batch(layout: BlockLayout) -> int:
    return max(1, BATCH_BYTES // layout.block_bytes)


def split_hashes(body: bytes) -> list[bytes]:
    """The hashes of a request's body, whose length must be a multiple of HASH_BYTES."""
    return [body[i : i + HASH_BYTES] for i in range(0, len(body), HASH_BYTES)]


def encode_header(layout: BlockLayout) -> bytes:
    encoded = msgspec.json.encode(layout)
    return MAGIC + _COUNT.pack(len(encoded)) + encoded


def encode_entries(hashes: Sequence[bytes], content: Tensor) -> bytes:
    """What precedes the contents of a batch. content: [n, block_bytes] uint8, for the first n of the hashes."""
    entries = (_ENTRY.pack(block_hash, _checksum(block)) for block_hash, block in zip(hashes, content, strict=False))
    return _COUNT.pack(len(content)) + b"".join(entries)


class BlockReader:
    """Reads and checks one response. Raises StreamFault, and what `read_into` raises."""

    def __init__(self, read_into: ReadInto, layout: BlockLayout) -> None:
        self._read_into = read_into
        self._layout = layout

    def read_header(self) -> None:
        """Checks that the sender's layout is this engine's own."""
        if self._read(len(MAGIC)) != MAGIC:
            raise StreamFault("malformed", "the response does not begin with this version's magic bytes")
        (length,) = _COUNT.unpack(self._read(_COUNT.size))
        if length > LAYOUT_BYTES_MAX:
            raise StreamFault("malformed", f"the layout has {length} bytes")
        try:
            theirs = msgspec.json.decode(self._read(length), type=BlockLayout)
        except msgspec.DecodeError as error:
            raise StreamFault("malformed", f"the layout cannot be read: {error}") from error
        if difference := self._layout.first_difference(theirs):
            raise StreamFault("other_layout", f"its blocks are others: {difference}")

    def read_batch(self, expected: Sequence[bytes]) -> Tensor | None:
        """The contents of the next blocks, [n, block_bytes] uint8, or None at the end.

        `expected` are the hashes that come next.
        """
        (count,) = _COUNT.unpack(self._read(_COUNT.size))
        if not count:
            return None
        if count > min(len(expected), blocks_per_batch(self._layout)):
            raise StreamFault("malformed", f"a batch has {count} blocks")
        entries = list(_ENTRY.iter_unpack(self._read(count * _ENTRY.size)))
        if [block_hash for block_hash, _ in entries] != list(expected[:count]):
            raise StreamFault("malformed", "a batch has other blocks than those that were asked for")
        content = torch.empty((count, self._layout.block_bytes), dtype=torch.uint8)
        self._read_into(content.numpy().data.cast("B"))
        for block, (_, checksum) in zip(content, entries, strict=True):
            if _checksum(block) != checksum:
                raise StreamFault("corrupt", "the checksum of a block does not match")
        return content

    def _read(self, size: int) -> bytes:
        buffer = bytearray(size)
        self._read_into(memoryview(buffer))
        return bytes(buffer)


def _checksum(block: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(block.numpy().data)
