"""The calibration of the simulated engine finds constants again from the times that they give."""

from __future__ import annotations

import pytest

from benchmarks.simulator.calibrate import (
    ANSWERS,
    CALLS,
    STEPS,
    Asked,
    Measured,
    Observed,
    Scene,
    fit,
    scenes,
    simulate,
    wait_seconds,
)
from gateway.simulator.engine_steps import EngineSpeed

TRUE = EngineSpeed(
    0.0003, 2e-5, 5e-5, 4e-8, 1e-7, start=0.002, start_token=5e-7, request=0.003, request_token=2e-6, chunk=2e-4,
    step_tokens_max=512, running_max=64,
)  # fmt: skip


def observed_with_true_constants() -> list[Observed]:
    found = []
    for scene in scenes(0):
        if scene.is_test:
            continue
        lengths = [3 * len(asked.messages[0]["content"].split()) for asked in scene.requests]
        is_known = scene.kind in ("cached prompt", "next turn", "next turns at once")
        requests = [
            Measured(asked.at, 0.0, 0.0, tokens, (tokens - 100) // 16 * 16 if is_known else 0)
            for asked, tokens in zip(scene.requests, lengths, strict=True)
        ]
        one = Observed(scene, requests, {})
        counts = simulate(one, TRUE)[1]
        one.step_seconds = sum(getattr(TRUE, name) * counts[name] for name in STEPS)
        tokens = sum(asked.output_tokens for asked in scene.requests)
        one.other_seconds = len(requests) * TRUE.request + sum(lengths) * TRUE.request_token + tokens * TRUE.chunk
        found.append(one)
    return found


def test_the_constants_are_found_from_processor_times() -> None:
    found = fit(observed_with_true_constants())
    for name in (*STEPS, *CALLS):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name


def test_a_step_takes_as_long_as_its_parts() -> None:
    """What `fit` counts is what the simulated engine takes: a request alone, from its arrival to its last token."""
    for one in observed_with_true_constants():
        if len(one.requests) == 1:
            ((_, seconds),), _ = simulate(one, TRUE)
            calls = TRUE.request + TRUE.request_token * one.requests[0].prompt_tokens
            assert seconds == pytest.approx(calls + one.step_seconds, rel=1e-6), one.scene.kind


def test_a_routers_wait_is_what_the_clock_shows_beyond_processor_time() -> None:
    def observed(seconds: float, output_tokens: int, requests: int = 1) -> Observed:
        scene = Scene("agents", (Asked([], output_tokens),) * requests)
        seen = [Measured(0.0, 0.1, seconds, 100, 0)] * requests
        return Observed(scene, seen, {}, step_seconds=0.1, other_seconds=0.02)

    least, *_, most = sorted(ANSWERS)
    alone = [observed(0.12 + wait, least) for wait in (0.04, 0.04, 0.2)]  # once, the machine did something else
    others = [observed(0.12, most), observed(0.5, least, requests=2)]
    assert wait_seconds([[*alone, *others]]) == pytest.approx(0.04)
    assert wait_seconds([[observed(0.1, least)]]) == 0.0
