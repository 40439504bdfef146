"""Each kind of limit: what it reserves, what it settles to, its errors and its headers."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from msgspec import structs

from gateway.core.errors import BadRequest, BudgetSpent, GatewayError, LimitReached
from gateway.limits import LIMITS
from gateway.limits.base import estimate_call
from gateway.limits.limiter import UNLIMITED, Limiter
from gateway.limits.report import remaining_limits
from gateway.limits.scope import Scope
from gateway.limits.tokens import InputTokenLimit
from gateway.policy import Limits
from gateway.policy.fields import COUNT_MAX
from gateway.policy.tenants import BUDGET_MAX
from gateway.storage.memory import MemoryStorage
from gateway.types import Call, Operation, Usage
from tests.gateway.calls import a_call, a_policy, chat

NOW = 1_795_132_800.0  # 2026-11-20T00:00:00Z
PRICE = {"input": "0.50", "cached_input": "0.05", "output": "2.00"}


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> Limiter:
    return Limiter(MemoryStorage(clock=clock), LIMITS, clock=clock)


def limited(
    limits: dict[str, Any], *, price: dict[str, str] | None = None, key_limits: Limits | None = None, **body: Any
) -> Call:
    deployments = [
        {"name": "a", "base_url": "http://a.invalid/v1", "model": "served", "price": price},
        {"name": "b", "base_url": "http://b.invalid/v1", "model": "served"},
    ]
    policy = a_policy(deployments=deployments, tenants=[{"name": "t", "limits": limits}])
    call = a_call(chat(**body), policy)
    return structs.replace(call, principal=structs.replace(call.principal, limits=key_limits))


async def rejection(limiter: Limiter, call: Call) -> GatewayError:
    with pytest.raises(GatewayError) as raised:
        await limiter.admit(call)
    return raised.value


class TestRequests:
    async def test_remaining_never_exceeds_the_largest_limit(self, limiter: Limiter) -> None:
        largest = {"requests": f"{COUNT_MAX}/1m", "concurrency": COUNT_MAX, "budget": {"amount": BUDGET_MAX}}
        reservation = await limiter.admit(limited(largest, price={"input": "1"}))
        assert reservation.headers["x-ratelimit-remaining-requests"] == str(COUNT_MAX)

    async def test_headers_and_rejection(self, limiter: Limiter, clock: Clock) -> None:
        call = limited({"requests": "2/1m"})
        first, second = await limiter.admit(call), await limiter.admit(limited({"requests": "2/1m"}))
        assert first.headers == {
            "x-ratelimit-limit-requests": "2",
            "x-ratelimit-remaining-requests": "1",
            "x-ratelimit-reset-requests": "30s",
        }
        assert second.headers["x-ratelimit-reset-requests"] == "1m0s"
        clock.now += 10
        error = await rejection(limiter, limited({"requests": "2/1m"}))
        assert isinstance(error, LimitReached)
        assert error.message == "rate limit reached: tenant t may make 2 requests per 1m0s; try again in 20s"
        assert error.headers == {
            "x-ratelimit-limit-requests": "2",
            "x-ratelimit-remaining-requests": "0",
            "x-ratelimit-reset-requests": "1m0s",
            "retry-after-ms": "20000",
            "retry-after": "20",
        }
        clock.now += 20
        await limiter.admit(limited({"requests": "2/1m"}))

    async def test_a_call_that_failed_upstream_still_counts(self, limiter: Limiter) -> None:
        reservation = await limiter.admit(limited({"requests": "1/1m"}))
        await reservation.release()
        assert isinstance(await rejection(limiter, limited({"requests": "1/1m"})), LimitReached)


class TestTokens:
    async def test_the_worst_case_is_reserved_and_settled_to_the_actual_usage(self, limiter: Limiter) -> None:
        call = limited({"tokens": "1000/1m"}, max_tokens=500)
        prompt = call.prompt_tokens_estimate
        reservation = await limiter.admit(call)
        assert reservation.headers["x-ratelimit-remaining-tokens"] == str(500 - prompt)
        error = await rejection(limiter, limited({"tokens": "1000/1m"}, max_tokens=500))
        assert isinstance(error, LimitReached)
        assert error.headers["x-ratelimit-limit-tokens"] == "1000"
        await reservation.settle(Usage(input_uncached=10, cache_read=20, output=70, reasoning=30, exact=True), 0)
        after = await limiter.admit(limited({"tokens": "1000/1m"}, max_tokens=500))
        assert after.headers["x-ratelimit-remaining-tokens"] == str(900 - 500 - prompt)

    async def test_a_call_beyond_the_limit_is_not_retryable(self, limiter: Limiter) -> None:
        error = await rejection(limiter, limited({"tokens": "100/1m"}, max_tokens=100))
        assert isinstance(error, BadRequest)
        assert error.param == "max_tokens"
        assert not error.retryable

    async def test_a_guessed_output_does_not_make_a_call_impossible(self, limiter: Limiter) -> None:
        """Without max_tokens, 1,024 tokens are guessed. The limit is 100."""
        reservation = await limiter.admit(limited({"tokens": "100/1m"}))
        assert reservation.headers["x-ratelimit-remaining-tokens"] == "0"
        await reservation.settle(Usage(input_uncached=8, output=300, exact=True), 0)
        error = await rejection(limiter, limited({"tokens": "100/1m"}))
        assert isinstance(error, LimitReached)
        assert error.retry_after_seconds == pytest.approx(308 * 0.6, abs=0.1)  # the overdraft, and then the whole limit

    async def test_a_prompt_beyond_the_limit_is_impossible(self, limiter: Limiter) -> None:
        error = await rejection(limiter, limited({"tokens": "100/1m"}, content="word " * 1000))
        assert isinstance(error, BadRequest)

    def test_the_policy_sets_the_guess(self) -> None:
        call = limited({"tokens": "1M/1m", "default_output_tokens": 77})
        assert estimate_call(call, NOW).output_tokens == 77

    def test_embeddings_have_no_output(self) -> None:
        body = json.dumps({"model": "m", "input": "some text"}).encode()
        estimate = estimate_call(a_call(body, operation=Operation.EMBEDDING), NOW)
        assert (estimate.output_tokens, estimate.output_is_guessed) == (0, False)


class TestInputAndOutput:
    async def test_they_have_separate_limits(self, limiter: Limiter) -> None:
        limits = {"input_tokens": "100/1m", "output_tokens": "50/1m"}
        first = await limiter.admit(limited(limits, max_tokens=30))
        error = await rejection(limiter, limited(limits, max_tokens=30))
        assert error.message == (
            "rate limit reached: tenant t may use 50 output tokens per 1m0s; 20 are left and this request may need 30; "
            "try again in 12s"
        )
        await first.settle(Usage(input_uncached=90, output=5, exact=True), 0)
        error = await rejection(limiter, limited(limits, content="word " * 20, max_tokens=1))
        assert "tenant t may use 100 input tokens per 1m0s; 10 are left" in error.message
        await limiter.admit(limited(limits, max_tokens=45))

    async def test_a_guessed_output_is_capped_at_the_limit(self, limiter: Limiter) -> None:
        reservation = await limiter.admit(limited({"output_tokens": "50/1m"}))
        assert reservation.headers["x-ratelimit-remaining-tokens"] == "0"
        assert isinstance(await rejection(limiter, limited({"output_tokens": "50/1m"}, max_tokens=51)), BadRequest)

    @pytest.mark.parametrize(
        ("weight", "tokens_left", "input_left"),
        [(None, 1000 - 130, 1000 - 110), ("10%", 1000 - 40, 1000 - 20), (0, 1000 - 30, 1000 - 10)],
    )
    async def test_cached_input_may_count_less(
        self, limiter: Limiter, weight: Any, tokens_left: int, input_left: int
    ) -> None:
        limits = {"tokens": "1000/1m", "input_tokens": "1000/1m", "cached_input_weight": weight}
        reservation = await limiter.admit(limited(limits, max_tokens=20))
        await reservation.settle(Usage(input_uncached=10, cache_read=100, output=20, exact=True), 0)
        assert await remaining_by_kind(limiter, limits) == {"tokens": tokens_left, "input_tokens": input_left}

    def test_weighted_tokens_are_rounded_up(self) -> None:
        limits = Limits.model_validate({"input_tokens": "9/1m", "cached_input_weight": "10%"})
        limit = InputTokenLimit.from_policy(limits, Scope("t"))
        assert limit is not None
        counted = [limit.actual(Usage(cache_read=tokens), 0) for tokens in (0, 1, 10, 11, 10**9 + 1)]
        assert counted == [0, 1, 1, 2, 10**8 + 1]


class TestScopes:
    PARTS: ClassVar = [
        {"match": {"model": "alias"}, "requests": "5/1m"},
        {"match": {"class": "batch"}, "requests": "1/1m"},
        {"match": {"model": "m", "class": "realtime"}, "concurrency": 2},
    ]

    async def test_a_call_falls_under_all_that_match(self, limiter: Limiter) -> None:
        limits = {"requests": "10/1m", "parts": self.PARTS}
        key_limits = Limits.model_validate({"requests": "3/1m", "concurrency": 9})
        first = await limiter.admit(limited(limits, key_limits=key_limits))
        assert first.headers["x-ratelimit-limit-requests"] == "3"  # the limit with the least left
        assert first.headers["x-ratelimit-remaining-requests"] == "2"
        await limiter.admit(limited(limits, key_limits=key_limits))
        error = await rejection(limiter, limited(limits, key_limits=key_limits))
        assert error.message == ("model m and class realtime of tenant t may have 2 calls in flight, and has 2 now")
        await first.release_slot()
        third = await limiter.admit(limited(limits, key_limits=key_limits))
        await third.settle(Usage(), 0)
        error = await rejection(limiter, limited(limits, key_limits=key_limits))
        assert "rate limit reached: key k of tenant t may make 3 requests" in error.message
        other = await limiter.admit(limited(limits))  # with another key of the tenant
        assert other.headers["x-ratelimit-remaining-requests"] == "1"  # of the model's five

    async def test_of_two_equal_limits_the_headers_report_the_narrower(self, limiter: Limiter) -> None:
        key_limits = Limits.model_validate({"requests": "5/1h", "tokens": "1M/1m"})
        reservation = await limiter.admit(limited({"requests": "5/1m"}, key_limits=key_limits))
        assert reservation.headers["x-ratelimit-remaining-requests"] == "4"
        assert reservation.headers["x-ratelimit-reset-requests"] == "12m0s"
        assert reservation.headers["x-ratelimit-limit-tokens"] == "1000000"

    async def test_another_class_is_another_part(self, limiter: Limiter) -> None:
        limits = {"requests": "10/1m", "parts": self.PARTS}
        call = structs.replace(limited(limits), class_name="batch")
        reservation = await limiter.admit(call)
        assert reservation.headers["x-ratelimit-limit-requests"] == "1"
        error = await rejection(limiter, structs.replace(call, id="another"))
        assert "class batch of tenant t may make 1 requests" in error.message

    async def test_new_limits_of_a_key_apply_at_once(self, limiter: Limiter) -> None:
        call = limited({}, key_limits=Limits.model_validate({"requests": "1/1m"}))
        await limiter.admit(call)
        await rejection(limiter, structs.replace(call, id="2"))
        freed = structs.replace(call.principal, limits=Limits.model_validate({"requests": "9/1m"}))
        await limiter.admit(structs.replace(call, id="3", principal=freed))
        unlimited = structs.replace(call.principal, limits=None)
        assert await limiter.admit(structs.replace(call, id="4", principal=unlimited)) is UNLIMITED

    async def test_a_key_that_moved_to_another_tenant_falls_under_its_limits(self, limiter: Limiter) -> None:
        tenants = [{"name": "t", "limits": {"requests": "1/1m"}}, {"name": "u", "limits": {"requests": "9/1m"}}]
        call = a_call(policy=a_policy(tenants=tenants), key="k")
        await limiter.admit(call)
        moved = structs.replace(call.principal, tenant=call.policy.tenants_by_name["u"])
        reservation = await limiter.admit(structs.replace(call, principal=moved))
        assert reservation.headers["x-ratelimit-remaining-requests"] == "8"

    async def test_the_tenants_weight_applies_to_its_keys(self, limiter: Limiter) -> None:
        key_limits = Limits.model_validate({"tokens": "100/1m"})
        call = limited({"cached_input_weight": 0}, key_limits=key_limits, max_tokens=1)
        reservation = await limiter.admit(call)
        await reservation.settle(Usage(cache_read=1000, output=1, exact=True), 0)
        again = await limiter.admit(structs.replace(call, id="2"))
        assert int(again.headers["x-ratelimit-remaining-tokens"]) > 80

    async def test_scopes_with_unusual_names_have_different_keys(self, limiter: Limiter) -> None:
        keys = {Scope(tenant, part).key("requests") for tenant in ("t", "t/key a") for part in ("", "key a", "key/a")}
        assert len(keys) == 6


async def remaining_by_kind(limiter: Limiter, limits: dict[str, Any]) -> dict[str, int]:
    tenant = limited(limits).principal.tenant
    left = await remaining_limits(tenant, {}, LIMITS, limiter._store, now=NOW)
    return {entry["limit"]: entry["left"] for entry in left}


class TestConcurrency:
    async def test_slots_are_released(self, limiter: Limiter) -> None:
        first = await limiter.admit(limited({"concurrency": 1}))
        error = await rejection(limiter, limited({"concurrency": 1}))
        assert isinstance(error, LimitReached)
        assert error.message == "tenant t may have 1 calls in flight, and has 1 now"
        assert error.headers["retry-after-ms"] == "1000"
        await first.release()
        await limiter.admit(limited({"concurrency": 1}))


class TestBudget:
    async def test_the_highest_cost_is_reserved_and_the_actual_cost_is_spent(self, limiter: Limiter) -> None:
        limits = {"budget": {"amount": "0.003"}}
        call = limited(limits, price=PRICE, max_tokens=1000)
        reservation = await limiter.admit(call)  # 0.002 and a little for the prompt
        held = await rejection(limiter, limited(limits, price=PRICE, max_tokens=1000))
        assert isinstance(held, LimitReached)  # other calls have reserved it, and may not spend it
        await reservation.settle(Usage(), 2_000_000)
        spent = await rejection(limiter, limited(limits, price=PRICE, max_tokens=1000))
        assert isinstance(spent, BudgetSpent)
        assert not spent.retryable
        assert spent.message.startswith("tenant t may spend 0.003 per month; 0.001 is left, and this request may cost")
        await limiter.admit(limited(limits, price=PRICE, max_tokens=100))

    def test_the_estimate_is_exact_and_rounded_up(self) -> None:
        call = limited({}, price={"input": "0.0000001", "output": "1.25"}, max_tokens=3)
        assert estimate_call(call, NOW).cost_nanos == 3 * 1250 + 1

    def test_prices_of_fallbacks_count(self) -> None:
        deployments = [
            {"name": "a", "base_url": "http://a.invalid/v1", "model": "x", "price": {"input": "0", "output": "1"}},
            {"name": "b", "base_url": "http://b.invalid/v1", "model": "y", "price": {"input": "0", "output": "9"}},
        ]
        models = [{"name": "m", "deployments": ["a"], "fallbacks": ["n"]}, {"name": "n", "deployments": ["b"]}]
        call = a_call(chat(max_tokens=10), a_policy(deployments=deployments, models=models))
        assert estimate_call(call, NOW).cost_nanos == 10 * 9000

    async def test_without_a_price_nothing_is_reserved(self, limiter: Limiter) -> None:
        limits = {"budget": {"amount": "0.000000001"}}
        reservation = await limiter.admit(limited(limits))
        await reservation.settle(Usage(output=5), 1)
        assert isinstance(await rejection(limiter, limited(limits, price=PRICE)), BudgetSpent)

    @pytest.mark.parametrize(
        ("per", "seconds"),  # the test begins on a Friday
        [("hour", 3_600), ("day", 86_400), ("week", 3 * 86_400), ("month", 11 * 86_400)],
    )
    async def test_a_new_period_is_a_new_account(
        self, limiter: Limiter, clock: Clock, per: str, seconds: float
    ) -> None:
        limits = {"budget": {"amount": "1", "per": per}}
        reservation = await limiter.admit(limited(limits, price=PRICE))
        await reservation.settle(Usage(), 10**9)
        clock.now = NOW + seconds - 1
        assert isinstance(await rejection(limiter, limited(limits, price=PRICE)), BudgetSpent)
        clock.now = NOW + seconds
        await limiter.admit(limited(limits, price=PRICE))

    async def test_a_total_budget_never_resets(self, limiter: Limiter, clock: Clock) -> None:
        limits = {"budget": {"amount": "1", "per": "total"}}
        await (await limiter.admit(limited(limits, price=PRICE))).settle(Usage(), 10**9)
        clock.now += 10 * 365 * 86_400
        error = await rejection(limiter, limited(limits, price=PRICE))
        assert isinstance(error, BudgetSpent)
        assert error.message.startswith("tenant t may spend 1 in total; 0 is left")


async def test_all_limits_or_none(limiter: Limiter) -> None:
    limits = {"requests": "3/1m", "tokens": "10k/1m", "concurrency": 1, "budget": {"amount": "50"}}
    first = await limiter.admit(limited(limits, price=PRICE, max_tokens=100))
    assert {name.removeprefix("x-ratelimit-") for name in first.headers} == {
        f"{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")
    }
    for _ in range(5):
        assert isinstance(await rejection(limiter, limited(limits, max_tokens=100)), LimitReached)
    await first.release()
    second = await limiter.admit(limited(limits, price=PRICE, max_tokens=100))
    assert second.headers["x-ratelimit-remaining-requests"] == "1"  # rejected calls did not count
