"""Imports torch, and what takes longest besides, in less time. `backend/__main__.py` imports this module first.

The import of torch takes most of a start. Four things shorten it:

* A thread loads torch's largest library while this thread imports what does not need torch. The system loads one
  library at a time, so what has libraries of its own is imported before.
* Parts of torch that the engine does not use are not imported (deferred_imports.py).
* The garbage collector does not run. It would visit the same objects again and again, and they live as long as the
  process.
* These objects are then excluded from later collections, with the few thousand among them that are garbage.
"""

from __future__ import annotations

import gc
import threading
from importlib import import_module
from importlib.metadata import version

from backend.deferred_imports import defer
from backend.torch_library import library_path, load_library

# What needs no torch and takes more than a few milliseconds: first what loads libraries, then what needs no others.
WITH_LIBRARIES = (
    "numpy", "llguidance", "tokenizers", "safetensors", "uvloop", "zmq", "hashlib", "markupsafe._speedups", "mmap",
    "multiprocessing.connection", "resource", "uuid",
)  # fmt: skip
WITHOUT_LIBRARIES = (
    "concurrent.futures", "jinja2.sandbox", "opentelemetry.sdk.trace.export", "prometheus_client",
    "starlette.applications", "uvicorn", "backend.options",
)  # fmt: skip

UNTIL_A_GGUF_FILE = "gguf"  # imports a dozen modules

# Parts of torch that it imports itself and the engine does not use, a third of the import: training, quantization,
# kernels for tensors without memory (`meta`) with all that they need, and replacements of GPU operations. In the order
# of `torch/__init__.py`. The last one imports others of them, and is only used by `torch.compile` and by training.
UNUSED_PARTS = (
    "torchgen.model", "torch.utils.data", "torch.distributions", "torch.optim", "torch.profiler", "torch.ao",
    "torch.nn.intrinsic", "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized", "torch.quantization",
    "torch.masked", "torch.export", "torch.distributed._meta_registrations", "torch._meta_registrations",
    "torch._native", "torch._dynamo",
)  # fmt: skip
# Torch's modules import each other in cycles, so without some of them, others may find a module half imported. These
# versions have been tested.
DEFERRED_VERSIONS = ("2.13",)


def import_all() -> None:
    """Imports the dependencies and torch. The collector is in the same state afterwards."""
    collects = gc.isenabled()
    gc.disable()
    try:
        for name in WITH_LIBRARIES:
            import_module(name)
        loading = threading.Thread(target=load_library)
        loading.start()
        for name in WITHOUT_LIBRARIES:
            import_module(name)
        defer([UNTIL_A_GGUF_FILE])
        if library_path() and version("torch").startswith(DEFERRED_VERSIONS):
            defer(UNUSED_PARTS)
        loading.join()
        import_module("torch")
        gc.freeze()
    finally:
        if collects:
            gc.enable()


import_all()
