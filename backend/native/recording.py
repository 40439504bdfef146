"""Native operations, recorded while they compute something, and done again at one command over the same memory.

    recorder = Recorder(ops.call, attention.call)
    result, program = recorder.record(compute)      computes, as ever
    result = program.run(is_interrupted)               the same operations on what compute's inputs hold then

A recording is of no use if anything was computed beside the operations, since that would not be done again. So torch is
watched meanwhile: it may reserve memory and look at it in other shapes, and after anything else there is no program.

What is reserved is given again as soon as nobody refers to it, as by any allocator: the operations come in the same
order each time, so that by the time one writes there, the last to read it has run. All programs of a recorder share
that memory.
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

RESERVING = frozenset({"aten::empty", "aten::empty_like", "aten::new_empty"})
VIEWING = frozenset(
    f"aten::{name}" for name in ("chunk", "flatten", "select", "slice", "split_with_sizes", "unflatten", "view")
)
MAX_PARTS = 4  # of a program: between two, this thread waits for Python's lock if another has it
LEAST_BYTES = 64  # that are reserved together: the sizes are its doubles

logger = logging.getLogger(__name__)

StopCheck = Callable[[], bool]


class StepInterrupted(Exception):
    """A computation was left before its end."""


def raise_if_interrupted(is_interrupted: StopCheck | None) -> None:
    """Raises `StepInterrupted` if there is somebody to ask, who says so."""
    if is_interrupted is not None and is_interrupted():
        raise StepInterrupted


class Program:
    """Operations in several parts, and what they result in."""

    def __init__(
        self, caller: Caller, operations: Sequence[bytes], marks: Sequence[int], result: Tensor, memory: _Memory
    ) -> None:
        """marks: where parts may begin, of which some are taken. memory: what the operations use."""
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
    """Of what these callers run, for computations that nobody does at the same time."""

    def __init__(self, *callers: Caller) -> None:
        """The callers must have the same level."""
        self._callers = callers
        self._memory = _Memory()

    @property
    def num_bytes(self) -> int:
        """Of memory for what is computed in between."""
        return self._memory.num_bytes

    def record(self, compute: Callable[[Callable[[], None]], Tensor]) -> tuple[Tensor, Program | None]:
        """What `compute` gives, and how that is done again: None if it did more than operations. `compute` is told what
        to call where a part may end and the next begin. What it reads must stay where it is."""
        operations: list[bytes] = []
        marks: list[int] = []
        with _Watch(self._memory) as watch:
            try:
                for caller in self._callers:
                    caller.noted = operations
                result = compute(lambda: marks.append(len(operations)))
            finally:
                for caller in self._callers:
                    caller.noted = None
        if watch.seen is not None:
            logger.debug("not recorded, because of %s", watch.seen)
            return result, None
        return result, Program(self._callers[0], operations, marks, result, self._memory)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Over all that torch does in this thread."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: str | None = None  # the first thing that cannot be recorded
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for that, which takes seconds of the first step, and nobody compiles."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.seen is not None:
            return result
        name = func._schema.name
        if name in RESERVING and result.is_contiguous():
            return self._memory.like(result)
        if name not in VIEWING or not _is_within(result, args[0]):
            self.seen = name
        return result


def _is_within(result: Any, tensor: Tensor) -> bool:
    """Whether one tensor, or each of several, lies in another's memory."""
    parts = (result,) if isinstance(result, Tensor) else result
    own = tensor.untyped_storage().data_ptr()
    return all(part.untyped_storage().data_ptr() == own for part in parts)


class _Memory:
    """Pieces that are kept for as long as this lives, and given again when nobody refers to them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by size, in bytes

    def like(self, tensor: Tensor) -> Tensor:
        """A contiguous one of the same shape and dtype."""
        size = LEAST_BYTES
        while size < tensor.nbytes:
            size *= 2
        free = self._free[size]
        if free:
            piece = free.pop()
        else:
            piece = torch.empty(size, dtype=torch.uint8)
            self.num_bytes += size
        given = piece.numpy()[: tensor.nbytes]  # of which torch lets go with the last view of it
        weakref.finalize(given, free.append, piece).atexit = False
        return torch.from_numpy(given).view(tensor.dtype).view(tensor.shape)
