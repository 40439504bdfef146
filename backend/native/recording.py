"""Records native operations while they compute, and replays them with one call over the same memory.

    recorder = Recorder(ops.call, attention.call)
    result, program = recorder.record(compute)      computes as usual
    result = program.run(is_interrupted)            runs the same operations on the current content of the inputs

A recording is valid only if nothing was computed outside of the native operations, since that would not be replayed. So
torch's dispatcher is watched meanwhile: torch may allocate memory and make views of it; after anything else, there is
no program.

Memory for intermediate results is reused as soon as no tensor refers to it, as by any allocator. This is safe in a
replay, because the operations run in the same order each time: when one overwrites memory, its last reader has run.
All programs of a recorder share this memory.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from backend.native.library import OP_BYTES, Caller

ALLOCATING = frozenset({"aten::empty", "aten::empty_like", "aten::new_empty"})
VIEWING = frozenset(
    f"aten::{name}" for name in ("chunk", "flatten", "select", "slice", "split_with_sizes", "unflatten", "view")
)
MAX_PARTS = 4  # of an interruptible program: between two parts, this thread has to acquire the GIL again
MIN_PIECE_BYTES = 64  # the smallest allocation; sizes are powers of two times this

logger = logging.getLogger(__name__)

StopCheck = Callable[[], bool]  # returns True if the running step is to be abandoned


class StepInterrupted(Exception):
    """The running step was abandoned before its end."""


def raise_if_interrupted(is_interrupted: StopCheck | None) -> None:
    """Raises `StepInterrupted` if there is a check and it returns True."""
    if is_interrupted is not None and is_interrupted():
        raise StepInterrupted


class Program:
    """Recorded operations in several parts, and their result."""

    def __init__(
        self, caller: Caller, operations: Sequence[bytes], marks: Sequence[int], result: Tensor, memory: _Memory
    ) -> None:
        """marks: indexes at which a part may begin; some are used. memory: keeps the operations' memory alive."""
        self._caller = caller
        self._memory = memory
        self._operations = ctypes.create_string_buffer(b"".join(operations), len(operations) * OP_BYTES)
        first, num_begun = ctypes.addressof(self._operations), min(len(marks), MAX_PARTS - 1)
        bounds = [0, *(marks[len(marks) * i // (num_begun + 1)] for i in range(1, num_begun + 1)), len(operations)]
        self._parts = [(first + begin * OP_BYTES, end - begin) for begin, end in pairwise(bounds)]
        self._whole = (first, len(operations))
        self._result = result

    def run(self, is_interrupted: StopCheck | None) -> Tensor:
        """Runs the recorded operations. The result is valid until the next run.

        `is_interrupted` is called between two parts; if it returns True, `StepInterrupted` is raised. Without it, all
        parts run as one call.
        """
        if is_interrupted is None:
            self._caller.run(*self._whole)
            return self._result
        first, *others = self._parts
        self._caller.run(*first)
        for part in others:
            raise_if_interrupted(is_interrupted)
            self._caller.run(*part)
        return self._result


class Recorder:
    """Records what these callers run. Its programs share memory, so only one may run at a time."""

    def __init__(self, *callers: Caller) -> None:
        """The callers must have the same level."""
        self._callers = callers
        self._memory = _Memory()

    @property
    def num_bytes(self) -> int:
        """The size of the memory for intermediate results."""
        return self._memory.num_bytes

    def record(self, compute: Callable[[Callable[[], None]], Tensor]) -> tuple[Tensor, Program | None]:
        """Runs `compute`. Returns its result, and a program that repeats it; None if it cannot be recorded.

        `compute` gets a function to call wherever a part of the program may begin. Its inputs must stay at their
        addresses for as long as the program is used.
        """
        operations: list[bytes] = []
        marks: list[int] = []
        with _DispatchWatch(self._memory) as watch:
            try:
                for caller in self._callers:
                    caller.recorded = operations
                result = compute(lambda: marks.append(len(operations)))
            finally:
                for caller in self._callers:
                    caller.recorded = None
        if watch.seen is not None:
            logger.debug("Decode step not recorded because torch ran %s", watch.seen)
            return result, None
        return result, Program(self._callers[0], operations, marks, result, self._memory)


class _DispatchWatch(TorchDispatchMode):
    """Watches all operations of torch in this thread, and allocates their results from the recorder's memory."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: str | None = None  # the first thing that cannot be recorded
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No. Otherwise torch would import its compiler, which adds seconds to the first step and is not used."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.seen is not None:
            return result
        name = func._schema.name
        if name in ALLOCATING and result.is_contiguous():
            return self._memory.like(result)
        if name not in VIEWING or not _is_within(result, args[0]):
            self.seen = name
        return result


def _is_within(result: Any, tensor: Tensor) -> bool:
    """Whether one tensor, or each of several, is a view of another's memory."""
    parts = (result,) if isinstance(result, Tensor) else result
    own = tensor.untyped_storage().data_ptr()
    return all(part.untyped_storage().data_ptr() == own for part in parts)


class _Memory:
    """A memory pool: pieces are never returned to the system, but reused when no tensor refers to them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by size, in bytes

    def like(self, tensor: Tensor) -> Tensor:
        """An uninitialised contiguous tensor of the same shape and dtype."""
        size = MIN_PIECE_BYTES
        while size < tensor.nbytes:
            size *= 2
        free = self._free[size]
        if free:
            piece = free.pop()
        else:
            piece = torch.empty(size, dtype=torch.uint8)
            self.num_bytes += size
        array = piece.numpy()[: tensor.nbytes]  # torch releases this object with the last view of it
        weakref.finalize(array, free.append, piece).atexit = False
        return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)
