"""The format of blocks on the wire: what is written is read, and nothing else is."""

from __future__ import annotations

import struct
from hashlib import sha256

import msgspec
import pytest
import torch
from torch import Tensor

from backend.kv_transfer import block_stream
from backend.kv_transfer.block_layout import BlockLayout
from backend.kv_transfer.block_stream import (
    END,
    MAGIC,
    BlockReader,
    StreamFault,
    blocks_per_batch,
    encode_entries,
    encode_header,
    split_hashes,
)

LAYOUT = BlockLayout(
    model="a" * 64,
    quantization="none",
    dtype="bfloat16",
    kv_cache_dtype="auto",
    scales_apart=False,
    element="bfloat16",
    shape=(2, 2, 4, 2, 8),
    byte_order="little",
)
HASHES = [sha256(bytes([i])).digest() for i in range(5)]
CONTENT = torch.randint(0, 256, (5, LAYOUT.block_bytes), dtype=torch.uint8, generator=torch.manual_seed(0))


def reader(stream: bytes, layout: BlockLayout = LAYOUT) -> BlockReader:
    rest = memoryview(stream)

    def read_into(buffer: memoryview) -> None:
        nonlocal rest
        if len(rest) < len(buffer):
            raise ConnectionResetError
        buffer[:] = rest[: len(buffer)]
        rest = rest[len(buffer) :]

    return BlockReader(read_into, layout)


def batch(start: int, stop: int, content: Tensor = CONTENT) -> bytes:
    part = content[start:stop]
    return encode_entries(HASHES[start:stop], part) + part.numpy().tobytes()


def test_what_is_written_is_read() -> None:
    read = reader(encode_header(LAYOUT) + batch(0, 3) + batch(3, 5) + END)
    read.read_header()
    first, second = read.read_batch(HASHES), read.read_batch(HASHES[3:])
    assert first is not None and second is not None
    assert torch.equal(torch.cat((first, second)), CONTENT)
    assert read.read_batch([]) is None
    assert split_hashes(b"".join(HASHES)) == HASHES


def test_the_bytes_are_those_that_the_format_defines() -> None:
    header = encode_header(LAYOUT)
    assert header[:8] == MAGIC == b"WPKV\x01\r\n\x00"
    assert struct.unpack("<I", header[8:12]) == (len(header) - 12,)
    assert msgspec.json.decode(header[12:])["shape"] == [2, 2, 4, 2, 8]
    entries = encode_entries(HASHES[:2], CONTENT[:2])
    assert struct.unpack("<I", entries[:4]) == (2,)
    assert entries[4:36] == HASHES[0]
    assert len(entries) == 4 + 2 * 40
    assert bytes(4) == END


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (b"HTTP/1.1 200 OK, and more of it", "malformed"),
        (MAGIC + struct.pack("<I", 1 << 30), "malformed"),
        (MAGIC + struct.pack("<I", 2) + b"{}", "malformed"),
        (MAGIC + struct.pack("<I", 2) + b"\xff\xff", "malformed"),
        (encode_header(msgspec.structs.replace(LAYOUT, model="b" * 64)), "other_layout"),
        (encode_header(msgspec.structs.replace(LAYOUT, shape=(2, 2, 8, 2, 8))), "other_layout"),
    ],
)
def test_another_header_is_rejected(stream: bytes, kind: str) -> None:
    with pytest.raises(StreamFault) as caught:
        reader(stream).read_header()
    assert caught.value.kind == kind


def test_the_field_that_differs_is_named() -> None:
    with pytest.raises(StreamFault, match="dtype is 'bfloat16' here and 'float32' there"):
        reader(encode_header(msgspec.structs.replace(LAYOUT, dtype="float32"))).read_header()


def _flipped(content: Tensor) -> Tensor:
    changed = content.clone()
    changed[1, 77] ^= 4
    return changed


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (encode_entries(HASHES[:2], CONTENT[:2]) + _flipped(CONTENT)[:2].numpy().tobytes(), "corrupt"),
        (batch(1, 3), "malformed"),  # not the blocks that come next
        (batch(0, 5), "malformed"),  # more than were asked for
        (struct.pack("<I", 0xFFFFFFFF), "malformed"),
    ],
)
def test_a_batch_that_is_not_what_was_asked_for_is_rejected(stream: bytes, kind: str) -> None:
    with pytest.raises(StreamFault) as caught:
        reader(stream).read_batch(HASHES[:4])
    assert caught.value.kind == kind


def test_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_stream, "BATCH_BYTES", 3 * LAYOUT.block_bytes)
    assert blocks_per_batch(LAYOUT) == 3
    with pytest.raises(StreamFault, match="a batch has 4 blocks"):
        reader(batch(0, 4)).read_batch(HASHES)
    monkeypatch.setattr(block_stream, "BATCH_BYTES", 10)
    assert blocks_per_batch(LAYOUT) == 1, "a block that is larger is a batch of its own"


@pytest.mark.parametrize("length", [0, 3, 30, 100, 200])
def test_a_cut_stream_is_no_batch(length: int) -> None:
    with pytest.raises(ConnectionResetError):
        reader(batch(0, 2)[:length]).read_batch(HASHES)
