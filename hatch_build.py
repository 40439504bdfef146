"""Compiles the native code into a wheel: the gateway's relay of streams, and the engine's kernels.

So users need no compiler, and do not wait at the engine's first start. WARMPATH_KERNEL_LEVELS selects the levels of
instruction sets of the kernels: `native` (default) is that of this CPU, `all` every level of this architecture, for a
wheel or image that runs on other machines, and `none` no native code at all, for a wheel that is the same on every
machine. The engine compiles a level that the wheel lacks at the first start, and the gateway relays streams in Python
without the relay. Without a compiler, the wheel has no native code, and without `backend/` no kernels.

An editable installation gets the relay only, which takes a fraction of a second; `make install` compiles the kernels.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "WARMPATH_KERNEL_LEVELS"
NONE, CHOICES = "none", ("native", "all", "none")
RELAY, KERNELS = "gateway/providers/native_relay", "backend/native"


class NativeCodeHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled libraries to the wheel, and the platform to its tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        which = os.environ.get(VARIABLE, CHOICES[0])
        if which not in CHOICES:
            raise ValueError(f"{VARIABLE}={which} is not one of {', '.join(CHOICES)}")
        if version == "editable":
            self._compile_relay(Path(self.root) / RELAY / "compiled")
        elif which != NONE and sys.platform != "win32":
            self._add(build_data, RELAY, self._compile_relay(Path(self.root) / "build" / "relay"))
            self._add(build_data, KERNELS, self._compile_kernels(which))

    def _add(self, build_data: dict[str, Any], package: str, made: list[Path]) -> None:
        if not made:
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["force_include"].update({str(path): f"{package}/compiled/{path.name}" for path in made})

    def _compile_relay(self, folder: Path) -> list[Path]:
        compiler = _load(Path(self.root) / RELAY / "compiler.py")
        try:
            return [compiler.compile_relay(folder)]
        except (compiler.CompileError, OSError) as error:
            self.app.display_warning(f"The gateway will relay streams in Python: {error}")
            return []

    def _compile_kernels(self, which: str) -> list[Path]:
        source = Path(self.root) / KERNELS / "compiler.py"
        if not source.exists():
            return []
        compiler = _load(source)
        try:
            made: list[Path] = compiler.install(
                compiler.installable_levels(which), Path(self.root) / "build" / "kernels"
            )
        except (compiler.BuildError, OSError) as error:
            self.app.display_warning(f"The wheel has no compiled kernels: {error}")
            return []
        return made


def _load(source: Path) -> ModuleType:
    """The module in this file, without its package, whose dependencies are not installed in the build environment."""
    spec = importlib.util.spec_from_file_location(f"warmpath_{source.parent.name}_compiler", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
