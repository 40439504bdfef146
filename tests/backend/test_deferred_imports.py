"""Modules whose import is deferred: when the real one is imported, and what those who imported it earlier get."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from backend.deferred_imports import defer, is_deferred

PACKAGE = "deferred_example"
PART, OTHER = f"{PACKAGE}.part", f"{PACKAGE}.other"
FILES = {
    "__init__.py": "order = []\nfrom deferred_example import other, part\n",
    "part/__init__.py": """
import time
from deferred_example import order
order.append("part")
__all__ = ["value"]
time.sleep(0.05)
value = 7
""",
    "part/inner.py": "from deferred_example.part import value\ninner_value = value + 1\n",
    "other.py": "from deferred_example import order\norder.append('other')\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package that imports two modules itself, of which the imports are deferred."""
    for name, content in FILES.items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    defer([PART, OTHER])
    yield importlib.import_module(PACKAGE)
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def test_the_import_is_deferred_until_the_first_attribute(package: ModuleType) -> None:
    assert is_deferred(PART)
    assert package.part.value == 7
    assert not is_deferred(PART)


def test_the_real_module_takes_the_place_of_the_stand_in(package: ModuleType) -> None:
    stand_in = package.part
    assert stand_in.value == 7
    assert package.part is sys.modules[PART] is importlib.import_module(PART)
    assert package.part is not stand_in
    assert type(package.part) is ModuleType
    assert package.part.__file__
    vars(package.part)["value"] = 8
    assert stand_in.value == 8, "it passes on what the real module has now"


def test_a_submodule_needs_the_real_module(package: ModuleType) -> None:
    inner = importlib.import_module(f"{PART}.inner")
    assert not is_deferred(PART)
    assert inner.inner_value == 8
    assert package.part.inner is inner


def test_a_name_that_is_imported_from_the_module_needs_it(package: ModuleType) -> None:
    names: dict[str, object] = {}
    exec(f"from {PART} import *", names)
    assert names["value"] == 7
    assert not is_deferred(PART)


def test_a_name_that_is_missing_is_an_error_of_the_real_module(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{PART}' has no attribute 'other'"):
        _ = package.part.other


def test_tools_that_look_at_all_modules_import_nothing(package: ModuleType) -> None:
    inspect.getmodule(test_a_submodule_needs_the_real_module.__code__)
    assert not hasattr(package.part, "__file__")
    assert is_deferred(PART)
    assert "value" in dir(package.part)
    assert not is_deferred(PART)


def test_a_group_is_imported_in_its_order(package: ModuleType) -> None:
    assert package.order == []
    with pytest.raises(AttributeError):
        _ = package.other.value
    assert package.order == ["part", "other"]
    assert not is_deferred(PART)


def test_two_threads_import_it_once(package: ModuleType) -> None:
    stand_ins, found = (package.part, package.other), list[int]()

    def read(stand_in: ModuleType) -> None:
        found.append(len(dir(stand_in)) and package.part.value)

    threads = [threading.Thread(target=read, args=(stand_in,)) for stand_in in stand_ins * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [7] * 4
    assert package.order == ["part", "other"]


def test_what_is_imported_already_is_not_deferred(package: ModuleType) -> None:
    assert package.part.value == 7
    real = package.part
    defer([PART])
    assert importlib.import_module(PART) is real
    assert not is_deferred(PART)
