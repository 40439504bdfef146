"""What busy periods teach about a deployment's speed."""

from __future__ import annotations

import itertools
import random

import pytest

from gateway.prefix.prefill_speed import MIN_TOKENS, PART_SECONDS, PrefillSpeed, SpeedGroup

RATE, OVERHEAD = 8000.0, 0.02


def measure(speed: PrefillSpeed, rng: random.Random, periods: int, rate: float = RATE) -> None:
    """Busy periods of mixed lengths, with an error of 20 %."""
    for _ in range(periods):
        prompts = rng.randint(1, 4)
        tokens = sum(rng.choice((60, 120, 3000)) for _ in range(prompts))
        speed.learn(prompts, tokens, (prompts * OVERHEAD + tokens / rate) * rng.uniform(0.8, 1.2))


@pytest.mark.parametrize("guess", [200, 2_000, 80_000])
def test_speed_and_overhead_are_found_whatever_the_guess(guess: int) -> None:
    speed = PrefillSpeed(guess)
    measure(speed, random.Random(1), 60)
    assert speed.tokens_per_second == pytest.approx(RATE, rel=0.15)
    assert speed.overhead_seconds == pytest.approx(OVERHEAD, rel=0.4)


@pytest.mark.parametrize("seconds", [1e-6, 3600.0])
def test_one_absurd_measurement_changes_little(seconds: float) -> None:
    speed = PrefillSpeed(2_000)
    measure(speed, random.Random(1), 60)
    before = speed.tokens_per_second
    speed.learn(1, 3000, seconds)
    assert speed.tokens_per_second == pytest.approx(before, rel=0.5)


def test_few_tokens_teach_nothing() -> None:
    speed = PrefillSpeed(2_000)
    speed.learn(1, MIN_TOKENS - 1, 1.0)
    assert not speed.is_measured


def test_equal_deployments_share_what_they_measure() -> None:
    group, one, other = SpeedGroup(), PrefillSpeed(1_000), PrefillSpeed(1_000)
    group.add(one)
    group.add(other)
    measure(one, random.Random(1), 60)
    assert other.tokens_per_second == pytest.approx(one.tokens_per_second, rel=0.2)


def test_an_unequal_deployment_goes_by_its_own_measurements() -> None:
    group, speeds, rng = SpeedGroup(), [PrefillSpeed(1_000) for _ in range(4)], random.Random(1)
    for speed in speeds:
        group.add(speed)
    for _ in range(60):
        for speed, rate in zip(speeds, (3 * RATE, RATE, RATE, RATE), strict=True):
            measure(speed, rng, 1, rate)
    assert speeds[0].tokens_per_second > 2 * speeds[1].tokens_per_second


def measure_attention(speed: PrefillSpeed, rng: random.Random, periods: int, attention: float) -> None:
    """Prompts of 200 to 8000 tokens, some of which are cached up to their last tokens, with an error of 10 %."""
    for _ in range(periods):
        prompt = rng.choice((200, 1_000, 4_000, 8_000))
        computed = rng.choice((prompt, 150))
        context = computed * (prompt - computed / 2)
        seconds = OVERHEAD + (computed + attention * context) / RATE
        speed.learn(1, computed, seconds * rng.uniform(0.9, 1.1), context)


@pytest.mark.parametrize("attention", [0.0, 1 / 4_000, 1 / 400])
def test_what_attention_costs_is_measured(attention: float) -> None:
    """With 1 / 400, the last token of a prompt of 8,000 takes 21 times as long as the first."""
    speed = PrefillSpeed(2_000)
    measure_attention(speed, random.Random(1), 80, attention)
    for cached, prompt in ((0, 300), (0, 8_000), (7_800, 8_000), (2_000, 4_000)):
        seconds = speed.work(cached, prompt) / speed.tokens_per_second + speed.overhead_seconds
        computed = prompt - cached
        expected = OVERHEAD + computed * (1 + attention * (prompt + cached) / 2) / RATE
        assert seconds == pytest.approx(expected, rel=0.25)


def test_prompts_of_one_kind_are_predicted_though_they_do_not_tell_what_attention_costs() -> None:
    speed = PrefillSpeed(2_000)
    for _ in range(40):
        speed.learn(1, 4_000, 1.0, 4_000 * 2_000)
    assert speed.work(0, 4_000) / speed.tokens_per_second + speed.overhead_seconds == pytest.approx(1.0, rel=0.05)


def test_errors_alone_teach_nothing_about_attention() -> None:
    for seed in range(20):
        speed, rng = PrefillSpeed(2_000), random.Random(seed)
        for _ in range(60):
            prompt = rng.choice((500, 1_000, 4_000, 8_000))
            computed = rng.choice((prompt, 200))
            seconds = (OVERHEAD + computed / RATE) * rng.uniform(0.7, 1.3)
            speed.learn(1, computed, seconds, computed * (prompt - computed / 2))
        assert speed.work(0, 8_000) == pytest.approx(8_000, rel=0.05)


def test_slowness_compares_equal_work() -> None:
    """One deployment gets long prompts, another one short ones, and a third one is slow."""
    long, short, slow, unknown = (PrefillSpeed(2_000) for _ in range(4))
    for _ in range(40):
        long.learn(1, 8_000, OVERHEAD + 8_000 * (1 + 4_000 / 4_000) / RATE, 8_000 * 4_000)
        for prompt in (100, 500, 2_000):
            seconds = OVERHEAD + prompt * (1 + prompt / 2 / 4_000) / RATE
            short.learn(1, prompt, seconds, prompt * prompt / 2)
            slow.learn(1, prompt, 5 * seconds, prompt * prompt / 2)
    assert long.slowness(short) == pytest.approx(1.0, rel=0.2)
    assert slow.slowness(short) == pytest.approx(5.0, rel=0.2)
    assert slow.slowness(unknown) is None and unknown.slowness(slow) is None


def test_a_period_ends_when_the_deployment_is_idle() -> None:
    speed = PrefillSpeed(1_000)
    speed.sent(0.0, usable=True, shared=False)
    speed.sent(0.1, usable=True, shared=False)
    first = speed.first_chunk(1.0, idle=False, usable=True, shared=False)
    second = speed.first_chunk(1.0, idle=True, usable=True, shared=False)
    assert first is not None and second is first
    measured = []
    for period in (first, second):
        speed.account(period, 4000, 4000)
        measured.append(speed.is_measured)
    assert measured == [False, True], "both calls must be accounted for"
    assert first.seconds == 1.0


def test_a_long_period_is_measured_in_parts() -> None:
    """A deployment that is never idle is measured all the same."""
    speed = PrefillSpeed(1_000)
    now = 0.0
    speed.sent(now, usable=True, shared=False)
    for _ in range(100):
        speed.sent(now, usable=True, shared=False)
        now += PART_SECONDS[1] / 4
        period = speed.first_chunk(now, idle=False, usable=True, shared=False)
        assert period is not None
        speed.account(period, tokens := RATE * PART_SECONDS[1] / 4, tokens)
    assert speed.tokens_per_second == pytest.approx(RATE, rel=0.1)


def test_parts_of_a_period_are_short_until_something_is_measured() -> None:
    speed, now, ends = PrefillSpeed(1_000), 0.0, list[float]()
    speed.sent(now, usable=True, shared=False)
    while now < 60.0:
        now += 0.25
        period = speed.first_chunk(now, idle=False, usable=True, shared=False)
        assert period is not None
        speed.account(period, tokens := RATE * 0.25, tokens)
        if period.seconds:
            ends.append(now)
    lengths = [end - start for start, end in itertools.pairwise((0.0, *ends))]
    assert lengths[0] == pytest.approx(PART_SECONDS[0], abs=0.25)
    assert lengths[-1] == pytest.approx(PART_SECONDS[1], abs=0.25)
    assert all(one <= other for one, other in itertools.pairwise(lengths))


def test_a_spoilt_period_teaches_nothing() -> None:
    speed = PrefillSpeed(1_000)
    speed.sent(0.0, usable=True, shared=False)
    speed.spoil()
    period = speed.first_chunk(1.0, idle=True, usable=True, shared=False)
    assert period is not None
    speed.account(period, 4000, 4000)
    assert not speed.is_measured and speed.measured_at < 0


def test_a_period_shared_with_other_gateways_only_raises_the_estimate() -> None:
    speed = PrefillSpeed(1_000)
    measure(speed, random.Random(1), 60)
    for computed, raises in ((100, False), (60_000, True)):
        before = speed.tokens_per_second
        speed.sent(0.0, usable=True, shared=True)
        period = speed.first_chunk(1.0, idle=True, usable=True, shared=True)
        assert period is not None
        speed.account(period, computed, computed)
        assert (speed.tokens_per_second > before) == (speed.measured_at == 1.0) == raises
        assert raises or speed.tokens_per_second == before
