"""The suite: deterministic workloads, results within bounds, and flags where the gateway's rule loses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.simulator.compare import OURS, POOLED, ROUND_ROBIN, STRATEGIES, StrategySummary, replay_strategy
from gateway.simulator.suite import SuiteRow, run_suite
from gateway.simulator.traces import TrafficTrace
from gateway.simulator.workloads import (
    RECIPES,
    SERVERS,
    Prompt,
    PromptWriter,
    ideal_seconds,
    make_workload,
    recorded_workload,
)

SHARE = 0.03


@pytest.mark.parametrize("name", RECIPES)
def test_workloads_depend_on_the_seed_only_and_have_the_stated_load(name: str) -> None:
    made = make_workload(name, 7, SHARE)
    assert made == make_workload(name, 7, SHARE) != make_workload(name, 8, SHARE)
    sessions = made.trace.sessions
    for session in sessions:
        for request in session.requests:
            assert len(request.chain) == len(set(request.chain)) == request.prompt_tokens // BLOCK_TOKENS
            assert request.prompt_tokens + request.output_tokens <= made.site.capacity_tokens
    if len(sessions) > 1:
        busy_seconds = ideal_seconds([session.requests for session in sessions])
        speed = sum(made.site.speeds) or SERVERS
        assert busy_seconds / made.trace.duration_seconds / speed == pytest.approx(made.rho)


def test_segments_are_equal_only_behind_equal_beginnings() -> None:
    writer = PromptWriter()
    one = writer.shared(writer.shared(Prompt(), "a", 128), "b", 64)
    again = writer.shared(writer.shared(Prompt(), "a", 128), "b", 64)
    swapped = writer.shared(writer.shared(Prompt(), "b", 64), "a", 128)
    assert one == again
    assert not set(one.blocks) & set(swapped.blocks)
    assert writer.unique(one, 500).blocks[:2] == one.blocks != writer.unique(one, 500).blocks
    assert writer.unique(one, 500).blocks[-1] != writer.unique(one, 500).blocks[-1]


def highest_hit_rate(trace: TrafficTrace) -> float:
    """Each block is computed at least once, by a prompt or by the answer before it. All else may be cached."""
    blocks, answers, tokens, total = set[int](), set[int](), 0, 0
    for session in trace.sessions:
        for request, following in zip(session.requests, [*session.requests[1:], None], strict=True):
            chain = request.chain
            blocks.update(chain)
            total += len(chain)
            tokens += request.prompt_tokens
            if following is not None:
                answers.update(
                    following.chain[len(chain) : (request.prompt_tokens + request.output_tokens) // BLOCK_TOKENS]
                )
    return (total - len(blocks - answers)) * BLOCK_TOKENS / tokens


@pytest.mark.slow
def test_the_quick_suite_runs_all_rows_and_strategies() -> None:
    workloads = [make_workload(name, 1, SHARE) for name in RECIPES]
    workloads.append(recorded_workload("recorded", workloads[0].trace, 1, 0.1))
    rows = list(run_suite(workloads, list(STRATEGIES), processes=2))
    assert [row.workload for row in rows] == [workload.name for workload in workloads]
    for workload, row in zip(workloads, rows, strict=True):
        assert [summary.strategy for summary in row.summaries] == list(STRATEGIES)
        at_most = highest_hit_rate(workload.trace)
        for summary in row.summaries:
            assert summary.requests == row.requests == workload.trace.requests
            assert summary.hit_rate <= at_most
            assert summary.ttft_mean_seconds > 0 and 0 < summary.ttft_p50_seconds <= summary.ttft_p99_seconds
            assert 1 <= summary.load_ratio <= SERVERS


def test_equal_seeds_give_equal_results() -> None:
    workload = make_workload("cold join", 3, SHARE)
    for name in STRATEGIES:
        assert replay_strategy(workload.trace, workload.site, name) == replay_strategy(
            workload.trace, workload.site, name
        )


def summary(name: str, mean: float, p99: float, hit_rate: float, load_ratio: float = 1.0) -> StrategySummary:
    one = StrategySummary(name, 10, hit_rate, None, mean, mean, p99, None, 0, 0.0, 1.0, load_ratio, None)
    return replace(one, ttft_p50_seconds=mean)


def test_a_row_is_flagged_for_each_way_of_losing() -> None:
    others = (summary(ROUND_ROBIN, 1.2, 5.2, 0.3), summary("other", 1.0, 4.0, 0.7), summary(POOLED, 0.1, 0.1, 0.7))
    good = SuiteRow("w", 0.8, 10, False, (summary(OURS, 1.14, 5.1, 0.69), *others))
    assert not good.flags
    assert good.best is not None and good.best.strategy == "other", "the pooled cache is no strategy"
    bad = SuiteRow("w", 0.8, 10, False, (summary(OURS, 1.5, 6.0, 0.6, 1.7), *others))
    assert bad.flags == (
        "mean 1.50 x best",
        "p99 1.50 x best",
        "mean 1.25 x round robin",
        "p99 1.15 x round robin",
        "cached -10.0 points",
        "busiest 1.70 x mean",
    )
    batch = SuiteRow("w", 0.8, 10, True, (replace(bad.summaries[0], makespan_seconds=1.1), *others))
    assert batch.flags == ("makespan 1.10 x round robin", "cached 0.600", "busiest 1.70 x mean"), "all others took 1 s"
    slow_rule_is_close = (replace(others[0], hit_rate=0.7), replace(others[1], hit_rate=0.5), others[2])
    ours = summary(OURS, 1.0, 4.0, 0.5)
    assert SuiteRow("w", 0.8, 10, False, (ours, *slow_rule_is_close)).flags == (), "the best rule is not close"
