"""Limits of a deployment's own plan: how its buckets fill and leak, and that calls go elsewhere meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.deployments.plan_limits import PlanLimits
from gateway.policy.tenants import Rate
from tests.gateway.harness import a_rig, answer, chat, counted, policy_of


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


async def test_output_counts_when_it_is_billed(tmp_path: Path) -> None:
    policy = policy_of()
    policy["deployments"][0]["plan"] = {"tokens": "5k/10m"}
    async with a_rig(tmp_path, **policy) as rig:
        rig.script(answer(usage=counted(10, 6_000)))
        for number in range(8):
            assert (await rig.ask(chat(messages=[{"role": "user", "content": f"question {number}"}]))).status == 200
        assert [receipt["deployment"] for receipt in rig.receipts()].count("a") == 1


async def test_without_another_deployment_a_call_is_refused_with_the_time_to_wait(tmp_path: Path) -> None:
    policy = policy_of(models=[{"name": "m", "deployments": ["a"]}])
    policy["deployments"][0]["plan"] = {"requests": "1/10m"}
    async with a_rig(tmp_path, **policy) as rig:
        rig.script(answer())
        assert (await rig.ask(chat())).status == 200
        refused = await rig.ask(chat())
        assert refused.status == 503 and int(refused.headers["retry-after"]) > 60
