"""Compiles the native kernels, caches the result, and calls them.

kernels.cpp and its parts are compiled once per source, compiler and architecture, into a cache directory of the user.
The library contains every level of instruction sets (base, AVX2, AVX-512, AMX). The CPU's level is determined when the
library is loaded, so one directory can serve several machines. Without a compiler, or if it fails, one line is logged
and the engine computes with torch.

A call packs one operation (`struct Op` in kernels/operations.h) and passes it to `warmpath_run`. `Caller` does this;
recording.py keeps packed operations and runs many of them in one call.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-w",
)  # fmt: skip
COMPILE_SECONDS = 300.0  # time limit; compiling takes about 25 s on one core
MAX_ERROR_CHARS = 300  # of a compiler's error output in the log

# The operations of kernels/operations.h, as (code, layout): code, number of threads, then fields of eight bytes each,
# with floats at the end.
OP_BYTES = 160
LINEAR = (0, struct.Struct("2i13q"))
EXPAND = (1, struct.Struct("2i7q"))
RMS_NORM = (2, struct.Struct("2i11qd"))
ROPE = (3, struct.Struct("2i10q"))
GATED = (4, struct.Struct("2i6q"))
STORE_KV = (5, struct.Struct("2i9q"))
ATTEND = (6, struct.Struct("2i17qdd"))
NORM_ROPE_STORE = (7, struct.Struct("2i18qd"))
EMBED = (8, struct.Struct("2i5q"))
ARGMAX = (9, struct.Struct("2i5q"))
DRAW = (10, struct.Struct("2i10q"))
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

# Enum values of kernels/operations.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
KV_FORMATS = {"auto": 0, "int8": 1, "fp8_e4m3": 2}

logger = logging.getLogger(__name__)


class Library:
    """The compiled kernels. `level_names`: the levels that this CPU supports, from the lowest to the highest."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be loaded."""
        library = ctypes.CDLL(str(path))
        self._run = library.warmpath_run
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._run.restype = None
        library.warmpath_best_level.restype = ctypes.c_int64
        library.warmpath_level_name.argtypes = [ctypes.c_int64]
        library.warmpath_level_name.restype = ctypes.c_char_p
        best = library.warmpath_best_level()
        self.level_names = tuple(library.warmpath_level_name(level).decode() for level in range(best + 1))

    def caller(self, num_threads: int, level_name: str | None = None) -> Caller:
        """A caller at one of `level_names`; None: the highest."""
        level = self.level_names.index(level_name) if level_name else len(self.level_names) - 1
        return Caller(self._run, num_threads, level, self.level_names[level])


class Caller:
    """Runs operations one at a time. Not thread-safe."""

    def __init__(self, run: ctypes._NamedFuncPointer, num_threads: int, level: int, level_name: str) -> None:
        self.level_name = level_name
        self.recorded: list[bytes] | None = None  # if set, every operation is appended to it, as `run` takes it
        self._run = run
        self._num_threads = num_threads
        self._level = level
        self._op = ctypes.create_string_buffer(OP_BYTES)
        self._address = ctypes.addressof(self._op)

    def __call__(self, op: tuple[int, struct.Struct], *fields: float, threaded: bool = True) -> None:
        """Runs one operation. Nothing is checked: the fields must fit, and pointers must be valid until it returns."""
        code, layout = op
        layout.pack_into(self._op, 0, code, self._num_threads if threaded else 1, *fields)
        self._run(self._address, 1, self._level)
        if self.recorded is not None:
            self.recorded.append(self._op.raw)

    def run(self, address: int, count: int) -> None:
        """Runs `count` operations that are packed one after the other at this address."""
        self._run(address, count, self._level)


@cache
def load() -> Library | None:
    """The library for this process. None, and a warning in the log, if it is not available."""
    try:
        return Library(build(default_cache_dir()))
    except (OSError, BuildError) as error:
        logger.warning("Native kernels are not available; torch computes instead, several times slower: %s", error)
        return None


class BuildError(Exception):
    """There is no C++ compiler, or it failed."""


def default_cache_dir() -> Path | None:
    """The cache directory for compiled kernels. None if the user has no home directory."""
    try:
        return Path.home() / ".cache" / "warmpath" / "kernels"
    except RuntimeError:
        return None


def build(cache_dir: Path | None, compilers: tuple[str, ...] = COMPILERS) -> Path:
    """Returns the compiled library, compiling it if it is not in the cache. Raises BuildError.

    Several processes may build at once: each compiles to its own file and moves that into place atomically. A directory
    that cannot be written is replaced by a new temporary one, into which no other user can have put a file.
    """
    compiler = next((path for name in compilers if (path := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(compilers)}) to compile {SOURCE.name}")
    version = _output(compiler, "--version")
    key = hashlib.sha256(b"\0".join([_source(), version.encode(), repr(FLAGS).encode()])).hexdigest()[:20]
    name = f"kernels-{platform.system()}-{platform.machine()}-{key}.so".lower()
    if cache_dir is not None and (cache_dir / name).exists():
        return cache_dir / name
    folder = _writable(cache_dir)
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as building:
        made = Path(building) / name
        _output(compiler, *FLAGS, str(SOURCE), "-o", str(made))
        made.replace(folder / name)
    return folder / name


def _source() -> bytes:
    """All source that is compiled, with the parts in order of their names."""
    parts = sorted(SOURCE.with_suffix("").rglob("*.h"))
    return b"\0".join(path.read_bytes() for path in (SOURCE, *parts))


def _writable(folder: Path | None) -> Path:
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            folder = None
    if folder is None or not os.access(folder, os.W_OK | os.X_OK):
        return Path(tempfile.mkdtemp(prefix="warmpath-kernels-"))
    return folder


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=True)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took longer than {COMPILE_SECONDS:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {error.stderr.strip()[:MAX_ERROR_CHARS]}") from error
    return done.stdout
