"""Weights in the block types of GGUF files: what the kernels read and multiply, against the `gguf` package."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from backend.model_files.gguf_blocks import KINDS, BlockRows, bytes_in_memory
from backend.ops.base import PackedBlocks
from backend.ops.native import NativeOps
from tests.backend.gguf_writer import random_blocks
from tests.backend.levels import LEVELS, native_ops

if not LEVELS:
    pytest.skip("the native kernels cannot be compiled here", allow_module_level=True)

INS = 512
HALF_A_UNIT_OF_BFLOAT16 = 2**-8


@pytest.fixture(scope="module", params=LEVELS)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return native_ops(request.param)


def rows_in(kind: Kind, outs: int, seed: int = 0) -> BlockRows:
    return BlockRows(kind, torch.from_numpy(random_blocks(kind, outs, INS, seed)))


def numbers_of(rows: BlockRows) -> Tensor:
    return torch.from_numpy(gguf.dequantize(rows.blocks.numpy(), rows.kind)).double()


def packed(
    ops: NativeOps, rows: BlockRows, gate: str | None = None, split: tuple[int, ...] | None = None
) -> PackedBlocks:
    """split: the numbers of outputs of several tensors that are packed together."""
    blocks = [rows.blocks] if split is None else rows.blocks.split(split)
    return ops.pack_blocks(blocks, rows.name, INS, gate)


def inputs(count: int) -> Tensor:
    """Rows with outliers, one of zeros and, in the others, a group of zeros."""
    x = torch.randn(count, INS, generator=torch.Generator().manual_seed(count))
    x[:, 5] *= 30
    x[:, 64:96] = 0
    if count > 1:
        x[-1] = 0
    return x.bfloat16()


def rounded(x: Tensor) -> Tensor:
    """Inputs as the kernels multiply them: groups of 32 in int8."""
    groups = x.double().view(len(x), -1, 32)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scales.clamp(min=1e-30)).round() * scales).view(len(x), -1)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Equal up to rounding of the result. Inputs halfway between two int8 may be rounded either way."""
    assert torch.allclose(found.double(), expected, rtol=HALF_A_UNIT_OF_BFLOAT16, atol=4e-3 * expected.std().item())


@pytest.mark.parametrize("kind", [Kind[name] for name in KINDS], ids=lambda kind: kind.name)
def test_every_number_is_read_exactly(ops: NativeOps, kind: Kind) -> None:
    rows = rows_in(kind, 64)
    weight = packed(ops, rows)
    found = ops.embedding_blocks(torch.arange(64), weight)
    assert torch.equal(found, numbers_of(rows).float().bfloat16())
    assert weight.values.nbytes == bytes_in_memory(kind, rows.blocks.nbytes)


@pytest.mark.parametrize("kind", [Kind[name] for name in KINDS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("count", [1, 2, 3, 29])
def test_products_equal_those_of_the_dequantized_weight(ops: NativeOps, kind: Kind, count: int) -> None:
    rows, x = rows_in(kind, 96), inputs(count)
    assert_close(ops.linear_blocks(x, [packed(ops, rows)], None), rounded(x) @ numbers_of(rows).T)


def test_a_gate_is_applied_to_the_first_half_of_the_outputs(ops: NativeOps) -> None:
    rows, x = rows_in(Kind.Q4_K, 128), inputs(5)
    gates, others = (rounded(x) @ numbers_of(rows).T).chunk(2, -1)
    expected = torch.nn.functional.silu(gates) * others
    assert_close(ops.linear_blocks(x, [packed(ops, rows, "silu")], None, "silu"), expected)


@pytest.mark.parametrize(
    ("split", "gate"), [((64, 96), None), ((30, 98, 32), None), ((80, 80), "silu"), ((30, 98, 32), "silu")]
)
def test_several_tensors_are_packed_as_one(ops: NativeOps, split: tuple[int, ...], gate: str | None) -> None:
    """Whether or not their outputs fill whole panels."""
    rows = rows_in(Kind.Q5_K, 160)
    assert torch.equal(packed(ops, rows, gate, split).values, packed(ops, rows, gate).values)


def test_parts_of_different_types_are_one_layer(ops: NativeOps) -> None:
    parts, x = [rows_in(Kind.Q4_K, 64), rows_in(Kind.Q6_K, 32, seed=1)], inputs(4)
    bias = torch.arange(96).bfloat16() * 0.5
    found = ops.linear_blocks(x, [packed(ops, part) for part in parts], bias)
    assert_close(found, rounded(x) @ torch.cat([numbers_of(part) for part in parts]).T + bias.double())
