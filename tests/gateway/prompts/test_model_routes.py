"""Routes to another model: by header, metadata, key and time, and for a share of conversations."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.billing.repricing import reprice
from gateway.core.api_keys import hash_key
from gateway.policy import Policy
from gateway.policy.model_routes import ModelRoute
from gateway.types import Receipt
from tests.gateway.harness import KEY, PEPPER, Client, a_rig, answer, chat, policy_of, tenant

CANARY_KEY = "wp-canaries-0123456789abcdef"
CANARY = {"match": {"model": "m"}, "to": "other"}


async def models(tmp_path: Path, routes: list[dict[str, Any]], *clients: Client, **policy: Any) -> list[str]:
    """The models that answer, by the receipts; `asked` is always m."""
    async with a_rig(tmp_path, model_routes=routes, **policy) as rig:
        rig.script(answer())
        for client in clients:
            assert (await rig.ask(client)).status == 200
        receipts = rig.receipts()
        assert {receipt["model_asked"] for receipt in receipts} == {"m"}
        return ["other" if receipt["model_served"] == "served-by-c" else "m" for receipt in receipts]


async def test_a_header_metadata_or_a_key_choose_the_model(tmp_path: Path) -> None:
    routes = [
        {"match": {"header": {"X-Canary": "yes"}}, "to": "other"},
        {"match": {"metadata": {"tier": "gold"}}, "to": "other"},
        {"match": {"key": "canaries"}, "to": "other"},
    ]
    keys = [{"id": "dev", "hash": hash_key(KEY, PEPPER)}, {"id": "canaries", "hash": hash_key(CANARY_KEY, PEPPER)}]
    beta = Client(chat(), headers=[(b"x-canary", b"yes")])
    gold, ours = Client(chat(metadata={"tier": "gold"})), Client(chat(), key=CANARY_KEY)
    got = await models(tmp_path, routes, beta, Client(chat()), gold, ours, tenants=[{"name": "t", "keys": keys}])
    assert got == ["other", "m", "other", "other"]


@pytest.mark.parametrize(("days", "model"), [(["mon", "tue"], "other"), (["wed"], "m")])
async def test_a_route_applies_in_its_time_window_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: list[str], model: str
) -> None:
    monday = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()
    monkeypatch.setattr("gateway.prompts.model_choice.time.time", lambda: monday)
    assert await models(tmp_path, [{**CANARY, "hours": "08:00-20:00", "days": days}], Client(chat())) == [model]


async def test_the_caller_need_not_be_allowed_to_use_the_routes_model_and_cannot_name_it(tmp_path: Path) -> None:
    narrow = {**tenant(), "models": ["m"]}
    async with a_rig(tmp_path, model_routes=[CANARY], tenants=[narrow]) as rig:
        rig.script(answer())
        assert (await rig.ask(chat())).status == 200 and len(rig.servers["c"].replies) == 1
        assert (await rig.ask(chat(model="other"))).status == 404


async def test_a_share_takes_conversations_and_they_stay(tmp_path: Path) -> None:
    def turns(number: int) -> list[Client]:
        system = [{"role": "system", "content": "Help."}] if number % 2 else []
        messages: list[Any] = [*system, {"role": "user", "content": f"Q{number}"}]
        more = [*messages, {"role": "assistant", "content": "A"}, {"role": "user", "content": "And?"}]
        return [Client(chat(messages=part)) for part in (messages, more)]

    got = await models(tmp_path, [{**CANARY, "share": "25%"}], *(turn for n in range(40) for turn in turns(n)))
    assert all(first == second for first, second in zip(got[::2], got[1::2], strict=True))
    assert 4 <= got[::2].count("other") <= 18


async def test_a_session_or_end_user_keeps_its_model(tmp_path: Path) -> None:
    clients = [Client(chat(user=f"u{n % 10}", messages=[{"role": "user", "content": str(n)}])) for n in range(40)]
    got = await models(tmp_path, [{**CANARY, "share": "50%"}], *clients)
    assert all(got[n] == got[n % 10] for n in range(40)) and len(set(got)) == 2


async def test_weights_divide_conversations_and_receipts_name_the_route(tmp_path: Path) -> None:
    route = {"name": "experiment", "match": {"model": "m"}, "to": {"m": 3, "other": 1}}
    clients = [Client(chat(user=f"u{n % 40}")) for n in range(80)]
    async with a_rig(tmp_path, model_routes=[route]) as rig:
        rig.script(answer())
        for client in clients:
            assert (await rig.ask(client)).status == 200
        receipts = rig.receipts()
    routed = [receipt.get("model_routed") for receipt in receipts]
    assert routed[:40] == routed[40:] and set(routed) == {None, "other"} and 3 <= routed[:40].count("other") <= 20
    assert {receipt["route"] for receipt in receipts} == {"experiment"}


async def test_a_tag_chooses_a_deployment_which_has_a_queue_of_its_own(tmp_path: Path) -> None:
    route = {"match": {"tag": ["eu", "ch"]}, "deployments": "b"}
    clients = [
        Client(chat(metadata={"tags": "beta, eu"})),
        Client(chat(metadata={"tags": ["ch"]})),
        Client(chat(), headers=[(b"x-tags", b"ch")]),
    ]
    async with a_rig(tmp_path, model_routes=[route]) as rig:
        rig.script(answer())
        for _ in range(3):
            for client in clients:
                assert (await rig.ask(client)).status == 200
        assert {receipt["deployment"] for receipt in rig.receipts()} == {"b"}


async def test_repricing_uses_the_prices_of_the_model_that_answered(tmp_path: Path) -> None:
    async with a_rig(tmp_path, model_routes=[CANARY]) as rig:
        rig.script(answer())
        assert (await rig.ask(chat())).status == 200
        (receipt,) = rig.receipts()
        row = msgspec.structs.asdict(msgspec.convert(receipt, Receipt))
        policy = policy_of(models=[{"name": "m", "deployments": ["a"]}, {"name": "other", "deployments": ["c"]}])
        assert reprice(Policy.model_validate(policy), row) is not None
        assert reprice(Policy.model_validate(policy), {**row, "model_routed": None}) is None  # m is not served by c


@pytest.mark.parametrize(
    ("hours", "days", "moment", "applies"),
    [
        (None, None, "2026-11-23T12:00", True),
        ("08:00-20:00", None, "2026-11-23T08:00", True),
        ("08:00-20:00", None, "2026-11-23T20:00", False),
        ("08:00-24:00", None, "2026-11-23T23:59", True),
        ("22:00-06:00", None, "2026-11-23T23:00", True),
        ("22:00-06:00", None, "2026-11-23T05:59", True),
        ("22:00-06:00", None, "2026-11-23T12:00", False),
        ("22:00-06:00", "sun", "2026-11-23T01:00", True),  # the night from Sunday to Monday
        ("22:00-06:00", "mon", "2026-11-23T01:00", False),
        (None, ["sat", "sun"], "2026-11-23T12:00", False),
        (None, "mon", "2026-11-23T12:00", True),
    ],
)
def test_time_windows(hours: str | None, days: Any, moment: str, applies: bool) -> None:
    route = ModelRoute.model_validate({**CANARY, "hours": hours, "days": days})
    assert route.applies_at(datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp()) is applies


@pytest.mark.parametrize(
    ("route", "message"),
    [
        ({**CANARY, "to": "others"}, "there is no model 'others'"),
        ({**CANARY, "match": {"model": "x"}}, "there is no model 'x'"),
        ({**CANARY, "match": {"min_prompt_tokens": 5}}, "min_prompt_tokens is not possible here"),
        ({**CANARY, "hours": "25:00-26:00"}, "pattern"),
        ({**CANARY, "hours": "08:00-24:30"}, "a day ends at 24:00"),
        ({"match": {}}, "must name a model in `to`, or `deployments`"),
        ({**CANARY, "to": {"others": 1}}, "there is no model 'others'"),
        ({**CANARY, "to": {"other": 0}}, "greater than 0"),
        ({**CANARY, "to": "x/*"}, "a target with a \\* needs match.model"),
        ({**CANARY, "deployments": "z"}, "there is no deployment 'z'"),
        ({**CANARY, "deployments": "a"}, "'other' has none of these deployments"),
    ],
)
def test_contradictions_are_found_in_the_policy(route: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy.model_validate(policy_of(model_routes=[route]))
