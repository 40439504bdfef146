"""Short pauses for all tests of responses in the background."""

from __future__ import annotations

import pytest

from gateway.background import follower, run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(follower, "POLL_SECONDS", 0.01)
    monkeypatch.setattr("gateway.background.service.POLL_SECONDS", 0.01)
