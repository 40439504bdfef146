"""A prefill deployment's work with the real components: in the receipt and the ledger, and never billed twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.harness import (
    DONE,
    Client,
    Rig,
    a_rig,
    answer,
    chat,
    counted,
    delta,
    in_time,
    policy_of,
    settle,
    tenant,
)

PARAMS = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1}


def prefilled(prompt: int = 10, cached: int = 0) -> bytes:
    usage = {**counted(prompt, 1), "prompt_tokens_details": {"cached_tokens": cached}}
    return answer(kv_transfer_params=PARAMS, usage=usage)


def with_roles(**price: str) -> dict[str, Any]:
    """The deployment a computes the prompts of b. Each costs 1 per million tokens of input, and 2 of output."""
    deployments = [
        {**deployment, "provider": "vllm", "model": "served", "role": role, "price": deployment["price"] | price}
        for deployment, role in zip(policy_of()["deployments"], ("prefill", "decode"), strict=False)
    ]
    return {
        "deployments": deployments,
        "models": [{"name": "m", "deployments": ["a", "b"]}],
        "routing": {"remote_prefill_above": 1e-9},
    }


def unbilled(rig: Rig) -> list[dict[str, Any]]:
    return [row for row in rig.rows() if row["kind"] == "unbilled"]


def loaded(prompt: int, output: int, cached: int) -> bytes:
    """The last event of an answer, with its usage."""
    usage = {**counted(prompt, output), "prompt_tokens_details": {"cached_tokens": cached}}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


@pytest.mark.parametrize("has_usage_records", [True, False])
@pytest.mark.parametrize(
    ("of_prefill", "of_answer", "cost", "unbilled_cost"),
    [
        pytest.param(4, 8, "0.0000104", "0.0000048", id="loaded"),  # 6 + 4 / 10 + 2 * 2; 2 + 8 / 10 + 2
        pytest.param(4, 0, "0.0000104", "0.000012", id="the load has failed"),
        pytest.param(0, 8, "0.000014", "0.0000048", id="nothing was cached"),
    ],
)
async def test_the_receipt_bills_the_prompt_as_the_prefill_deployment_counted_it(
    tmp_path: Path, has_usage_records: bool, of_prefill: int, of_answer: int, cost: str, unbilled_cost: str
) -> None:
    async with a_rig(tmp_path, **with_roles(cached_input="0.1")) as rig:
        prefill, decode = rig.servers["a"], rig.servers["b"]
        prefill.has_usage_records = has_usage_records
        prefill.script, decode.script = (prefilled(cached=of_prefill),), (delta("hi"), loaded(10, 2, of_answer), DONE)
        client = await rig.ask(chat(stream=True))
        assert client.headers["x-warmpath-deployment"] == "b"
        (receipt,) = rig.receipts()
        assert (receipt["deployment"], receipt["cost"], receipt["output"]) == ("b", cost, 2)
        assert (receipt["input_uncached"], receipt.get("cache_read", 0)) == (10 - of_prefill, of_prefill)
        await rig.recovery.catch_up()
        (row,) = unbilled(rig)
        assert (row["deployment"], row["outcome"], row["output"]) == ("a", "prefilled", 1)
        assert (row["input_uncached"], row.get("cache_read", 0)) == (10 - of_answer, of_answer), "as b counted"
        assert row["exact"] and row["cost"] == unbilled_cost
        assert prefill.asked_for == [], "its answer has the counts"
        (first, _) = receipt["attempts"]
        assert first["unbilled"]["input"] - first["unbilled"].get("cache_read", 0) == row["input_uncached"]
        by_deployment = {one.name: (one.input_billed, one.output_billed) for one in rig.fleet}
        assert by_deployment == {"a": (10, 1), "b": (10, 2)}, "as the engines count"


@pytest.mark.parametrize(
    "usage", [{"prompt_tokens": 11, "completion_tokens": 1}, None], ids=["other tokens", "an estimate"]
)
async def test_a_prefill_that_counts_otherwise_is_not_billed(tmp_path: Path, usage: dict[str, int] | None) -> None:
    async with a_rig(tmp_path, **with_roles(cached_input="0.1")) as rig:
        rig.servers["a"].script = (answer(kv_transfer_params=PARAMS, usage=usage),)
        rig.servers["b"].script = (delta("hi"), loaded(10, 2, 8), DONE)
        await rig.ask(chat(stream=True))
        (receipt,) = rig.receipts()
        assert (receipt["input_uncached"], receipt["cache_read"], receipt["cost"]) == (2, 8, "0.0000068")


async def test_a_failed_prefill_is_billed_to_nobody(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **with_roles()) as rig:
        rig.servers["a"].script, rig.servers["b"].script = (b"not JSON",), (answer(),)
        await rig.ask(chat())
        (receipt,) = rig.receipts()
        assert (receipt["deployment"], receipt["cost"]) == ("b", "0.000014")
        await rig.recovery.catch_up()
        assert [(row["deployment"], row["input_uncached"]) for row in unbilled(rig)] == [("a", 0)], "it has no record"


async def test_a_client_that_leaves_during_the_prefill_is_billed_that_and_once(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **with_roles()) as rig:
        rig.servers["a"].record = json.dumps({"usage": counted(10, 0)}).encode()
        serving = rig.begin(client := Client(chat()))
        reply = await rig.reply()
        await settle()
        client.leave()
        await in_time(serving)
        assert reply.closed == 1
        assert rig.servers["b"].replies == []
        (receipt,) = rig.receipts()
        assert (receipt["outcome"], receipt["deployment"], receipt["cost"]) == ("client_gone", "a", "0.00001")
        await rig.recovery.catch_up()
        assert unbilled(rig) == []


async def test_a_client_that_leaves_after_the_prefill_is_billed_the_answer_only(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **with_roles()) as rig:
        rig.servers["a"].script = (prefilled(),)
        rig.servers["b"].record = json.dumps({"usage": counted(10, 1)}).encode()
        serving = rig.begin(client := Client(chat(stream=True)))
        await rig.reply(1)
        rig.servers["b"].replies[0].say(delta("hi"))
        await in_time(client.first_bytes.wait())
        client.leave()
        await in_time(serving)
        (receipt,) = rig.receipts()
        assert (receipt["outcome"], receipt["deployment"], receipt["cost"]) == ("client_gone", "b", "0.000012")
        await rig.recovery.catch_up()
        assert [(row["deployment"], row["outcome"]) for row in unbilled(rig)] == [("a", "prefilled")]


async def test_limits_are_charged_once(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **with_roles(), tenants=[tenant(requests="2/1h", tokens="1k/1h")]) as rig:
        rig.servers["a"].script, rig.servers["b"].script = (prefilled(),), (answer(),)
        left = [(await rig.ask(chat(max_tokens=2))).headers["x-ratelimit-remaining-requests"] for _ in range(2)]
        assert left == ["1", "0"]
        assert (await rig.ask(chat(max_tokens=2))).status == 429
        assert len(rig.servers["a"].replies) == 2
