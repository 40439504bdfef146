"""The benchmark with injected faults, with fewer requests: real processes, killed and disconnected."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import ledger_faults

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REQUESTS = 400


async def test_the_ledgers_equal_the_engines_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_faults, "FAULT_SECONDS", (0.05, 0.3))
    monkeypatch.setattr(ledger_faults, "CUT_SHARE", 0.02)
    findings = await ledger_faults.run(tmp_path, REQUESTS, clients=12, seed=1)
    assert findings.good, "\n".join(findings.lines())
    assert findings.kills and findings.cuts and findings.ends["answered"] and findings.ends["left on the way"]
    assert findings.outcomes["complete"] and findings.outcomes["client_gone"]
