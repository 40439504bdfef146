from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backend.engine import free_memory
from backend.engine.free_memory import free_memory_bytes

CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(free_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    return tmp_path


def test_a_machine_without_meminfo(machine: Path) -> None:
    assert free_memory_bytes(CPU) is None


def test_meminfo_available(machine: Path) -> None:
    (machine / "meminfo").write_text("MemTotal:  4000 kB\nMemFree:   100 kB\nMemAvailable:    3000 kB\n")
    assert free_memory_bytes(CPU) == 3000 * 1024


@pytest.mark.parametrize(("limit", "left"), [("max\n", 3000 * 1024), ("2000000\n", 500000), ("100\n", 0)])
def test_a_container_is_limited_by_its_cgroup(machine: Path, limit: str, left: int) -> None:
    (machine / "meminfo").write_text("MemAvailable: 3000 kB\n")
    (machine / "memory.max").write_text(limit)
    (machine / "memory.current").write_text("1500000\n")
    assert free_memory_bytes(CPU) == left


def test_this_machine_reports_a_plausible_value() -> None:
    free = free_memory_bytes(CPU)
    assert free is None or free >= 0
