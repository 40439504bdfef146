"""Batch conversations with `hold: auto`, with real components and scripted deployments."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.prefix import hold_choice, working_set
from tests.gateway.harness import Client, Rig, a_rig, answer, chat, in_time, policy_of, settle

CONVERSATIONS = 6
PROMPT = "All the world is a stage, and all the men and women merely players. " * 20  # some 340 tokens


def small_caches(prefill_tokens_per_second: int) -> dict[str, Any]:
    """Two deployments that compute so fast, and whose caches hold one conversation each."""
    deployments = [
        {
            **deployment,
            "cache_tokens": 600,
            "max_concurrency": 32,
            "prefill_tokens_per_second": prefill_tokens_per_second,
        }
        for deployment in policy_of()["deployments"]
    ]
    return {"deployments": deployments, "classes": {"batch": {"hold": "auto"}}}


def turn(number: int, turns: int) -> Client:
    """The next request of a conversation after so many turns."""
    text = f"{number}. {PROMPT}" + " And then?" * turns
    return Client(chat(messages=[{"role": "user", "content": text}], service_tier="flex"))


async def all_ask_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> int:
    """Two turns of each conversation teach the gateway; then all ask at once. Returns how many are sent at once.

    The answers do not stream, so the policy's speed stays the one that the gateway expects.
    """
    monkeypatch.setattr(working_set, "CHOICE_SECONDS", 0.0)
    monkeypatch.setattr("gateway.queueing.queue.HELD_RECHECK_SECONDS", 0.001)
    rig.script(answer(), None)
    for turns in range(2):
        for number in range(CONVERSATIONS):
            await rig.ask(turn(number, turns))
    for number in range(hold_choice.TURNS_MIN - CONVERSATIONS):
        await rig.ask(turn(number, 2))
    answered = len(rig.replies)
    rig.script()
    clients = [turn(number, 3) for number in range(CONVERSATIONS)]
    serving = [rig.begin(client) for client in clients]
    await settle()
    await settle()
    sent = len(rig.replies) - answered
    queued = rig.components.queue.depth("batch")
    assert sent + queued == CONVERSATIONS
    monkeypatch.setattr(hold_choice, "OVERDUE_PAUSES", 0.0)  # whatever pauses now has ended
    rig.script(answer(), None)
    for reply in sorted(rig.replies, key=lambda reply: reply.number)[answered:]:
        reply.say(answer(), None)
    await in_time(asyncio.gather(*serving))
    assert [client.status for client in clients] == [200] * CONVERSATIONS
    return sent


async def test_batch_conversations_take_turns_where_computing_evicted_prompts_would_take_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_rig(tmp_path, **small_caches(prefill_tokens_per_second=10)) as rig:
        assert await all_ask_again(rig, monkeypatch) == 2


async def test_batch_conversations_are_sent_at_once_where_computing_evicted_prompts_takes_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_rig(tmp_path, **small_caches(prefill_tokens_per_second=100_000_000)) as rig:
        assert await all_ask_again(rig, monkeypatch) == CONVERSATIONS
