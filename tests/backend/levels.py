"""The levels of instruction sets at which the kernels are tested: those of this CPU, and AMX.

On a CPU without AMX, its tiles are emulated in software (`native/emulated_tiles.h`), which needs AVX-512.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from backend.native import library
from backend.native.library import Library
from backend.ops.native import NativeOps
from tests.backend.native.libraries import compile_emulated_amx

AMX = "amx"

loaded = library.load()
LEVELS_OF_THIS_CPU = loaded.level_names if loaded else ()
IS_EMULATED = LEVELS_OF_THIS_CPU[-1:] == ("avx512",)

LEVELS = tuple(dict.fromkeys((*LEVELS_OF_THIS_CPU, AMX))) if loaded else ()
RUNNING_LEVELS = (*LEVELS_OF_THIS_CPU, AMX) if IS_EMULATED else LEVELS_OF_THIS_CPU


def library_of(level: str) -> Library:
    """A library with this level. Skips the test if there is none."""
    if level not in RUNNING_LEVELS:
        pytest.skip("emulating AMX needs AVX-512, which this CPU does not have")
    if level == AMX and IS_EMULATED:
        return emulated_amx()
    assert loaded
    return loaded


def native_ops(level: str, num_threads: int | None = None) -> NativeOps:
    return NativeOps(library_of(level), level, num_threads)


class EmulatedAmx(Library):
    """Kernels with emulated tiles. Every call asserts that an Intel CPU would have accepted it."""

    def __init__(self, path: Path) -> None:
        symbols = ctypes.CDLL(str(path))
        super().__init__((AMX,), lambda name: symbols)
        symbols.complaint.restype = ctypes.c_char_p

        def check(result: Any, function: object, arguments: object) -> Any:
            complaint = symbols.complaint()
            assert complaint is None, complaint.decode()
            return result

        self.multiply_tiles = multiply_tiles(symbols)
        self.run_function(AMX).errcheck = self.multiply_tiles.errcheck = check


def multiply_tiles(symbols: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    """The function of tile_products.cpp."""
    function = symbols.multiply_tiles
    function.argtypes = [ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 3]
    function.restype = None
    return function


@cache
def emulated_amx() -> EmulatedAmx:
    return EmulatedAmx(compile_emulated_amx())
