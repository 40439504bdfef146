"""The levels of instruction sets at which kernels are tested: those of this CPU, and that of AMX in any case, with its
tiles in software where the CPU has none (`native/emulated_tiles.h`), for which it needs AVX-512 all the same."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from backend.native import library
from backend.native.library import Library
from backend.ops.native import NativeOps

AMX = "amx"
EMULATED_AMX = Path(__file__).parent / "native" / "emulated_amx.cpp"
FLAGS = (*(flag for flag in library.FLAGS if flag != "-O3"), "-O1", "-mavx512bw")  # -O3 takes three times as long

loaded = library.load()
LEVELS_OF_THIS_CPU = loaded.level_names if loaded else ()
IS_EMULATED = LEVELS_OF_THIS_CPU[-1:] == ("avx512",)

LEVELS = tuple(dict.fromkeys((*LEVELS_OF_THIS_CPU, AMX))) if loaded else ()
RUNNING_LEVELS = (*LEVELS_OF_THIS_CPU, AMX) if IS_EMULATED else LEVELS_OF_THIS_CPU


def library_of(level: str) -> Library:
    """One that has it; without any, the test is skipped."""
    if level not in RUNNING_LEVELS:
        pytest.skip("the tiles of AMX are emulated with AVX-512, which this CPU does not have")
    if level == AMX and IS_EMULATED:
        return emulated_amx()
    assert loaded
    return loaded


def native_ops(level: str, num_threads: int | None = None) -> NativeOps:
    return NativeOps(library_of(level), level, num_threads)


class EmulatedAmx(Library):
    """Of which every call asserts that an Intel CPU would have done it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        symbols = ctypes.CDLL(str(path))
        symbols.complaint.restype = ctypes.c_char_p

        def check(result: object, function: object, arguments: object) -> None:
            said = symbols.complaint()
            assert said is None, said.decode()

        self.multiply_tiles = multiply_tiles(symbols)
        self._run.errcheck = self.multiply_tiles.errcheck = check


def multiply_tiles(symbols: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    """Of tile_products.cpp."""
    function = symbols.multiply_tiles
    function.argtypes = [ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 3]
    function.restype = None
    return function


@cache
def emulated_amx() -> EmulatedAmx:
    """Compiled once for all tests of a run."""
    with tempfile.TemporaryDirectory() as folder:
        return EmulatedAmx(compiled(EMULATED_AMX, Path(folder), *FLAGS))


def compiled(source: Path, folder: Path, *flags: str) -> Path:
    compiler = next(path for name in library.COMPILERS if (path := shutil.which(name)))
    made = folder / source.with_suffix(".so").name
    subprocess.run([compiler, *flags, str(source), "-o", str(made)], check=True)
    return made
