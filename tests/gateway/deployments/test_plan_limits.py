"""Limits of a deployment's own plan: how its buckets fill and leak, and that calls go elsewhere meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.deployments.plan_limits import PlanLimits
from gateway.policy.tenants import Rate
from tests.gateway.harness import a_rig, answer, chat, policy_of


def test_a_bucket_leaks_at_its_rate() -> None:
    limits, rate = PlanLimits(), Rate(amount=2, period=60.0)
    assert limits.charge("requests", rate, 1, 0.0) == 0.0
    assert limits.charge("requests", rate, 1, 0.0) == 30.0
    assert limits.charge("requests", rate, 1, 30.0) == 30.0
    assert limits.charge("requests", rate, 1, 300.0) == 0.0
    assert limits.charge("tokens", Rate(amount=100, period=100.0), 150, 0.0) == 51.0
    assert limits.charge("tokens", None, 10**9, 0.0) == 0.0


async def used(tmp_path: Path, plan: dict[str, Any], calls: int) -> list[str]:
    policy = policy_of()
    policy["deployments"][0]["plan"] = plan
    async with a_rig(tmp_path, **policy) as rig:
        rig.script(answer())
        for number in range(calls):
            assert (
                await rig.ask(chat(messages=[{"role": "user", "content": f"{number} {'word ' * 50}"}]))
            ).status == 200
        return [receipt["deployment"] for receipt in rig.receipts()]


async def test_a_deployment_that_has_used_its_plan_gets_no_calls(tmp_path: Path) -> None:
    assert (await used(tmp_path, {"requests": "2/10m"}, 8)).count("a") == 2


async def test_tokens_of_prompts_count_when_they_are_sent(tmp_path: Path) -> None:
    assert (await used(tmp_path, {"tokens": "50/10m"}, 8)).count("a") == 1
