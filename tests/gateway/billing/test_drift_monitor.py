"""The engines' token counters: sampled, written, and compared with what was billed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.billing.drift_monitor import DriftMonitor
from gateway.billing.ledger.engine_counters import FILE, CounterSample, read_samples
from gateway.billing.ledger.unreadable import UnreadableRow
from gateway.deployments.fleet import Fleet
from gateway.policy import Deployment, Policy
from gateway.providers.offline import OfflineProvider
from gateway.types import TokenCounters, Usage


class CountingProvider(OfflineProvider):
    def __init__(self, deployment: Deployment) -> None:
        self.counted = TokenCounters(1000, 100) if deployment.name == "a" else None

    async def token_counters(self) -> TokenCounters | None:
        return self.counted


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet(CountingProvider)
    fleet.apply(
        Policy.model_validate(
            {
                "deployments": [
                    {"name": name, "provider": provider, "base_url": f"http://{name}/v1", "model": f"model-{name}"}
                    for name, provider in (("a", "vllm"), ("uncounted", "openai"))
                ],
                "models": [{"name": "m", "deployments": ["a", "uncounted"]}],
                "tenants": [{"name": "t"}],
            }
        )
    )
    return fleet


async def test_drift_is_what_was_counted_and_not_billed(fleet: Fleet, tmp_path: Path) -> None:
    monitor = DriftMonitor(fleet, tmp_path / "replica", every_seconds=3600)
    deployment = next(iter(fleet))
    assert isinstance(deployment.provider, CountingProvider)
    await monitor.sample()
    assert monitor.drift == {}  # the first sample
    deployment.add_billed(Usage(50, 20, 10, output=9))
    deployment.provider.counted = TokenCounters(1100, 113, unwanted=3)
    await monitor.sample()
    assert monitor.drift == {("a", "input"): 20, ("a", "output"): 1}
    assert monitor.counted == {("a", "input"): 100, ("a", "output"): 10}
    deployment.provider.counted = TokenCounters(7, 7)  # the engine has restarted, so the drift is unknown
    await monitor.sample()
    assert monitor.drift == {}
    samples = read_samples(tmp_path)
    assert [(sample.deployment, sample.model, sample.input, sample.output, sample.unwanted) for sample in samples] == [
        ("a", "model-a", 1000, 100, 0), ("a", "model-a", 1100, 113, 3), ("a", "model-a", 7, 7, 0),
    ]  # fmt: skip


async def test_the_sum_of_the_workers_drifts_is_the_drift(fleet: Fleet, tmp_path: Path) -> None:
    """Only the leader includes the engine's count, and only it writes samples."""
    first = DriftMonitor(fleet, tmp_path / "w0", every_seconds=3600)
    second = DriftMonitor(fleet, tmp_path / "w1", every_seconds=3600, leads=False)
    deployment = next(iter(fleet))
    assert isinstance(deployment.provider, CountingProvider)
    await first.sample()
    deployment.provider.counted = TokenCounters(1100, 113, unwanted=3)
    deployment.add_billed(Usage(60, output=6))
    await first.sample()
    # Both monitors share one deployment here, and so its bill. Two processes would have two.
    await second.sample()
    deployment.add_billed(Usage(40, output=3))
    await second.sample()
    assert first.drift == {("a", "input"): 40, ("a", "output"): 4}
    assert second.drift == {("a", "input"): -40, ("a", "output"): -3}
    assert len(read_samples(tmp_path)) == 2  # the leader's


async def test_a_sample_that_cannot_be_written_is_logged(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "replica").write_text("in the way")
    await DriftMonitor(fleet, tmp_path / "replica", every_seconds=3600).sample()
    assert "cannot write the engines' token counters" in caplog.text


@pytest.mark.parametrize(
    "line",
    ['{"at":"2026"}', "", "\0", '{"at":"2","deployment":"d","model":"m","input":1,"output":18446744073709551615}'],
)
def test_a_malformed_sample_is_set_aside_and_named(tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "replica").mkdir()
    good = '{"at":"2026","deployment":"d","model":"m","input":1,"output":2}'
    (tmp_path / "replica" / FILE).write_text(f"{good}\n{line}\n{good}\n")
    set_aside: list[UnreadableRow] = []
    assert len(read_samples(tmp_path, set_aside=set_aside)) == 2
    assert [(row.file.name, row.line) for row in set_aside] == [(FILE, 2)]
    read_samples(tmp_path)
    assert f"{FILE}:2: " in caplog.text


def test_samples_come_from_all_replicas_in_order_of_time(tmp_path: Path) -> None:
    for replica, at in (("a", "2026-11-20T11"), ("b", "2026-11-20T10")):
        (tmp_path / replica).mkdir()
        line = f'{{"at":"{at}","deployment":"d","model":"m","input":1,"output":2}}\n'
        (tmp_path / replica / FILE).write_text(line)
    assert read_samples(tmp_path) == [
        CounterSample("2026-11-20T10", "d", "m", 1, 2),
        CounterSample("2026-11-20T11", "d", "m", 1, 2),
    ]


async def test_an_engine_that_does_not_answer_is_named(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = DriftMonitor(fleet, tmp_path / "replica", every_seconds=3600)
    deployment = next(iter(fleet))
    assert isinstance(deployment.provider, CountingProvider)
    await monitor.sample()
    assert monitor.unread == []  # the other one has no counters
    deployment.provider.counted = None
    await monitor.sample()
    assert monitor.unread == ["a"]
    assert "the token counters of a could not be read" in caplog.text
