"""The hash-pinned locks have what pyproject.toml asks for, at the versions of constraints.txt."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = {"requirements-gateway.lock": False, "requirements.lock": True}  # with the engine?


def name_of(text: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", text)
    assert found, text
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def pins(text: str) -> dict[str, str]:
    return {name_of(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_is_fresh(lock: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked, constrained = pins((ROOT / lock).read_text()), pins((ROOT / "constraints.txt").read_text())
    engine = project["optional-dependencies"]["engine"] if LOCKS[lock] else []
    needed = {name_of(text) for text in [*project["dependencies"], *engine]}
    assert needed - locked.keys() == set(), "run `make lock`"
    other = {name: version for name, version in locked.items() if constrained.get(name, version) != version}
    assert other == {}, "run `make lock`"


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_has_a_hash_and_no_index_is_named(lock: str) -> None:
    text = (ROOT / lock).read_text()
    packages = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert [package.split()[0] for package in packages if "--hash=sha256:" not in package] == []
    assert "://" not in text and "index-url" not in text
