"""Recorded operations, run again on other inputs: bitwise what computing gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from backend.native import library
from backend.native.recording import MAX_PARTS, Program, Recorder, StepInterrupted
from backend.ops.native import NativeOps
from tests.backend.levels import LEVELS, native_ops

ROWS, SIZE = 3, 64

if library.load() is None:
    pytest.skip("there is no compiler here", allow_module_level=True)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As in a runner."""
    with torch.inference_mode():
        yield


class Chain:
    """`num_layers` layers of a norm and a gated product, over inputs that stay at their address."""

    def __init__(self, ops: NativeOps, dtype: torch.dtype, num_layers: int) -> None:
        self._ops = ops
        self._num_layers = num_layers
        self.x = torch.randn(ROWS, SIZE, dtype=dtype)
        self._norm = torch.rand(SIZE, dtype=dtype) + 0.5
        weights = [torch.randn(2 * SIZE, SIZE).to(dtype) / 8 for _ in range(num_layers)]
        self._weights = [ops.pack(weight, dtype, "silu") for weight in weights]

    def __call__(self, mark: Callable[[], None] = lambda: None) -> Tensor:
        residual, delta = self.x, self.x
        for weight in self._weights:
            mark()
            normed, residual = self._ops.add_rms_norm(delta, residual, self._norm, 1e-6)
            delta = self._ops.linear(normed.view(ROWS, 1, SIZE).flatten(1), weight, None, "silu")
        return self._ops.add_rms_norm(delta, residual, self._norm, 1e-6)[0]


def recorded(recorder: Recorder, compute: Callable[[Callable[[], None]], Tensor]) -> Program:
    _, program = recorder.record(compute)
    assert program is not None
    return program


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_program_computes_the_same_on_other_inputs(level: str, dtype: torch.dtype) -> None:
    ops = native_ops(level, 2)
    recorder = Recorder(ops.call)
    chains = [Chain(ops, dtype, num_layers) for num_layers in (1, 5, 9)]
    programs = []
    for chain in chains:
        result, program = recorder.record(chain)
        assert program is not None
        assert torch.equal(result, chain())
        programs.append(program)
    for seed in range(4):
        for chain, program in zip(chains, programs, strict=True):
            chain.x.copy_(torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(seed)))
            for is_interrupted in (None, lambda: False):
                assert torch.equal(program.run(is_interrupted), chain())


def test_memory_is_shared_by_all_layers_and_programs() -> None:
    ops = NativeOps(num_threads=1)
    recorder = Recorder(ops.call)
    recorded(recorder, Chain(ops, torch.float32, 3))
    few = recorder.num_bytes
    kept = [recorded(recorder, Chain(ops, torch.float32, num_layers)) for num_layers in (30, 60, 90)]
    assert recorder.num_bytes <= few + len(kept) * ROWS * SIZE * 4 * 2, "except for their results"


def test_a_program_is_interrupted_between_two_parts() -> None:
    ops = NativeOps(num_threads=1)
    chain = Chain(ops, torch.float32, 20)
    program = recorded(Recorder(ops.call), chain)
    num_checks = 0

    def after(most: int) -> Callable[[], bool]:
        def is_interrupted() -> bool:
            nonlocal num_checks
            num_checks += 1
            return num_checks > most

        return is_interrupted

    program.run(after(MAX_PARTS))
    assert num_checks == MAX_PARTS - 1
    for most in range(MAX_PARTS - 1):
        num_checks = 0
        with pytest.raises(StepInterrupted):
            program.run(after(most))
        assert num_checks == most + 1
    assert torch.equal(program.run(None), chain()), "an interrupted run leaves no trace"


def test_an_interrupted_recording_leaves_no_state() -> None:
    ops = NativeOps(num_threads=1)
    recorder, chain = Recorder(ops.call), Chain(ops, torch.float32, 2)

    def interrupted(mark: Callable[[], None]) -> Tensor:
        chain(mark)
        raise StepInterrupted

    with pytest.raises(StepInterrupted):
        recorder.record(interrupted)
    assert torch.equal(recorded(recorder, chain).run(None), chain())
    assert recorder.record(lambda mark: chain(mark) + 1)[1] is None
    assert torch.equal(chain() + 1, torch.add(chain(), 1)), "later operations are not recorded"


@pytest.mark.parametrize(
    "extra",
    [
        lambda x: x * 2,
        lambda x: x.mul_(1),
        lambda x: torch.zeros_like(x),
        lambda x: x.t().contiguous(),
        lambda x: x.view(ROWS, 2, -1)[:, 0].flatten(),
        lambda x: x.tolist(),
        lambda x: x[0, 0].item(),
        lambda x: x.copy_(torch.empty_like(x).normal_()),
        lambda x: torch.nn.functional.linear(x, x),
    ],
    ids=["arithmetic", "in place", "zeros", "contiguous", "flatten", "tolist", "item", "copy", "linear"],
)
def test_operations_of_torch_prevent_a_recording(extra: Callable[[Tensor], object]) -> None:
    ops = NativeOps(num_threads=1)
    chain = Chain(ops, torch.float32, 1)

    def compute(mark: Callable[[], None]) -> Tensor:
        result = chain(mark)
        extra(result)
        return result

    assert Recorder(ops.call).record(compute)[1] is None


WITHOUT_COMPILER = """
import sys, torch
from backend.native.recording import Recorder
from backend.ops.native import NativeOps
_, program = Recorder(NativeOps().call).record(lambda mark: torch.empty(2))
assert program is not None and "torch._dynamo" not in sys.modules
"""


@pytest.mark.slow
def test_recording_does_not_import_torchs_compiler() -> None:
    """Importing it would add seconds to a server's first step."""
    subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], check=True)
