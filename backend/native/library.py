"""Loads the native kernels and calls them.

compiler.py finds or compiles one library for each level of instruction sets (base, AVX2, AVX-512, AMX). The engine uses
the highest level that the CPU supports. Without compiled kernels and a compiler, or if it fails, one line is logged and
the engine computes with torch.

A call packs one operation (`struct Op` in kernels/operations.h) and passes it to `warmpath_run`. `Caller` does this;
recording.py keeps packed operations and runs many of them in one call.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable
from functools import cache

import torch

from backend.native import compiler
from backend.native.compiler import BuildError

# The operations of kernels/operations.h, as (code, layout): code, number of threads, then fields of eight bytes each,
# with floats at the end.
OP_BYTES = 160
LINEAR = (0, struct.Struct("2i14q"))
EXPAND = (1, struct.Struct("2i7q"))
RMS_NORM = (2, struct.Struct("2i11qd"))
ROPE = (3, struct.Struct("2i10q"))
GATED = (4, struct.Struct("2i6q"))
STORE_KV = (5, struct.Struct("2i9q"))
ATTEND = (6, struct.Struct("2i17qdd"))
NORM_ROPE_STORE = (7, struct.Struct("2i18qd"))
EMBED = (8, struct.Struct("2i6q"))
ARGMAX = (9, struct.Struct("2i5q"))
DRAW = (10, struct.Struct("2i13q"))
GATHER = (11, struct.Struct("2i5q"))
SCALE = (12, struct.Struct("2i5qd"))
PENALISE = (13, struct.Struct("2i9q"))
ADD_BIAS = (14, struct.Struct("2i6q"))
FORBID = (15, struct.Struct("2i6q"))
ROUTE = (16, struct.Struct("2i8q"))
EXPERTS = (17, struct.Struct("2i12q"))
LOGPROBS = (18, struct.Struct("2i10q"))
ADD = (19, struct.Struct("2i6q"))
LOGITS = (20, struct.Struct("2i5qdd"))
TO_INT4 = (21, struct.Struct("2i8q"))
PACK_BLOCKS = (22, struct.Struct("2i6q"))

# Enum values of kernels/operations.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
KV_FORMATS = {"auto": 0, "int8": 1, "fp8_e4m3": 2}

logger = logging.getLogger(__name__)

OpenLibrary = Callable[[str], ctypes.CDLL]  # by the level's name


class Library:
    """The kernels of this CPU. `level_names`: the levels that it supports, from the lowest to the highest."""

    def __init__(self, level_names: tuple[str, ...], open_library: OpenLibrary = compiler.open_library) -> None:
        self.level_names = level_names
        self._open_library = open_library
        self._run_by_level: dict[str, ctypes._NamedFuncPointer] = {}

    def run_function(self, level_name: str) -> ctypes._NamedFuncPointer:
        """The level's function that runs operations, from their address and number.

        Loads the level on first use, and compiles it if necessary. Raises BuildError and OSError.
        """
        if (run := self._run_by_level.get(level_name)) is None:
            run = self._run_by_level[level_name] = self._open_library(level_name).warmpath_run
            run.argtypes = [ctypes.c_void_p, ctypes.c_int64]
            run.restype = None
        return run

    def caller(self, num_threads: int, level_name: str | None = None) -> Caller:
        """A caller at one of `level_names`; None: the highest. Raises what `run_function` raises."""
        name = level_name or self.level_names[-1]
        return Caller(self.run_function(name), num_threads, name)


class Caller:
    """Runs operations one at a time. Not thread-safe."""

    def __init__(self, run: ctypes._NamedFuncPointer, num_threads: int, level_name: str) -> None:
        self.level_name = level_name
        self.num_threads = num_threads
        self.recorded: list[bytes] | None = None  # if set, every operation is appended to it, as `run` takes it
        self._run = run
        self._op = ctypes.create_string_buffer(OP_BYTES)
        self._address = ctypes.addressof(self._op)

    def __call__(self, op: tuple[int, struct.Struct], *fields: float, threaded: bool = True) -> None:
        """Runs one operation. Nothing is checked: the fields must fit, and pointers must be valid until it returns."""
        code, layout = op
        layout.pack_into(self._op, 0, code, self.num_threads if threaded else 1, *fields)
        self._run(self._address, 1)
        if self.recorded is not None:
            self.recorded.append(self._op.raw)

    def run(self, address: int, count: int) -> None:
        """Runs `count` operations that are packed one after the other at this address."""
        self._run(address, count)


@cache
def load() -> Library | None:
    """The library for this process. None, and a warning in the log, if it is not available."""
    try:
        library = Library(tuple(level.name for level in compiler.LEVELS[: compiler.best_level() + 1]))
        library.run_function(library.level_names[-1])
    except (OSError, BuildError) as error:
        logger.warning("Native kernels are not available; torch computes instead, several times slower: %s", error)
        return None
    return library
