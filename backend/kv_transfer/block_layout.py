"""What two engines must have in common to exchange blocks: the model, and the form of a block's bytes.

A hash covers the tokens of a prefix, not the weights that computed their keys and values. So engines compare their
layouts before they exchange blocks. Kernels may differ: they compute the same numbers except for the last bits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch
from msgspec import Struct

from backend.engine.kv_memory import KvMemory
from backend.engine.resolved_config import ResolvedConfig
from backend.model_files import open_model_files
from backend.models.rope_config import LongRopeScaling

SAMPLES = 4096  # of each weight file
SAMPLE_BYTES = 64


class BlockLayout(Struct, frozen=True, forbid_unknown_fields=True):
    """The layout of one engine's blocks. Those of equal layouts can be copied to each other as bytes."""

    model: str  # `fingerprint` of the weights and their configuration
    quantization: str
    dtype: str  # in which the model computes
    kv_cache_dtype: str
    scales_apart: bool
    element: str  # dtype of the cache's memory
    shape: tuple[int, ...]  # of a block: [num_layers, 2, block_size, num_kv_heads, row_width]
    byte_order: str

    @property
    def block_size(self) -> int:
        return self.shape[2]

    @property
    def block_bytes(self) -> int:
        itemsize: int = getattr(torch, self.element).itemsize
        return math.prod(self.shape) * itemsize

    def first_difference(self, other: BlockLayout) -> str | None:
        """The first field that differs, with both values. None if the layouts are equal."""
        for name in self.__struct_fields__:
            own, theirs = getattr(self, name), getattr(other, name)
            if own != theirs:
                return f"{name} is {own!r} here and {theirs!r} there"
        return None


def layout_of(config: ResolvedConfig, kv: KvMemory) -> BlockLayout:
    """The layout of an engine's blocks. Reads a quarter of a MiB from each weight file."""
    block = kv.block(0)
    return BlockLayout(
        model=fingerprint(config),
        quantization=config.quantization,
        dtype=_name(config.dtype),
        kv_cache_dtype=config.kv_cache_dtype,
        scales_apart=kv.format.scales_apart,
        element=_name(block.dtype),
        shape=tuple(block.shape),
        byte_order=sys.byteorder,
    )


def fingerprint(config: ResolvedConfig) -> str:
    """A hash over the model's settings and samples of its weight files.

    Samples instead of whole files, which would take minutes to read: training changes almost every number of a tensor.
    """
    digest = sha256(repr(replace(config.model, eos_token_ids=frozenset())).encode())
    for rope in config.model.ropes:
        if isinstance(rope.scaling, LongRopeScaling):  # the context selects its factors
            digest.update(b"long" if config.max_model_len > rope.scaling.original_max_position_embeddings else b"short")
    for path in open_model_files(config.model_dir).weight_files():
        for sample in _samples(path):
            digest.update(sample)
    return digest.hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    with path.open("rb") as file:
        for offset in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
            file.seek(offset)
            yield file.read(SAMPLE_BYTES)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
