"""Compiles the engine's kernels into a wheel, so that its users need no compiler and do not wait at the first start.

WARMPATH_KERNEL_LEVELS selects the levels of instruction sets: `native` (default) is that of this CPU, `all` every level
of this architecture, for a wheel or image that runs on other machines, and `none` no level. The engine compiles a level
that the wheel lacks at the first start. Without a compiler, or without `backend/`, the wheel has no kernels and is the
same on every machine.
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


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled kernels to the wheel, and the platform to its tag. Not for editable installations."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        which = os.environ.get(VARIABLE, CHOICES[0])
        if which not in CHOICES:
            raise ValueError(f"{VARIABLE}={which} is not one of {', '.join(CHOICES)}")
        source = Path(self.root) / "backend" / "native" / "compiler.py"
        if version == "editable" or which == NONE or sys.platform == "win32" or not source.exists():
            return
        compiler = _load(source)
        try:
            made = compiler.install(compiler.installable_levels(which), Path(self.root) / "build" / "kernels")
        except (compiler.BuildError, OSError) as error:
            self.app.display_warning(f"The wheel has no compiled kernels: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["force_include"].update({str(path): f"backend/native/compiled/{path.name}" for path in made})


def _load(source: Path) -> ModuleType:
    """The module in this file, without its package, whose dependencies are not installed in the build environment."""
    spec = importlib.util.spec_from_file_location("warmpath_kernel_compiler", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
