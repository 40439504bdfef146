"""Linear layers with adapters, for every form of weights: W x + s B A x for the rows of each adapter."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from backend.layers.lora import AdapterRows, LoraAdapter, LoraLinear, LoraPart, modules_of
from backend.model_files.gguf_blocks import BlockRows, BlockTensor
from backend.model_files.mxfp4 import Mxfp4Tensor
from backend.model_files.quantized_tensor import StoredTensor
from backend.ops.base import Ops
from backend.ops.reference import ReferenceOps
from backend.quantization import create_quantization
from tests.backend.checkpoints import random_mxfp4
from tests.backend.gguf_writer import random_blocks
from tests.backend.levels import LEVELS, native_ops

INS, OUTS = 256, (96, 96)
MODULES = [("gate_proj", OUTS[0]), ("up_proj", OUTS[1])]
BLOCKS = {"q8_0": Kind.Q8_0, "q4_k": Kind.Q4_K}
FORMS = ("none", "int8", "int4", "fp8", "mxfp4", *BLOCKS)
CPU = torch.device("cpu")


def weight_in(form: str) -> tuple[StoredTensor, str]:
    """A weight, and the quantization that the layer is made with."""
    if form in BLOCKS:
        parts = [BlockRows(BLOCKS[form], torch.from_numpy(random_blocks(BLOCKS[form], out, INS))) for out in OUTS]
        return BlockTensor(tuple(parts), dtype=torch.bfloat16), "none"
    if form == "mxfp4":
        blocks, scales = random_mxfp4(sum(OUTS), INS // 32)
        return Mxfp4Tensor.from_adjacent_pairs(blocks, scales).to(CPU, torch.bfloat16), "none"
    random = torch.Generator().manual_seed(0)
    return torch.randn(sum(OUTS), INS, generator=random).mul_(0.05).bfloat16(), form


def adapter(number: int, rank: int, *modules: int) -> LoraAdapter:
    """Changes some of the two modules."""
    random = torch.Generator().manual_seed(number)
    parts = [
        LoraPart(
            torch.randn(rank, INS, generator=random).mul_(0.05).bfloat16(),
            torch.randn(OUTS[i], rank, generator=random).bfloat16(),
            first=sum(OUTS[:i]),
        )
        for i in modules
    ]
    return LoraAdapter("a", number, b"", {"gate_proj": parts})


def added(x: Tensor, used: LoraAdapter) -> Tensor:
    total = torch.zeros(len(x), sum(OUTS))
    for a, b, first in used.parts["gate_proj"]:
        total[:, first : first + len(b)] += x.float() @ a.float().T @ b.float().T
    return total


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("level", ["reference", *LEVELS])
def test_each_row_gets_its_adapter(level: str, form: str, gate: str | None) -> None:
    ops: Ops = ReferenceOps() if level == "reference" else native_ops(level)
    torch.manual_seed(0)
    stored, quantization = weight_in(form)
    bias, x = torch.randn(sum(OUTS)).bfloat16(), torch.randn(9, INS).bfloat16()
    linear = create_quantization(quantization, ops).linear(stored, bias, gate)
    layer = LoraLinear(linear, ops, modules_of("", MODULES, INS, {}), gate)
    first, second, other = adapter(1, 3, 0, 1), adapter(2, 16, 1), LoraAdapter("other", 3, b"", {})
    users = [None, first, second, first, other, None, second, first, None]
    rows = AdapterRows.of(users, [1] * len(users), CPU)
    # The same weight without a gate gives what the adapters' products are added to.
    plain = create_quantization(quantization, ReferenceOps()).linear(stored, bias, None)(x).float()
    changes = [added(x, used) if used and used.parts else torch.zeros_like(plain) for used in users]
    expected = plain + torch.stack([change[i] for i, change in enumerate(changes)])
    torch.testing.assert_close(layer(x, rows).float(), ops.gated(expected, gate), rtol=0.05, atol=0.08)
    assert torch.equal(layer(x, None), linear(x))
    assert torch.equal(layer(x, AdapterRows.of([other], [9], CPU)), linear(x))
    whole = layer(x, AdapterRows.of([second], [9], CPU))
    torch.testing.assert_close(whole.float(), ops.gated(plain + added(x, second), gate), rtol=0.05, atol=0.08)


def test_rows_of_several_tokens_per_sequence() -> None:
    first, second = adapter(1, 2, 0), adapter(2, 2, 0)
    rows = AdapterRows.of([first, None, second, first], [2, 1, 0, 3], CPU)
    assert rows is not None
    ((chosen, parts),) = rows.parts_of("gate_proj")
    assert isinstance(chosen, Tensor)
    assert chosen.tolist() == [0, 1, 3, 4, 5]
    assert parts is first.parts["gate_proj"]
    assert AdapterRows.of([None, second], [4, 0], CPU) is None
