"""Limits of tenants with parents and of end users: one admission takes them all, or none."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gateway.core.errors import BudgetSpent, GatewayError, LimitReached
from gateway.core.ids import new_event_id
from gateway.limits import LIMITS, applicable, tenant_slices
from gateway.limits.limiter import Limiter, Reservation
from gateway.limits.report import remaining_limits
from gateway.limits.slices import Slices
from gateway.policy import Policy
from gateway.storage.memory import MemoryStorage
from gateway.types import Call, Principal, Usage
from tests.gateway.calls import a_call, a_policy, chat

NOW = 1_795_132_800.0


PER_REQUEST = {"input": "0", "output": "0", "request": "1"}


def tree(price: dict[str, str] | None = None, **limits: Any) -> Policy:
    """An organisation `o` with the project `p`, its team `q` and the user `r`; another team `q2` of the project."""
    parents = {"o": None, "p": "o", "q": "p", "q2": "p", "r": "q"}
    return a_policy(
        models=[{"name": "m", "deployments": ["a"], "price": price}],
        tenants=[{"name": name, "parent": parent, "limits": limits.get(name, {})} for name, parent in parents.items()],
    )


def a_limiter(store: MemoryStorage | Slices) -> Limiter:
    slices = store if isinstance(store, Slices) else None
    memory = store._store if isinstance(store, Slices) else store
    return Limiter(memory, LIMITS, slices=slices, clock=lambda: NOW)


def by(policy: Policy, tenant: str, user: str | None = None, *, key: str | None = None, **body: Any) -> Call:
    fields = {"user": user, **body} if user is not None else body
    return a_call(chat(max_tokens=1, **fields), policy, tenant=tenant, key=key or f"key_{tenant}")


async def left(store: MemoryStorage, policy: Policy, tenant: str, end_user: str | None = None) -> dict[str, Any]:
    found = await remaining_limits(policy.tenants_by_name[tenant], {}, LIMITS, store, now=NOW, end_user=end_user)
    return {f"{entry['scope']}: {entry['limit']}": entry["left"] for entry in found}


async def refused(limits: Limiter, call: Call) -> GatewayError:
    with pytest.raises(GatewayError) as raised:
        await limits.admit(call)
    return raised.value


@pytest.mark.parametrize("narrow", ["o", "p", "q", "r", "key_r"])
async def test_every_level_can_refuse_a_call_of_the_lowest(narrow: str) -> None:
    policy, store = tree(**{narrow: {"requests": "1/1h"}}), MemoryStorage()
    limits = a_limiter(store)
    call = by(policy, "r")
    if narrow == "key_r":
        own = policy.tenants_by_name["r"].limits.model_validate({"requests": "1/1h"})
        call = structs.replace(call, principal=structs.replace(call.principal, limits=own))
    await limits.admit(call)
    error = await refused(limits, structs.replace(call, id="2"))
    assert isinstance(error, LimitReached)
    name = "key key_r of tenant r" if narrow == "key_r" else f"tenant {narrow}"
    assert f"{name} may make 1 requests" in error.message


async def test_a_refused_call_takes_nothing_at_any_level() -> None:
    policy, store = (
        tree(
            o={"requests": "5/1h"},
            p={"concurrency": 3},
            r={"budget": {"amount": "1"}},
            q={"requests": "1/1h"},
        ),
        MemoryStorage(),
    )
    limits = a_limiter(store)
    await limits.admit(by(policy, "r"))
    before = [await left(store, policy, name) for name in ("o", "p", "q", "r")]
    await refused(limits, by(policy, "r"))
    assert [await left(store, policy, name) for name in ("o", "p", "q", "r")] == before
    assert before[0] == {"tenant o: requests": 4}


async def test_siblings_share_the_limits_of_their_parent_only() -> None:
    policy, store = tree(p={"requests": "3/1h"}, q={"requests": "2/1h"}), MemoryStorage()
    limits = a_limiter(store)
    await limits.admit(by(policy, "q"))
    await limits.admit(by(policy, "r"))  # the team's second
    assert "tenant q may make 2" in (await refused(limits, by(policy, "q"))).message
    await limits.admit(by(policy, "q2"))
    assert "tenant p may make 3" in (await refused(limits, by(policy, "q2"))).message


async def test_money_is_charged_at_every_level() -> None:
    price = {"input": "1", "output": "1"}
    budgets = {"o": "10", "p": "5", "q": "2"}
    policy = a_policy(
        models=[{"name": "m", "deployments": ["a"], "price": price}],
        tenants=[
            {"name": name, "parent": parent, "limits": {"budget": {"amount": amount}}}
            for (name, amount), parent in zip(budgets.items(), (None, "o", "p"), strict=True)
        ],
    )
    store = MemoryStorage()
    reservation = await a_limiter(store).admit(by(policy, "q"))
    await reservation.settle(Usage(output=1), 1_500_000_000)
    assert [await left(store, policy, name) for name in "opq"] == [
        {"tenant o: budget": "8.5"}, {"tenant p: budget": "3.5"}, {"tenant q: budget": "0.5"}
    ]  # fmt: skip
    dear = structs.replace(by(policy, "q"), prompt_tokens_estimate=1_000_000)
    spent = await refused(a_limiter(store), dear)
    assert isinstance(spent, BudgetSpent)
    assert "tenant q may spend 2" in spent.message


async def test_each_end_user_has_its_own_limits() -> None:
    policy, store = tree(p={"end_users": {"requests": "1/1h"}}), MemoryStorage()
    limits = a_limiter(store)
    for tenant, user in (("r", "ada"), ("q", "bob"), ("q", None)):
        await limits.admit(by(policy, tenant, user))
    for tenant, user in (("q", "ada"), ("r", "bob"), ("r", None), ("p", "")):
        error = await refused(limits, by(policy, tenant, user))
        named = "the end user" if user else "the end user without a name"
        assert f"{named} of tenant p may make 1 requests" in error.message
    assert await left(store, policy, "r", "ada") == {"the end user of tenant p: requests": 0}
    assert await left(store, policy, "r", "eve") == {"the end user of tenant p: requests": 1}


async def test_the_safety_identifier_is_the_end_user_before_the_user() -> None:
    policy = tree(o={"end_users": {"requests": "1/1h"}})
    limits = a_limiter(MemoryStorage())
    await limits.admit(by(policy, "o", "shared", safety_identifier="one"))
    await limits.admit(by(policy, "o", "shared", safety_identifier="two"))
    assert isinstance(await refused(limits, by(policy, "o", "one")), LimitReached)


async def test_limits_of_end_users_need_no_unbounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applicable, "MAX_END_USERS", 20)
    policy, store = tree(o={"end_users": {"requests": "2/1h"}}), MemoryStorage()
    limits = a_limiter(store)
    call = by(policy, "o")
    for number in range(100):
        await limits.admit(structs.replace(call, id=str(number), end_user=f"user {number}"))
        cache = limits._applicable
        assert cache._end_users <= 20
        assert {len(each.by_end_user or ()) for each in cache._by_key.values()} <= {cache._end_users}
    assert await left(store, policy, "o", "user 0") == {"the end user of tenant o: requests": 1}


async def test_slices_of_end_users_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_slices, "MAX_SLICES", 10)
    policy, memory = tree(o={"end_users": {"requests": "1M/1m"}}), MemoryStorage()
    slices = Slices(memory, "a", clock=lambda: NOW, monotonic=lambda: NOW)
    slices.begin_leasing()
    limits = a_limiter(slices)
    call = by(policy, "o")
    leased = [
        (await limits.admit(structs.replace(call, id=str(number), end_user=str(number)))).is_leased
        for number in range(13)
    ]
    assert leased == [True] * 10 + [False] * 3


def test_a_tenant_inherits_what_it_does_not_set() -> None:
    policy = a_policy(
        tenants=[
            {
                "name": "o", "pricing": [{"factor": "0.5", "reason": "contract"}], "service_tiers": ["flex"],
                "currency": "USD", "limits": {"default_output_tokens": 7, "cap_output": "max_tokens"},
            },
            {"name": "p", "parent": "o", "limits": {"requests": "9/1m"}},
            {"name": "q", "parent": "p", "limits": {"default_output_tokens": 8}, "service_tiers": ["scale"]},
        ]
    )  # fmt: skip
    p, q = policy.tenants_by_name["p"], policy.tenants_by_name["q"]
    assert (p.pricing, p.currency, p.service_tiers) == (policy.tenants[0].pricing, "USD", ("flex",))
    assert (p.limits.default_output_tokens, p.limits.cap_output) == (7, "max_tokens")
    assert p.limits.requests is not None
    assert (q.limits.default_output_tokens, q.limits.cap_output, q.service_tiers) == (8, "max_tokens", ("scale",))
    assert q.limits.requests is None  # limits are not inherited: those of the parent count all its calls
    assert (q.parents, q.root, q.priced_as) == (("o", "p"), "o", "q")
    assert policy.grants_tier("flex", tenant="p", class_name="realtime")
    assert not policy.grants_tier("flex", tenant="q", class_name="realtime")


def test_a_model_must_be_allowed_at_every_level() -> None:
    models = [{"name": name, "deployments": ["a"]} for name in ("m", "n")]
    policy = a_policy(
        models=models,
        tenants=[
            {"name": "o", "models": ["m"]},
            {"name": "p", "parent": "o", "models": ["m", "n"]},
            {"name": "q", "parent": "p"},
        ],
    )
    for tenant in "opq":
        assert by(policy, tenant).model.name == "m"
        with pytest.raises(GatewayError, match="model 'n'"):
            by(policy, tenant, model="n")


async def test_a_call_without_end_user_limits_ignores_who_the_user_is() -> None:
    policy = tree(o={"requests": "9/1h"})
    limits = a_limiter(MemoryStorage())
    await limits.admit(by(policy, "o", "ada"))
    await limits.admit(by(policy, "o", "bob"))
    assert set(limits._applicable._by_key) == {("key_o", "m", "realtime"), ("/o", "m", "realtime")}


NAMES = ("o", "p", "q", "q2", "r")
LEVELS = {"o": "o", "p": "op", "q": "opq", "q2": ("o", "p", "q2"), "r": "opqr"}
AMOUNTS = st.integers(min_value=1, max_value=30)
FREE = a_call(chat(max_tokens=1))


@settings(max_examples=25)
@given(
    limits=st.dictionaries(st.sampled_from(NAMES), AMOUNTS, min_size=1),
    per_user=st.dictionaries(st.sampled_from(NAMES), AMOUNTS, max_size=2),
    calls=st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(["ada", "bob", None]), st.integers(0, 12)), max_size=12
    ),
    leased=st.booleans(),
)
async def test_the_sums_of_all_levels_equal_the_calls_below_them(
    limits: dict[str, int], per_user: dict[str, int], calls: list[tuple[str, str | None, int]], leased: bool
) -> None:
    """Spends whole units of money, with slices and without. A model of sums says which calls must be refused."""
    budgets: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
    for name, amount in limits.items():
        budgets[name]["budget"] = {"amount": amount, "per": "total"}
    for name, amount in per_user.items():
        budgets[name]["end_users"] = {"budget": {"amount": amount, "per": "total"}}
    policy = tree(PER_REQUEST, **budgets)
    memory = MemoryStorage()
    slices = Slices(memory, "a", clock=lambda: NOW, monotonic=lambda: NOW) if leased else None
    if slices is not None:
        slices.begin_leasing()
    limiter = a_limiter(slices or memory)
    spent: dict[tuple[str, str | None], int] = {}
    for number, (tenant, user, cost) in enumerate(calls):
        if leased:
            cost = min(cost, 1)  # the storage learns of a higher cost only with the next report
        accounts: list[tuple[str, str | None]] = [(name, None) for name in LEVELS[tenant] if name in limits]
        accounts += [(name, user or "") for name in LEVELS[tenant] if name in per_user]
        of_user = {each: per_user[each[0]] for each in accounts if each[1] is not None}
        fits = all(
            spent.get(each, 0) + 1 <= of_user.get(each, limits.get(each[0], 0) if each[1] is None else 0)
            for each in accounts
        )
        principal = Principal(policy.tenants_by_name[tenant], f"key_{tenant}")
        call = structs.replace(FREE, id=str(number), policy=policy, principal=principal, end_user=user)
        try:
            reservation: Reservation | None = await limiter.admit(call)
        except (BudgetSpent, LimitReached):
            reservation = None
        assert (reservation is not None) == fits
        if reservation is not None:
            reservation.bill(Usage(), cost * 10**9, new_event_id())
            await reservation.settle(Usage(), cost * 10**9)
            for each in accounts:
                spent[each] = spent.get(each, 0) + cost
    if slices is not None:
        await slices.report_all(give_back=True)
    for (name, of), amount in spent.items():
        whole = limits[name] if of is None else per_user[name]
        shown = await left(memory, policy, name, of)
        scope = f"tenant {name}" if of is None else f"the end user{'' if of else ' without a name'} of tenant {name}"
        assert Decimal(shown[f"{scope}: budget"]) == max(0, whole - amount)
