"""Replaces torch by the native kernels between two steps, once they are compiled.

    thread "kernels"                                     engine's thread
    waits for the compilation (native/background.py)     steps with torch
    loads the weights for the kernels                    steps with torch
    hands the loaded model over ----------------------> Engine.use_kernels, between two steps

Requests continue, since both compute the same model over the same KV cache. If the compilation or the load fails, torch
continues.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable

from backend.engine.engine import Engine
from backend.engine.errors import EngineError
from backend.engine.paged_model import PagedModel
from backend.engine.torch_start import with_kernels
from backend.native import library
from backend.native.background import NICENESS, BackgroundCompilation
from backend.native.compiler import BuildError

JOIN_SECONDS_MAX = 5.0  # at a stop, for a load of weights, which nothing interrupts

TORCH_CONTINUES = "The native kernels cannot be used; torch continues to compute, several times slower"

logger = logging.getLogger(__name__)  # INFO: progress


class KernelSwap:
    """Runs from `start` to `stop`, or until the kernels are in use."""

    def __init__(
        self,
        engine: Engine,
        run_between_steps: Callable[[Callable[[], None]], None],
        compile_kernels: Callable[[], BackgroundCompilation] = BackgroundCompilation,
    ) -> None:
        """engine: one that started with torch. run_between_steps: passes a function to the engine's thread."""
        self._engine = engine
        self._run_between_steps = run_between_steps
        self._compile_kernels = compile_kernels
        self._compilation: BackgroundCompilation | None = None
        self._thread = threading.Thread(target=self._run, name="kernels", daemon=True)
        self._stopping = False

    def start(self) -> None:
        logger.info("torch computes until the native kernels are compiled")
        self._compilation = self._compile_kernels()
        self._thread.start()

    def stop(self) -> None:
        """Ends the compilation and waits for the thread. Safe to call twice, or without `start`."""
        self._stopping = True
        if self._compilation is not None:
            self._compilation.stop()
            self._thread.join(JOIN_SECONDS_MAX)

    def _run(self) -> None:
        try:
            self._wait_and_load()
        except (BuildError, EngineError, OSError) as error:
            if not self._stopping:
                logger.warning("%s: %s", TORCH_CONTINUES, error)
        except Exception:
            logger.exception(TORCH_CONTINUES)

    def _wait_and_load(self) -> None:
        assert self._compilation is not None
        self._compilation.wait()
        if self._stopping or library.load() is None:  # which has logged why
            return
        _lower_priority()
        logger.info("loading the weights for the native kernels")
        config = with_kernels(self._engine.config)
        model = PagedModel(config, self._engine.runner.kv)

        def use_kernels() -> None:
            self._engine.use_kernels(config, model)
            logger.info("the native kernels are in use")

        self._run_between_steps(use_kernels)


def _lower_priority() -> None:
    """Lowers the priority of this thread and of those that torch starts for it. Only Linux can."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
