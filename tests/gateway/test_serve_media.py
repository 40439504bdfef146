"""What media costs a tenant, from admission to the receipt, with real components and scripted deployments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.prefix.fingerprint import BLOCK_TOKENS
from tests.gateway.harness import Client, a_rig, answer, counted, cut, tenant
from tests.gateway.prompts.media.samples import image_part, png, text_part

MODELS = [
    {"name": "m", "deployments": ["a", "b"], "media": {"like": "gpt-4o"}, "fallbacks": ["other"]},
    {"name": "other", "deployments": ["c"]},
]
LARGE = image_part(png(1024, 1024, tail=bytes(5_000)))  # 765 tokens, but 1,700 if its base64 were text
SMALL = image_part(png(1024, 1024))
REMOTE = image_part("https://example.com/photo.jpg")
LONG = {"match": {"min_prompt_tokens": 1_500}, "class": "batch"}
NO_USAGE = b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "a cat"}}]}'


def request(*parts: dict[str, Any]) -> bytes:
    content = [text_part("what is this?"), *parts]
    return msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 10})


def used_tokens(client: Client) -> int:
    """The tokens of a limit that a call's reservation uses, as its headers say."""
    return int(client.headers["x-ratelimit-limit-tokens"]) - int(client.headers["x-ratelimit-remaining-tokens"])


async def test_an_image_fits_into_a_limit_that_its_base64_exceeds(tmp_path: Path) -> None:
    async with a_rig(tmp_path, models=MODELS, tenants=[tenant(tokens="1k/1h")]) as rig:
        rig.script(answer(usage=counted(770, 2)))
        client = await rig.ask(request(LARGE))
        assert client.status == 200, client.content
        assert 765 + 10 <= used_tokens(client) <= 765 + 30
        assert (await rig.ask(request(SMALL, SMALL))).status == 400  # more than the whole limit


async def test_a_reply_without_usage_is_billed_by_the_formula(tmp_path: Path) -> None:
    async with a_rig(tmp_path, models=MODELS) as rig:
        rig.script(NO_USAGE)
        assert (await rig.ask(request(LARGE))).status == 200
        (receipt,) = rig.receipts()
        assert 765 <= receipt["input_uncached"] <= 765 + 20
        assert (receipt["source"], receipt["exact"]) == ("estimate", False)
        (opened,) = (row for row in rig.rows() if row["kind"] == "opened")
        assert opened["prompt_tokens_estimate"] == receipt["input_uncached"]


async def test_the_usage_of_replies_corrects_what_is_reserved_and_billed(tmp_path: Path) -> None:
    async with a_rig(tmp_path, models=MODELS, rules=[LONG], tenants=[tenant(tokens="1M/1h")]) as rig:
        rig.script(answer(usage=counted(2_010, 2)))
        await rig.ask(request(REMOTE))
        assert rig.last_call.class_name == "realtime"
        for _ in range(15):
            await rig.ask(request(REMOTE))
        rig.script(NO_USAGE)
        await rig.ask(request(REMOTE))
        assert rig.receipts()[-1]["input_uncached"] == pytest.approx(2_010, rel=0.05)
        *_, opened = (row for row in rig.rows() if row["kind"] == "opened")
        assert opened["prompt_tokens_estimate"] == rig.receipts()[-1]["input_uncached"]
        assert rig.last_call.class_name == "batch"  # by the rule on prompts of 1,500 tokens
        assert rig.last_call.prompt_tokens_estimate < 800  # which routing compares with the fingerprint
        await rig.ask(request(LARGE))
        assert rig.receipts()[-1]["input_uncached"] == pytest.approx(775, rel=0.05)  # whose size is known


async def test_a_count_that_cannot_be_true_teaches_nothing(tmp_path: Path) -> None:
    async with a_rig(tmp_path, models=MODELS) as rig:
        rig.script(answer(usage=counted(50_000_000, 2)))
        for _ in range(5):
            await rig.ask(request(REMOTE))
        rig.script(NO_USAGE)
        await rig.ask(request(REMOTE))
        assert "implausible" in rig.receipts()[0]
        assert rig.receipts()[-1]["input_uncached"] < 800


async def test_a_fallback_teaches_nothing_about_the_model(tmp_path: Path) -> None:
    """The fallback is another model, which counts otherwise."""
    async with a_rig(tmp_path, models=MODELS) as rig:
        for name in ("a", "b"):
            rig.servers[name].script = (cut(),)
        rig.servers["c"].script = (answer(usage=counted(3_000, 2)),)
        for _ in range(3):
            assert (await rig.ask(request(REMOTE))).headers["x-warmpath-deployment"] == "c"
        rig.servers["c"].script = (NO_USAGE,)
        await rig.ask(request(REMOTE))
        assert rig.receipts()[-1]["input_uncached"] < 800


async def test_the_next_turn_of_a_conversation_with_an_image_goes_where_the_image_is_cached(tmp_path: Path) -> None:
    """Although its length was corrected meanwhile."""
    async with a_rig(tmp_path, models=MODELS) as rig:
        rig.script(answer(usage=counted(2_010, 2)))
        turns = [text_part("about"), *[image_part(png(1024, 1024, tail=bytes([i]))) for i in range(5)]]
        first = (await rig.ask(request(*turns[:5]))).headers["x-warmpath-deployment"]
        call = rig.last_call
        for deployment in rig.fleet:
            matched = deployment.cache.match(call.fingerprint) * BLOCK_TOKENS
            assert (matched + BLOCK_TOKENS > 4 * 765) == (deployment.name == first)
        assert (await rig.ask(request(*turns))).headers["x-warmpath-deployment"] == first
