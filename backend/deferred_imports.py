"""Defers the import of modules until one is used, for libraries that import much more than the engine needs.

`defer` names a group of modules. If one of them is imported, an empty stand-in takes its place, so that `import name`
and `from package import name` cost nothing. The first access to an attribute of a stand-in, or the import of a
submodule, imports the real modules of the whole group in the usual way. For those who still refer to a stand-in, it
passes attributes on to the real module.

Imports can have effects elsewhere, such as registrations, and can need those of others. Therefore a group is imported
completely, in the order in which `defer` names it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Of the names with two underscores, only these mean a use. Others are read from all modules, for example by `inspect`.
USED_BY_IMPORTS = ("__all__", "__path__")


def defer(names: Iterable[str]) -> None:
    """Defers the imports of these modules. Has no effect on modules that are already imported."""
    sys.meta_path.insert(0, _Group(names))


def is_deferred(name: str) -> bool:
    """Whether the module was imported and neither it nor another one of its group has been used."""
    return isinstance(sys.modules.get(name), _StandIn)


class _StandIn(ModuleType):
    """Takes the place of a module until its group is used."""

    group: _Group

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in USED_BY_IMPORTS:
            raise AttributeError(f"module {self.__name__!r} is not imported yet and has no attribute {name!r}")
        return getattr(self.group.import_module(self.__name__), name)

    def __dir__(self) -> Iterable[str]:
        return dir(self.group.import_module(self.__name__))


class _Group(MetaPathFinder, Loader):
    """Finds its modules, as stand-ins, until one of them is used. Afterwards other finders find the real ones."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = [*names]
        self._lock = threading.RLock()  # another thread must not see modules that are half imported

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self._names else None

    def exec_module(self, module: ModuleType) -> None:
        module.group = self  # type: ignore[attr-defined]
        # Only now: before, the import system reads attributes of the new module, which is no use.
        module.__class__ = _StandIn

    def import_module(self, name: str) -> ModuleType:
        """Returns the real module. The first call imports all those of which there are stand-ins."""
        with self._lock:
            names, self._names = self._names, []
            imported = [one for one in names if is_deferred(one)]
            for one in imported:
                del sys.modules[one]
            for one in imported:
                import_module(one)
            return import_module(name)
