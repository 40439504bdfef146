"""Fixtures for all tests, their order, and the profiles of Hypothesis.

By default, runs have the same examples and no deadline.
"""

import gc
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import launcher
from tests.npm import node_project
from tests.openai_spec import description, validate

__all__ = ["description", "node_project", "validate"]

settings.register_profile("searching", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", settings.get_profile("searching"), derandomize=True, database=None)
settings.load_profile("steady")


def pytest_sessionstart() -> None:
    os.environ.pop("COLUMNS", None)  # which pytest-xdist sets; commands would fit their tables into this width
    launcher.enable()


def pytest_collection_finish() -> None:
    """From here on, a garbage collection looks at what tests make, and not at thousands of tests and their modules."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    launcher.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files with the longest tests first, so that no worker is left with one of them while the others idle.

    `--dist loadfile` gives each worker whole files in this order, together with `--no-loadscope-reorder`.
    """
    seconds = Counter[Path]()
    for item in items:
        if slow := item.get_closest_marker("slow"):
            seconds[item.path] += slow.kwargs.get("seconds", 3)
        elif item.get_closest_marker("e2e"):
            seconds[item.path] += 1
    items.sort(key=lambda item: -seconds[item.path])
