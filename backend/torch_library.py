"""Loads torch's largest library before torch is imported, so that a thread can do it while others are imported.

`import torch` holds the interpreter's lock (GIL) while the system loads the library, which is a seventh of the import.
"""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

LIBRARY = Path("lib", "libtorch_cpu.so")  # in torch's folder
CUDA_LIBRARY = Path("lib", "libtorch_cuda.so")  # if it exists, torch has to load others before both


def library_path() -> Path | None:
    """The library's path, if torch is installed and built for CPUs."""
    torch = find_spec("torch")
    folder = Path(torch.origin).parent if torch and torch.origin else None
    if folder is None or not (path := folder / LIBRARY).is_file() or (folder / CUDA_LIBRARY).exists():
        return None
    return path


def load_library() -> bool:
    """Whether this loaded the library of a build of torch for CPUs. If not, `import torch` loads it, or fails."""
    path = library_path()
    if path is None:
        return False
    # A function that ctypes calls runs without the lock. `ctypes.CDLL(path)` would hold it until the library is loaded.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    return dlopen(os.fsencode(path), os.RTLD_NOW) is not None
