"""Compiles the kernels in another process of lower priority, while this one serves with torch."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Sequence

from backend.native import compiler
from backend.native.compiler import ERROR_PREFIX, INTO_CACHE, BuildError

NICENESS = 5  # of the compilers: requests are served first, but a busy machine does not delay the kernels for hours
# By its path, since the program is not always in the module search path of a new process.
COMMAND = (sys.executable, "-I", compiler.__file__, INTO_CACHE)
STOP_SECONDS_MAX = 5.0  # from the end of its input until the process is killed

logger = logging.getLogger(__name__)  # INFO: progress


class BackgroundCompilation:
    """Compiles this CPU's best level into the user's cache, in a process that starts at once.

    The process ends with this one, however that ends, because it watches its standard input. What the compilers have
    not finished then is compiled again at the next start.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        nice = shutil.which("nice")
        self._process = subprocess.Popen(
            [*((nice, "-n", str(NICENESS)) if nice else ()), *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip

    def wait(self) -> None:
        """Logs the progress until the kernels are in the cache. Raises BuildError, also after `stop`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        last = "the compilation was stopped"
        with self._process.stdout as lines:
            for line in lines:
                last = line.rstrip()
                if not last.startswith(ERROR_PREFIX):
                    logger.info(last)
        status = self._process.wait()
        self._process.stdin.close()
        if status:
            raise BuildError(last.removeprefix(ERROR_PREFIX))

    def stop(self) -> None:
        """Ends the process and its compilers, if they still run. Safe to call twice and from another thread."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
