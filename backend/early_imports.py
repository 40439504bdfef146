"""Imports torch, and what takes longest besides, in less time. `backend/__main__.py` imports this module first.

The import of torch takes most of a start. Three things shorten it:

* A thread loads torch's largest library while this thread imports what does not need torch.
* The garbage collector does not run. It would visit the same objects again and again, and they live as long as the
  process.
* These objects are then excluded from later collections, with the few thousand among them that are garbage.
"""

from __future__ import annotations

import gc
import threading
from importlib import import_module

from backend.torch_library import load_library

# Dependencies that need no torch, and take more than a few milliseconds.
OTHERS = (
    "asyncio", "concurrent.futures", "jinja2.sandbox", "llguidance", "numpy", "opentelemetry.sdk.trace.export",
    "prometheus_client", "safetensors", "starlette.applications", "tokenizers", "uvicorn", "uvloop", "zmq",
)  # fmt: skip


def import_all() -> None:
    """Imports the dependencies and torch. The collector is in the same state afterwards."""
    collects = gc.isenabled()
    gc.disable()
    try:
        loading = threading.Thread(target=load_library)
        loading.start()
        for name in OTHERS:
            import_module(name)
        loading.join()
        import_module("torch")
        gc.freeze()
    finally:
        if collects:
            gc.enable()


import_all()
