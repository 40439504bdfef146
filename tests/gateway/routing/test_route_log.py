"""The log of routing decisions."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.core.bounded_log import CURRENT
from gateway.routing import STRATEGIES
from gateway.routing.route_log import RouteLog, read_routes
from gateway.routing.router import Router
from tests.gateway.calls import a_call, chat
from tests.gateway.routing.rig import DONE, TEXT, Rig, Script, one_deployment, two_deployments


async def ask(rig: Rig) -> None:
    call = a_call(chat("x" * 4000, stream=True), rig.policy, now=asyncio.get_running_loop().time())
    with await rig.queue.acquire_slot(call) as permit:
        async with rig.router.open(call, permit, rig.new_attempts()) as upstream:
            upstream.sent.learn_cached(1000, 0)
            upstream.sent.learn_usage(call.id, 1000, 0, 5)


def rig_with_log(folder: Path, *, log: bool) -> Rig:
    return with_log(Rig(two_deployments(), a=Script(TEXT, DONE), b=Script(TEXT, DONE)), folder, log=log)


def with_log(rig: Rig, folder: Path, *, log: bool) -> Rig:
    rig.policy = rig.policy.model_copy(update={"routing": rig.policy.routing.model_copy(update={"log": log})})
    rig.router = Router(rig.fleet, STRATEGIES, RouteLog(folder, "r"))
    return rig


async def test_a_row_has_prediction_and_outcome(tmp_path: Path) -> None:
    await ask(rig_with_log(tmp_path, log=True))
    (row,) = read_routes(tmp_path)
    assert [one.deployment for one in row.candidates] == ["a", "b"]
    assert row.candidates[0].cost_seconds <= row.candidates[1].cost_seconds
    assert row.candidates[0].ttft_seconds > 0
    assert (row.deployment, row.model, row.candidates_in_all) == ("a", "m", 2)
    assert (row.reported_prompt_tokens, row.reported_cached_tokens, row.predicted_cached_tokens) == (1000, 0, 0)
    assert row.ttft_seconds is not None
    assert "xxx" not in (tmp_path / "r" / CURRENT).read_text()


async def test_a_deployment_without_alternative_has_a_predicted_cost_if_it_is_logged_or_explained(
    tmp_path: Path,
) -> None:
    rig = with_log(Rig(one_deployment(), a=Script(TEXT, DONE)), tmp_path, log=True)
    await ask(rig)
    (row,) = read_routes(tmp_path)
    assert row.candidates[0].cost_seconds > 0
    assert row.candidates[0].ttft_seconds > 0
    now = asyncio.get_running_loop().time()
    call = a_call(chat("x" * 4000), rig.policy, now=now)
    (explained,), (tried,) = rig.router.order(call, now), rig.router.order(call, now, explains_cost=False)
    assert explained.cost_seconds > 0
    assert (tried.cost_seconds, tried.matched_tokens) == (0, explained.matched_tokens)


async def test_a_stream_that_may_resume_is_logged_once(tmp_path: Path) -> None:
    rig = rig_with_log(tmp_path, log=True)
    for script in rig.scripts.values():
        script.continues_final_message = True
    await ask(rig)
    (row,) = read_routes(tmp_path)
    assert row.deployment == "a"


async def test_nothing_is_logged_unless_the_policy_says_so(tmp_path: Path) -> None:
    await ask(rig_with_log(tmp_path, log=False))
    assert list(read_routes(tmp_path)) == []


async def test_the_log_is_bounded(tmp_path: Path) -> None:
    rig = rig_with_log(tmp_path, log=True)
    rig.router = Router(rig.fleet, STRATEGIES, RouteLog(tmp_path, "r", max_file_bytes=2000))
    for _ in range(20):
        await ask(rig)
    assert 2 <= len(list(read_routes(tmp_path))) < 20
    assert sum(file.stat().st_size for file in (tmp_path / "r").iterdir()) <= 4000
