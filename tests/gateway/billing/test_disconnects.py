"""What a call is billed whose client leaves: by the vendor's rule or the policy, and never as nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway import settlement
from gateway.billing.ledger.rows import decode
from gateway.policy import Deployment
from gateway.policy.disconnects import RULES
from gateway.providers.base import Fault, ProviderFailure
from gateway.providers.request_progress import REQUEST_PROGRESS
from gateway.types import Call
from tests.gateway.billing.test_recovery import recover
from tests.gateway.doubles import ScriptedProvider
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
    usage_frame,
)

PRICE = {"input": "1", "output": "2"}
STREAM = chat(stream=True, logprobs=True)  # is not resumed elsewhere
ONE_SERVER = {"models": [{"name": "m", "deployments": ["a"]}]}


def deployments(bill: str, **more: Any) -> dict[str, Any]:
    on_disconnect = {"bill": bill, **more}
    names = ("a", "b", "c")
    return {
        "deployments": [
            {
                "name": name, "base_url": f"http://{name}.invalid/v1", "model": "m", "price": PRICE,
                "on_disconnect": on_disconnect,
            }
            for name in names
        ],
        "models": [{"name": "m", "deployments": ["a", "b"]}],
    }  # fmt: skip


def keep_no_records(rig: Rig) -> None:
    for server in rig.servers.values():
        server.has_usage_records = False


@pytest.mark.parametrize(
    ("url", "provider", "stream", "whole"),
    [
        ("https://api.openai.com/v1", "openai", "received", "read_to_end"),
        ("https://mine.openai.azure.com/openai/v1", "openai", "received", "read_to_end"),
        ("https://notopenai.azure.com.evil.example/v1", "openai", "received", "received"),
        ("https://api.groq.com/openai/v1", "openai", "read_to_end", "read_to_end"),
        ("https://bedrock-runtime.us-east-1.amazonaws.com/openai/v1", "openai", "read_to_end", "read_to_end"),
        ("https://api.anthropic.com/v1", "anthropic", "received", "read_to_end"),
        ("http://10.0.0.5:8000/v1", "vllm", "received", "received"),
        ("http://10.0.0.5:8000/v1", "warmpath", "record", "record"),
        ("http://10.0.0.5:11434/v1", "openai", "received", "received"),
    ],
)
def test_each_vendor_has_one_rule(url: str, provider: str, stream: str, whole: str) -> None:
    deployment = Deployment(name="d", base_url=url, provider=provider, model="m")
    assert deployment.bills_disconnect_by(stream=True) == stream
    assert deployment.bills_disconnect_by(stream=False) == whole
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_records_can_be_billed_only_if_the_deployment_keeps_them() -> None:
    with pytest.raises(ValueError, match="keeps no usage records"):
        Deployment.model_validate(
            {"name": "d", "base_url": "http://a/v1", "model": "m", "on_disconnect": {"bill": "record"}}
        )


@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_is_read_to_its_end_for_a_client_that_left(tmp_path: Path, stream: bool) -> None:
    limits = tenant(tokens="1000/1d", concurrency=1)
    async with a_rig(tmp_path, **deployments("read_to_end"), tenants=[limits]) as rig:
        keep_no_records(rig)
        client = Client(chat(stream=stream, logprobs=True))
        serving = rig.begin(client)
        reply = await rig.reply()
        await settle()
        client.leave()
        await settle()
        assert not reply.closed and not serving.done()
        reply.say(*((delta("one"), usage_frame(40, 30), DONE) if stream else (answer(usage=counted(40, 30)),)))
        await in_time(serving)
        (receipt,) = rig.receipts()
        assert (receipt["outcome"], receipt["source"], receipt["exact"]) == ("client_gone", "engine", True)
        assert (receipt["input_uncached"], receipt["output"], receipt["cost"]) == (40, 30, "0.0001")
        assert not client.whole


async def test_reading_on_is_bounded_in_time(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **deployments("read_to_end", max_time=0.05)) as rig:
        keep_no_records(rig)
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        reply.say(delta("12345678"))
        await settle()
        client.leave()
        await in_time(serving)
        (receipt,) = rig.receipts()
        assert reply.closed and (receipt["source"], receipt["output"]) == ("estimate", 2)
        assert receipt["input_uncached"] > 0


async def test_reading_on_is_bounded_in_money(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **deployments("read_to_end", max_cost="0.00002")) as rig:
        keep_no_records(rig)
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        reply.say(delta("12345678"))
        await settle()
        client.leave()
        reply.say(*[delta("12345678")] * 4)  # 8 tokens at 2 per million: 0.000016, and 0.000020 with the next
        await settle()
        assert not serving.done()
        reply.say(*[delta("12345678")] * 4)
        await in_time(serving)
        (receipt,) = rig.receipts()
        assert reply.closed and 10 < receipt["output"] <= 18


async def test_no_further_attempt_is_made_for_a_client_that_left(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **deployments("read_to_end")) as rig:
        keep_no_records(rig)
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        await settle()
        client.leave()
        await settle()
        reply.say(ProviderFailure(Fault.STATUS, "busy", status=503))
        await in_time(serving)
        assert len(rig.replies) == 1
        assert [(receipt["outcome"], receipt["cost"]) for receipt in rig.receipts()] == [("client_gone", "0")]


async def test_received_text_is_counted_by_the_deployments_tokenizer(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **deployments("received")) as rig:
        keep_no_records(rig)
        for server in rig.servers.values():
            server.prompt_tokens, server.tokens_of_text = 11, lambda text: len(text.split())
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        reply.say(delta("some words in one frame and"), delta(" three more words"))
        await settle()
        client.leave()
        await in_time(serving)
        (receipt,) = rig.receipts()
        assert (receipt["input_uncached"], receipt["output"], receipt["source"]) == (11, 9, "estimate")


async def test_replies_teach_how_many_tokens_a_text_has(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **{**deployments("received"), **ONE_SERVER}) as rig:
        keep_no_records(rig)
        estimate = 0
        for _ in range(3):
            rig.script(delta("x" * 60), usage_frame(prompt=15, output=30), DONE)
            assert (await rig.ask(STREAM)).status == 200
            estimate = rig.last_call.input_tokens_estimate
        rig.script()
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply(3)
        reply.say(delta("y" * 20))
        await settle()
        client.leave()
        await in_time(serving)
        receipt = rig.receipts()[-1]
        assert estimate != 15
        assert (receipt["input_uncached"], receipt["output"]) == (15, 10), "a token has two bytes here"


async def test_a_crash_and_a_disconnect_are_billed_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settlement, "NOTED_BYTES", 500)
    for name in ("left", "killed"):
        (tmp_path / name).mkdir()
    frames = [delta("12345678")] * 100
    async with a_rig(tmp_path / "left", **{**deployments("received"), **ONE_SERVER}) as rig:
        keep_no_records(rig)
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        reply.say(*frames)
        await settle()
        client.leave()
        await in_time(serving)
        (left,) = rig.receipts()
        opened = [row for row in rig.rows() if row["kind"] == "opened"]
    killed = Rig(tmp_path / "killed", policy_of())
    async with killed.ledger:
        for row in opened:
            killed.ledger.open_call(open_call_of(row))
    async with a_rig(tmp_path / "killed", **{**deployments("received"), **ONE_SERVER}) as rig:
        keep_no_records(rig)
        (lost,) = await recover(rig)
    assert left["output"] == 200 and lost["outcome"] == "gateway_lost"
    assert lost["input_uncached"] == left["input_uncached"]
    per_frame = len(frames[0])
    assert 0 <= left["output"] - lost["output"] <= 2 * (500 // per_frame + 2), "what was received since the last note"


def open_call_of(row: dict[str, Any]) -> Any:
    return decode(json.dumps(row).encode())


@pytest.mark.parametrize("bill", ["received", "read_to_end"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_anything_was_sent_pays_nothing(
    tmp_path: Path, bill: str, stream: bool
) -> None:
    async with a_rig(tmp_path, **deployments(bill)) as rig:
        keep_no_records(rig)
        connecting = [HangingConnection(server) for server in rig.servers.values()]
        client = Client(chat(stream=stream))
        serving = rig.begin(client)
        while not any(each.begun for each in connecting):
            await asyncio.sleep(0)
        client.leave()
        await in_time(serving)
        (receipt,) = rig.receipts()
        assert (receipt["outcome"], receipt["cost"]) == ("client_gone", "0")
        assert (receipt["input_uncached"], receipt["output"]) == (0, 0)
        assert [attempt["outcome"] for attempt in receipt["attempts"]] == ["not_sent"]
        await rig.recovery.catch_up()
        (row,) = [row for row in rig.rows() if row["kind"] == "unbilled"]
        assert (row["outcome"], row["input_uncached"], row["cost"]) == ("not_sent", 0, "0")


async def test_a_client_that_leaves_after_the_request_was_sent_pays_the_prompt(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **deployments("received")) as rig:
        keep_no_records(rig)
        connecting = [HangingConnection(server) for server in rig.servers.values()]
        client = Client(STREAM)
        serving = rig.begin(client)
        while not any(each.begun for each in connecting):
            await asyncio.sleep(0)
        for each in connecting:
            each.connected.set()
        await rig.reply()
        client.leave()
        await in_time(serving)
        (receipt,) = rig.receipts()
        assert receipt["input_uncached"] > 0
        assert [attempt["outcome"] for attempt in receipt["attempts"]] == ["client_gone"]


class HangingConnection:
    """Lets the requests of a scripted deployment wait for a connection, as `HTTPTransport.send` does."""

    def __init__(self, server: ScriptedProvider) -> None:
        self.begun = False
        self.connected = asyncio.Event()
        self._open = server.open
        server.open = self._connect  # type: ignore[method-assign]

    async def _connect(self, call: Call, *, headers: Any, body: bytes | None = None) -> Any:
        progress = REQUEST_PROGRESS.get()
        progress.unsent = self.begun = True
        await self.connected.wait()
        progress.unsent = False
        return await self._open(call, headers=headers, body=body)


async def test_a_deployment_that_keeps_records_and_hangs_is_billed_as_a_crash_would_be(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        for server in rig.servers.values():
            server.healthy = unhealthy  # type: ignore[method-assign]
        client = Client(STREAM)
        serving = rig.begin(client)
        await rig.reply()
        client.leave()
        await in_time(serving)
        (receipt,) = rig.receipts()
        assert receipt["input_uncached"] == rig.last_call.input_tokens_estimate > 0


async def unhealthy() -> bool:
    return False


async def test_a_timer_of_a_call_that_ended_does_nothing(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **deployments("read_to_end", max_time=0.01)) as rig:
        keep_no_records(rig)
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        await settle()
        client.leave()
        reply.say(delta("one"), usage_frame(), DONE)
        await in_time(serving)
        await asyncio.sleep(0.03)
        assert len(rig.receipts()) == 1
