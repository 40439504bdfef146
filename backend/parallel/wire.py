"""What rank 0 sends to the followers: messages over a socket each, and the tensors of a batch over the group.

A message says which computation follows, with the sizes of its tensors. Messages are pickled: both ends are processes
of this engine, and no other process can open the pairs of sockets.
"""

from __future__ import annotations

import math
import pickle
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from backend.attention.base import AttentionMetadata, AttentionWork
from backend.engine.batch import Batch, OutputRows
from backend.engine.resolved_config import ResolvedConfig
from backend.engine.step_images import StepImages

LENGTH = struct.Struct("<I")
SEND_SECONDS = 60.0  # a process that reads nothing for so long hangs
MAX_MESSAGE_BYTES = 16 << 20  # a step of many tokens takes some kilobytes
ALIGNMENT = 128  # in bytes: each tensor begins at an address for which Triton compiles the same kernel

Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what to load. `config` is that of the whole engine."""

    config: ResolvedConfig
    rank: int
    store: Path  # of `RankGroup`


@dataclass(frozen=True, slots=True)
class Imported:
    """The follower's first answer: it can load its part."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The follower's last answer. `error`: why it could not load its part."""

    error: str | None = None


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The sizes of an `AttentionMetadata`."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_seqs: int  # captured steps have unused entries, so it may be more than there are lengths
    table_width: int
    work: tuple[int, int, int] | None  # decodes, tiles, and the longest sequence

    @staticmethod
    def of(attention: AttentionMetadata) -> AttentionSizes:
        work = attention.work
        num_seqs, width = attention.block_tables.shape
        sizes = (len(work.decodes), len(work.tiles), work.longest) if work else None
        return AttentionSizes(attention.query_lens, attention.seq_lens, num_seqs, width, sizes)

    def shapes(self) -> list[Shape]:
        lists = [(self.num_seqs,), (self.num_seqs + 1,), (self.num_seqs, self.table_width)]
        if self.work:
            lists += [(self.work[0],), (self.work[1], 2)]
        return [(shape, torch.int32) for shape in lists]

    def make(self, tensors: Iterator[Tensor], block_size: int) -> AttentionMetadata:
        """The metadata with the next of these tensors."""
        kv_lens, starts, tables = next(tensors), next(tensors), next(tensors)
        work = AttentionWork(next(tensors), next(tensors), self.work[2]) if self.work else None
        query_lens, seq_lens = self.query_lens, self.seq_lens
        if not kv_lens.is_cuda:  # a repeated message has the lengths of its first step; on a GPU, kernels read these
            seq_lens = tuple(length for length in kv_lens.tolist() if length > 0)
            query_lens = tuple(starts.diff()[: len(seq_lens)].tolist())
        return AttentionMetadata(query_lens, seq_lens, kv_lens, starts, tables, block_size, work)


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward pass follows: first the broadcast of its batch, with these sizes."""

    num_tokens: int
    attention: AttentionSizes
    output: tuple[int, AttentionSizes] | None  # of `OutputRows`
    images: tuple[tuple[int, ...], torch.dtype] | None = None  # the shape and dtype of `StepImages.embeddings`

    @staticmethod
    def of(batch: Batch) -> Forward:
        output = batch.output_rows
        sizes = (len(output.rows), AttentionSizes.of(output.attention)) if output else None
        embeddings = batch.images.embeddings if batch.images else None
        images = None if embeddings is None else (tuple(embeddings.shape), embeddings.dtype)
        return Forward(len(batch.input_ids), AttentionSizes.of(batch.attention), sizes, images)

    def shapes(self) -> list[Shape]:
        shapes: list[Shape] = [((self.num_tokens,), torch.int64)] * 3 + self.attention.shapes()
        if self.images:
            shapes += [(self.images[0][:1], torch.int64), self.images, ((3, self.num_tokens), torch.int64)]
        if self.output:
            num_rows, attention = self.output
            shapes += [((num_rows,), torch.int64), *attention.shapes()]
        return shapes

    def buffer(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Memory for the tensors of the batch: as one tensor of bytes, and each tensor as a view of it."""
        shapes = self.shapes()
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        whole = torch.empty(sum(padded), dtype=torch.uint8, device=device)
        views = [
            piece[:size].view(dtype).view(shape)
            for piece, size, (shape, dtype) in zip(torch.split(whole, padded), sizes, shapes, strict=True)
        ]
        return whole, views

    def make(self, views: list[Tensor], block_size: int) -> Batch:
        """The batch with these tensors, without what is only needed for sampling."""
        tensors = iter(views)
        ids, positions, slots = next(tensors), next(tensors), next(tensors)
        attention = self.attention.make(tensors, block_size)
        images = StepImages(next(tensors), next(tensors), next(tensors)) if self.images else None
        batch = Batch(ids, positions, slots, (), (), slots[:0], attention, images=images)
        if self.output is None:
            return batch
        rows = next(tensors)
        return replace(batch, output_rows=OutputRows(rows, self.output[1].make(tensors, block_size)))


def tensors_of(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, in the order of `Forward.shapes`."""
    tensors = [batch.input_ids, batch.positions, batch.slot_mapping, *_tensors_of(batch.attention)]
    tensors += batch.images or ()
    if output := batch.output_rows:
        tensors += [output.rows, *_tensors_of(output.attention)]
    return tensors


def _tensors_of(attention: AttentionMetadata) -> list[Tensor]:
    tensors = [attention.kv_lens, attention.cu_seqlens_q, attention.block_tables]
    return [*tensors, attention.work.decodes, attention.work.tiles] if attention.work else tensors


@dataclass(frozen=True, slots=True)
class Logits:
    """The output head follows, for the last forward pass, or for `num_rows` hidden states that are broadcast first."""

    num_rows: int | None


@dataclass(frozen=True, slots=True)
class BeginCapture:
    """The following computations are captured, up to `EndCapture`."""

    number: int


@dataclass(frozen=True, slots=True)
class EndCapture:
    """The capture has ended."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A captured step follows."""

    number: int


Message = Start | Imported | Loaded | Forward | Logits | BeginCapture | EndCapture | Replay


class Link:
    """One end of a socket pair between rank 0 and a follower."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: Message) -> None:
        """Raises OSError if the other process has ended, or reads nothing for SEND_SECONDS."""
        self._connection.settimeout(SEND_SECONDS)
        content = pickle.dumps(message)
        self._connection.sendall(LENGTH.pack(len(content)) + content)

    def receive(self, seconds: float | None) -> Message:
        """The next message. Raises EOFError if the other process has ended, and TimeoutError after `seconds`."""
        self._connection.settimeout(seconds)
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise EOFError(f"a message of {length} bytes")
        message: Message = pickle.loads(self._read(length))
        return message

    def messages(self) -> Iterator[Message]:
        """All further messages. Raises EOFError when the other process ends."""
        while True:
            yield self.receive(None)

    def close(self) -> None:
        self._connection.close()

    def _read(self, length: int) -> bytes:
        content = bytearray()
        while len(content) < length:
            received = self._connection.recv(length - len(content))
            if not received:
                raise EOFError("the other process has ended")
            content += received
        return bytes(content)
