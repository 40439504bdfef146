"""What the engines counted, noted and held against what was billed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.billing.drift_monitor import DriftMonitor
from gateway.billing.ledger.engine_counters import FILE, CounterSample, read_samples
from gateway.deployments.fleet import Fleet
from gateway.policy import Deployment, Policy
from gateway.providers.base import OfflineProvider
from gateway.types import TokenCounters, Usage


class Telling(OfflineProvider):
    def __init__(self, deployment: Deployment) -> None:
        self.counted = TokenCounters(1000, 100) if deployment.name == "a" else None

    async def token_counters(self) -> TokenCounters | None:
        return self.counted


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet(Telling)
    fleet.apply(
        Policy.model_validate(
            {
                "deployments": [
                    {"name": name, "base_url": f"http://{name}/v1", "model": f"model-{name}"}
                    for name in ("a", "silent")
                ],
                "models": [{"name": "m", "deployments": ["a", "silent"]}],
                "tenants": [{"name": "t"}],
            }
        )
    )
    return fleet


async def test_drift_is_what_was_done_and_not_billed(fleet: Fleet, tmp_path: Path) -> None:
    reconciliation = DriftMonitor(fleet, tmp_path / "replica", every_seconds=3600)
    server = next(iter(fleet))
    assert isinstance(server.provider, Telling)
    await reconciliation.record()
    assert reconciliation.drift == {}  # the mark to start from
    server.billed(Usage(50, 20, 10, output=9))
    server.provider.counted = TokenCounters(1100, 113, unwanted=3)
    await reconciliation.record()
    assert reconciliation.drift == {("a", "input"): 20, ("a", "output"): 1}
    server.provider.counted = TokenCounters(7, 7)  # it has restarted: nothing can be said
    await reconciliation.record()
    assert reconciliation.drift == {}
    marks = read_samples(tmp_path)
    assert [(mark.deployment, mark.model, mark.input, mark.output, mark.unwanted) for mark in marks] == [
        ("a", "model-a", 1000, 100, 0), ("a", "model-a", 1100, 113, 3), ("a", "model-a", 7, 7, 0),
    ]  # fmt: skip


async def test_the_drifts_of_workers_add_up(fleet: Fleet, tmp_path: Path) -> None:
    """The engine's count is in one of them, and so are the notes."""
    first = DriftMonitor(fleet, tmp_path / "w0", every_seconds=3600)
    second = DriftMonitor(fleet, tmp_path / "w1", every_seconds=3600, leads=False)
    server = next(iter(fleet))
    assert isinstance(server.provider, Telling)
    await first.record()
    server.provider.counted = TokenCounters(1100, 113, unwanted=3)
    server.billed(Usage(60, output=6))
    await first.record()
    # Here both have the same server and so the same bill; of two processes each has its own.
    await second.record()
    server.billed(Usage(40, output=3))
    await second.record()
    drifts = first.drift, second.drift
    assert drifts == (
        {("a", "input"): 40, ("a", "output"): 4},
        {("a", "input"): -40, ("a", "output"): -3},
    )
    assert len(read_samples(tmp_path)) == 2  # of the first


async def test_a_note_that_can_not_be_written_costs_the_note_alone(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "replica").write_text("in the way")
    await DriftMonitor(fleet, tmp_path / "replica", every_seconds=3600).record()
    assert "can not be noted" in caplog.text


def test_a_broken_mark_is_named(tmp_path: Path) -> None:
    (tmp_path / "replica").mkdir()
    (tmp_path / "replica" / FILE).write_text('{"at":"2026"}\n')
    with pytest.raises(ValueError, match=rf"{FILE}:1: .*deployment"):
        read_samples(tmp_path)


def test_marks_come_from_all_replicas_in_the_order_of_time(tmp_path: Path) -> None:
    for replica, at in (("a", "2026-11-20T11"), ("b", "2026-11-20T10")):
        (tmp_path / replica).mkdir()
        line = f'{{"at":"{at}","deployment":"d","model":"m","input":1,"output":2}}\n'
        (tmp_path / replica / FILE).write_text(line)
    assert read_samples(tmp_path) == [
        CounterSample("2026-11-20T10", "d", "m", 1, 2),
        CounterSample("2026-11-20T11", "d", "m", 1, 2),
    ]
