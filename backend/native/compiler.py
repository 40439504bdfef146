"""Compiles the native kernels, one library for each level of instruction sets, and finds compiled ones.

A library is looked for in two folders: `compiled/` in this package, which `make install` and the build of a wheel fill,
and the user's cache. Its file name contains a hash of sources and flags, so a library of other sources is never loaded,
and one that is found needs no compiler. If there is none, the parts of the level (kernels.cpp and kernels/parts/*.cpp)
are compiled in parallel.

Only the standard library is needed here, because the build of a wheel runs this file (hatch_build.py).
`python -m backend.native.compiler` fills `compiled/`. With `--into-cache` it fills the user's cache, for an engine that
serves meanwhile (background.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
INSTALLED = SOURCES / "compiled"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fvisibility=hidden", "-w",
)  # fmt: skip
PART_SECONDS = 900.0  # time limit for one part, which takes up to 40 s of CPU time
MAX_JOBS = 8  # compilers at once; each takes up to 0.4 GB of memory
MAX_ERROR_CHARS = 300  # of a compiler's error output in an error message

_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (
    *_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx512bf16",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Level:
    """A level of instruction sets. `flags`: what kernels/level.h and the parts are compiled with."""

    name: str
    flags: tuple[str, ...] = ()
    extra_parts: tuple[str, ...] = ()  # besides those that every level has


# From the lowest to the highest. cpu.cpp returns an index of this tuple.
LEVELS = (
    Level("base", ("-DLEVEL=base", "-DWIDTH=16")),
    Level("avx2", ("-DLEVEL=avx2", "-DWIDTH=32", *_AVX2)),
    Level("avx512", ("-DLEVEL=avx512", "-DWIDTH=64", *_AVX512)),
    # Its namespace is that of AVX-512, to which it adds the products and the attention by tiles.
    Level(
        "amx",
        ("-DLEVEL=avx512", "-DWIDTH=64", *_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        ("amx_attention", "amx_products"),
    ),
)
PARTS = (  # files of kernels/parts; the slowest ones first
    "block_products", "attention", "products", "packed_products", "elementwise", "prompt_attention", "sampling",
    "experts",
)  # fmt: skip
CPU = "cpu"  # the library that tells which levels this CPU supports
BUILDING = "building-"  # prefix of the folder in which a library is made
INTO_CACHE = "--into-cache"
ERROR_PREFIX = "error: "  # of the last line of a run with INTO_CACHE that fails

logger = logging.getLogger(__name__)  # INFO: progress


class BuildError(Exception):
    """There is no C++ compiler, or it failed."""


def best_level() -> int:
    """The highest level that this CPU supports, as an index of `LEVELS`. Raises BuildError and OSError."""
    best = open_library(CPU).warmpath_best_level
    best.restype = ctypes.c_int64
    return int(best())


def open_library(name: str) -> ctypes.CDLL:
    """The compiled library `CPU`, or that of the level of this name. Compiles it if there is none.

    Raises BuildError if it cannot be compiled, and OSError if it cannot be loaded afterwards.
    """
    if (compiled := open_compiled(name)) is not None:
        return compiled
    return ctypes.CDLL(str(compile_library(name, _writable(default_cache_dir()))))


def open_compiled(name: str) -> ctypes.CDLL | None:
    """As `open_library`, but None if there is no compiled library that can be loaded."""
    for found in find(name):
        with contextlib.suppress(OSError):  # for example, made on a system with a newer C++ library
            return ctypes.CDLL(str(found))
    return None


def is_compiled() -> bool:
    """Whether this CPU's best level can be loaded without a compiler."""
    return open_compiled(CPU) is not None and open_compiled(LEVELS[best_level()].name) is not None


def can_write_cache() -> bool:
    """Whether compiled libraries can be kept in the user's cache."""
    return _is_writable(default_cache_dir())


def find(name: str) -> list[Path]:
    """The files that may hold this library: in the package, and in the user's cache."""
    folders = (INSTALLED, default_cache_dir())
    return [path for folder in folders if folder is not None and (path := folder / file_name(name)).is_file()]


def file_name(name: str) -> str:
    """The library's file name. It differs for other sources, flags and machines."""
    key = _hash_of_folder(SOURCES)
    return f"kernels-{name}-{platform.system()}-{platform.machine()}-{key}.so".lower()


@cache  # a start looks for several libraries, each several times
def _hash_of_folder(folder: Path) -> str:
    return hash_of(path for path in folder.rglob("*") if path.suffix in (".cpp", ".h"))


def hash_of(sources: Iterable[Path], flags: Sequence[str] = ()) -> str:
    """A hash of these sources, of `flags` and of the flags of all levels, for a file name."""
    parts = [*(path.read_bytes() for path in sorted(sources)), repr((FLAGS, LEVELS)).encode(), *map(str.encode, flags)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def default_cache_dir() -> Path | None:
    """The user's cache folder for compiled kernels: in XDG_CACHE_HOME, or ~/.cache. None if there is no home folder.

    As the XDG specification demands, a relative path in XDG_CACHE_HOME is ignored.
    """
    if (given := os.environ.get("XDG_CACHE_HOME")) and Path(given).is_absolute():
        return Path(given) / "warmpath" / "kernels"
    try:
        return Path.home() / ".cache" / "warmpath" / "kernels"
    except RuntimeError:
        return None


def compile_library(name: str, folder: Path, compilers: tuple[str, ...] = COMPILERS) -> Path:
    """Compiles a library into this folder and returns its file. Raises BuildError."""
    sources, flags = _sources_of(name)
    return compile_once(folder / file_name(name), sources, (*FLAGS, *flags), name, compilers)


def compile_once(
    made: Path, sources: Sequence[Path], flags: Sequence[str], name: str, compilers: tuple[str, ...] = COMPILERS
) -> Path:
    """Compiles the sources into the file `made` and returns it. Raises BuildError.

    If several processes do this at once, the later ones wait for the first and use its file.
    """
    compiler = next((path for one in compilers if (path := shutil.which(one))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(compilers)})")
    with _only_one(made.parent):
        if _loads(made):  # another process has compiled it meanwhile
            return made
        for left_over in made.parent.glob(f"{BUILDING}*"):  # by a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=made.parent, prefix=BUILDING) as building:
            linked = Path(building) / made.name
            build(compiler, sources, flags, linked, name)
            linked.replace(made)
    return made


def build(compiler: str, sources: Sequence[Path], flags: Sequence[str], made: Path, name: str) -> None:
    """Compiles the sources in parallel, with their object files beside `made`, and links them. Raises BuildError."""
    objects = [made.with_name(f"{source.stem}.o") for source in sources]
    commands = [
        [compiler, *flags, "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    logger.info("compiling the native kernels (%s): %d parts", name, len(commands))
    with ThreadPoolExecutor(min(_num_cores(), MAX_JOBS)) as jobs:
        running = [jobs.submit(_run, command) for command in commands]
        try:
            for count, one in enumerate(as_completed(running), 1):
                one.result()
                logger.info("compiling the native kernels (%s): %d of %d", name, count, len(commands))
        finally:
            jobs.shutdown(cancel_futures=True)
    _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(made)])


def install(names: tuple[str, ...], folder: Path) -> list[Path]:
    """Puts these libraries into a folder, compiled before or now. Removes those of other sources.

    Raises BuildError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name in names:
        target = folder / file_name(name)
        found = next(filter(_loads, find(name)), None)
        if found is not None and not target.is_file():
            shutil.copy(found, target)
        made.append(target if target.is_file() else compile_library(name, folder))
    current = {file_name(name) for name in (CPU, *(level.name for level in LEVELS))}
    for path in folder.glob("*.so"):
        if path.name not in current:
            path.unlink(missing_ok=True)
    return made


def installable_levels(which: str) -> tuple[str, ...]:
    """The libraries to install: `all`, or those that this CPU needs (`native`). Raises BuildError and OSError."""
    if which == "all":
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        return (CPU, *(level.name for level in (LEVELS if is_x86 else LEVELS[:1])))
    return (CPU, LEVELS[best_level()].name)


def _sources_of(name: str) -> tuple[list[Path], tuple[str, ...]]:
    if name == CPU:
        return [SOURCES / "cpu.cpp"], ()
    level = next(level for level in LEVELS if level.name == name)
    parts = (SOURCES / "kernels" / "parts" / f"{part}.cpp" for part in (*PARTS, *level.extra_parts))
    return [*parts, SOURCES / "kernels.cpp"], level.flags


def _loads(library: Path) -> bool:
    """Whether the file exists and can be loaded here."""
    try:
        return library.is_file() and bool(ctypes.CDLL(str(library)))
    except OSError:
        return False


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which the system releases if this process dies. Waits while another process has it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that compiles the native kernels")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _writable(folder: Path | None) -> Path:
    """The folder, or a new temporary one, into which no other user can have put a file, if it cannot be written."""
    if folder is not None and _is_writable(folder):
        return folder
    return Path(tempfile.mkdtemp(prefix="warmpath-kernels-"))


def _is_writable(folder: Path | None) -> bool:
    """Whether files can be put into the folder, which is created if it is missing."""
    if folder is None:
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=PART_SECONDS, check=True)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took longer than {PART_SECONDS:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {error.stderr.strip()[:MAX_ERROR_CHARS]}") from error
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error


def _stop_with_stdin() -> None:
    """Ends this process and its compilers when standard input closes, which it does if the parent process ends."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGTERM)


def main(arguments: Sequence[str]) -> int:
    """Fills `compiled/`. Without a compiler, it says so and succeeds: the engine then computes with torch.

    With `--into-cache`, compiles this CPU's best level into the user's cache. A failure is the last line.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        if INTO_CACHE in arguments:
            threading.Thread(target=_stop_with_stdin, daemon=True).start()
            open_library(LEVELS[best_level()].name)
        else:
            install(installable_levels("native"), INSTALLED)
    except (BuildError, OSError) as error:
        if INTO_CACHE in arguments:
            print(f"{ERROR_PREFIX}{error}")
            return 1
        print(f"the native kernels are not compiled, so torch will compute, several times slower: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
