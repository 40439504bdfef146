"""Tensors in the block types of GGUF files: rows of blocks, each with the numbers of 32 or 256 adjacent weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import gguf  # its names are only used for a GGUF file: early_imports.py defers the import until then
import torch
from torch import Tensor

from backend.model_files.quantized_tensor import QuantizedTensor

CPU = torch.device("cpu")
# The names of the types that stay as they are, and those that `Ops.pack_blocks` uses. MXFP4 is not here: see mxfp4.py.
KINDS = {name.upper(): name for name in ("q8_0", "q4_0", "iq4_nl", "iq4_xs", "q4_k", "q5_k", "q6_k")}

# Bytes that a block takes in memory and not in the file: the kernels widen scales of six bits to eight.
WIDENED_BYTES = {"Q4_K": 4, "Q5_K": 4, "IQ4_XS": 2}


def bytes_in_memory(kind: gguf.GGMLQuantizationType, num_bytes: int) -> int:
    """Returns the memory of a tensor that stays in this type and takes `num_bytes` in a file."""
    return num_bytes + num_bytes // gguf.GGML_QUANT_SIZES[kind][1] * WIDENED_BYTES.get(kind.name, 0)


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of one type."""

    kind: gguf.GGMLQuantizationType
    blocks: Tensor  # [out, bytes of a row] uint8, as in the file

    @property
    def name(self) -> str:
        """Name of the type in `KINDS`."""
        return KINDS[self.kind.name]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the dequantized rows."""
        length, size = gguf.GGML_QUANT_SIZES[self.kind]
        return len(self.blocks), self.blocks.shape[1] // size * length

    def __getitem__(self, rows: slice) -> BlockRows:
        return replace(self, blocks=self.blocks[rows])


@dataclass(frozen=True, slots=True)
class BlockTensor(QuantizedTensor):
    """Matrix in block types. Parts of a fused matrix can have different types, as llama.cpp's mixes do.

    Parts can be views of a mapped file, and stay apart until they are packed, so that nothing is copied before.
    """

    parts: tuple[BlockRows, ...]
    device: torch.device = CPU  # of the dequantized tensor; blocks are always on the CPU
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def __getitem__(self, places: int | slice) -> BlockTensor:
        rows = slice(places, places + 1) if isinstance(places, int) else places
        (part,) = self.parts  # only tensors as they are in a file are split
        return replace(self, parts=(part[rows],))

    def to(self, device: torch.device, dtype: torch.dtype) -> BlockTensor:
        return replace(self, device=device, dtype=dtype)

    def dequantize(self) -> Tensor:
        parts = [torch.from_numpy(gguf.dequantize(part.blocks.numpy(), part.kind)) for part in self.parts]
        return torch.cat(parts).to(self.device, self.dtype)

    def reordered(self, order: Callable[[Tensor], Tensor]) -> BlockTensor:
        """Returns the tensor with its rows in the order to which `order` brings the rows of any matrix."""
        return replace(self, parts=tuple(replace(part, blocks=order(part.blocks)) for part in self.parts))

    @classmethod
    def concatenate(cls, parts: Sequence[BlockTensor]) -> BlockTensor:
        return replace(parts[0], parts=tuple(rows for part in parts for rows in part.parts))

    def by_kind(self) -> list[tuple[str, list[Tensor]]]:
        """Returns the blocks of all parts. Adjacent parts of one type are together, under its name in `KINDS`."""
        return [
            (name, [rows.blocks for rows in same]) for name, same in groupby(self.parts, key=lambda rows: rows.name)
        ]
