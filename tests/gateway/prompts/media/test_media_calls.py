"""Media in the calls of all endpoints: tokens, fingerprints, and what is reserved for them."""

from __future__ import annotations

import base64
import json
import time
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import BadRequest
from gateway.endpoints import ENDPOINTS
from gateway.limits.base import estimate_call
from gateway.policy import Policy
from gateway.prefix.fingerprint import BLOCK_BYTES, BLOCK_TOKENS
from gateway.prompts.media.counting import FILL_TOKENS_MAX, IMAGE_TOKENS_BOUND
from gateway.prompts.media.encoded import INFLATED_MAX_BYTES, ITEMS_MAX, READS_MAX, HeaderBudget
from gateway.prompts.media.parts import media_item
from gateway.types import Call
from tests.gateway.calls import a_call, a_policy, chat
from tests.gateway.prompts.media import samples
from tests.gateway.prompts.media.samples import data_url, image_part, png, text_part

OTHER_TOKENS = 10  # of roles, templates and short texts
MESSAGES, RESPONSES = (next(e for e in ENDPOINTS if e.path == path) for path in ("messages", "responses"))


def like(model: str, **changes: Any) -> Policy:
    return a_policy(models=[{"name": "m", "deployments": ["a", "b"], "media": {"like": model}}], **changes)


def call_of(*parts: dict[str, Any], model: str = "gpt-4o", **changes: Any) -> Call:
    return a_call(chat([*parts]), like(model, **changes))


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        (image_part(png(2048, 4096)), 1105),
        (image_part(png(2048, 4096), detail="low"), 85),
        (image_part("https://example.com/cat.png"), 765),
        ({"type": "image_url", "image_url": data_url(png(2048, 4096))}, 1105),  # as vLLM also takes it
        (image_part(data_url(b"no image at all" * 99)), 765),
        (image_part("data:image/png;base64,###"), 765),
        (image_part("data:image/svg+xml,%3Csvg/%3E"), 765),
        (image_part(data_url(png(2048, 4096)).replace("base64,", "base64,\n ")), 1105),
        ({"type": "input_audio", "input_audio": {"data": base64.b64encode(samples.wav(60)).decode(), "format": "wav"}},
         600),
        ({"type": "input_audio", "input_audio": {"data": base64.b64encode(bytes(96_000)).decode(), "format": "pcm16"}},
         20),
        ({"type": "audio_url", "audio_url": {"url": data_url(samples.mp3(30), "audio/mpeg")}}, 300),
        ({"type": "audio_url", "audio_url": {"url": "https://example.com/a.mp3"}}, 600),
        ({"type": "video_url", "video_url": {"url": data_url(samples.mp4(20), "video/mp4")}}, 6_000),
        ({"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}, 18_000),
        ({"type": "file", "file": {"filename": "a.pdf", "file_data": data_url(samples.pdf(3), "application/pdf")}},
         4_500),
        ({"type": "file", "file": {"file_id": "file-1"}}, 15_000),
        ({"type": "image", "image": data_url(png(2048, 4096))}, 1105),
        ({"type": "video", "video": ["https://example.com/1.png", "https://example.com/2.png"]}, 18_000),
        ({"type": "file", "file": {"file_data": data_url(b"word " * 800, "text/plain")}}, 1_000),
        ({"type": "file", "file": {"file_data": data_url(png(2048, 4096))}}, 1105),
    ],
)  # fmt: skip
def test_the_tokens_of_a_part(part: dict[str, Any], tokens: int) -> None:
    call = call_of(part)
    assert call.media is not None and call.media.formula_tokens == tokens
    assert tokens <= call.prompt_tokens_estimate <= tokens + OTHER_TOKENS
    assert call.media_tokens_bound >= tokens


@pytest.mark.parametrize(
    "part",
    [
        text_part("an image_url: data:image/png;base64,AAAA"),
        {"type": "text", "text": "x" * 400, "image_url": None},
        {"type": "image_url"},
        {"type": "image_url", "image_url": 5},
        {"type": "text", "text": "hi", "image": "https://example.com/1.png"},
        {"type": "refusal", "refusal": "no"},
    ],
)
def test_parts_without_media_are_text(part: dict[str, Any]) -> None:
    assert call_of(part, text_part("hi")).media is None


def test_a_large_image_reserves_its_tokens_and_not_its_base64() -> None:
    """300 kB of PNG once reserved 100,000 tokens."""
    part = image_part(png(1024, 1024, tail=bytes(300_000)))
    price = {"input": 1, "output": 1}
    policy = like("gpt-4o", rules=[{"match": {"min_prompt_tokens": 1_000}, "class": "batch"}])
    priced = policy.model_validate(policy.model_dump(by_alias=True) | {
        "deployments": [d.model_dump() | {"price": price} for d in policy.deployments]
    })  # fmt: skip
    call = a_call(chat([text_part("what is this?"), part], max_tokens=1), priced)
    assert call.class_name == "realtime"
    estimate = estimate_call(call, now=time.time())
    assert 765 <= estimate.input_tokens <= 765 + OTHER_TOKENS
    assert estimate.cost_nanos == (estimate.input_tokens + 1) * 1_000
    assert a_call(chat([part, part]), priced).class_name == "batch"


def test_a_remote_image_with_a_long_url_counts_no_more() -> None:
    signed = "https://storage.example.com/cat.png?signature=" + "x" * 4_000
    assert (
        call_of(image_part(signed)).prompt_tokens_estimate
        == call_of(image_part("https://a.b/c")).prompt_tokens_estimate
    )


def shared_blocks(one: Call, other: Call) -> int:
    pairs = zip(one.fingerprint, other.fingerprint, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.fingerprint), len(other.fingerprint)))


def test_an_image_stands_in_the_fingerprint_for_its_tokens() -> None:
    before, image, after = text_part("a" * 1_000), image_part(png(2048, 4096)), text_part("b" * 1_000)
    call = call_of(before, image, after)
    assert len(call.fingerprint) == (1_000 + 1_105 * 4 + 1_000 + 6) // BLOCK_BYTES
    assert abs(call.prompt_tokens_estimate - len(call.fingerprint) * BLOCK_TOKENS) <= BLOCK_TOKENS + OTHER_TOKENS
    other = call_of(before, image_part(png(2048, 4096, tail=b"another image")), after)
    assert shared_blocks(call, other) == 1_000 // BLOCK_BYTES  # up to the image, and no block further
    assert shared_blocks(call, call_of(before, image, text_part("c" * 1_000))) == (1_000 + 1_105 * 4) // BLOCK_BYTES


def test_equal_images_are_equal_prefixes_in_all_endpoints() -> None:
    """Also if they are written differently: with escaped slashes, or another case of the data URL's head."""
    content, policy = png(1024, 1024, tail=bytes(range(256)) * 20), like("gpt-4o")
    url = data_url(content)
    assert "/" in url.partition(",")[2]
    texts = {"chat": chat([text_part("hi"), image_part(url)])}
    texts["capital"] = chat([text_part("hi"), image_part(url.replace("data:image/png", "DATA:image/PNG"))])
    calls = {name: a_call(body, policy) for name, body in texts.items()}
    calls["escaped"] = a_call(json.dumps(texts["chat"]).replace("/", "\\/").encode(), policy)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(content).decode()}
    anthropic = [text_part("hi"), {"type": "image", "source": source}]
    calls["messages"] = a_call(chat(anthropic, max_tokens=9), policy, endpoint=MESSAGES)
    parts = [{"type": "input_text", "text": "hi"}, {"type": "input_image", "image_url": url}]
    body = {"model": "m", "input": [{"role": "user", "content": parts}]}
    calls["responses"] = a_call(body, policy, endpoint=RESPONSES)
    first = calls["chat"]
    for name, call in calls.items():
        assert call.fingerprint == first.fingerprint, name
        assert call.media == first.media, name
    assert len(first.fingerprint) >= 765 // BLOCK_TOKENS


def test_other_media_of_other_endpoints() -> None:
    policy = like("claude")
    pdf = base64.b64encode(samples.pdf(5)).decode()
    source = {"type": "base64", "media_type": "application/pdf", "data": pdf}
    call = a_call(chat([{"type": "document", "source": source}], max_tokens=9), policy, endpoint=MESSAGES)
    assert call.media is not None and call.media.by_kind == (("file", 15_000),)
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [image]}
    call = a_call(chat([result], max_tokens=9), policy, endpoint=MESSAGES)
    assert call.media is not None and call.media.by_kind == (("unknown_image", 1_568),)
    file = {"type": "input_file", "filename": "x", "file_data": f"data:application/pdf;base64,{pdf}"}
    sound = {"type": "input_audio", "input_audio": {"data": base64.b64encode(samples.wav(8)).decode(), "format": "wav"}}
    body = {"model": "m", "input": [{"role": "user", "content": [file, sound]}]}
    call = a_call(body, policy, endpoint=RESPONSES)
    assert call.media is not None and call.media.by_kind == (("file", 15_000), ("audio", 200))


def test_the_most_expensive_of_a_models_deployments_is_reserved() -> None:
    deployments = [
        {"name": name, "base_url": "http://a.invalid/v1", "model": model}
        for name, model in (("a", "gpt-4o"), ("b", "gpt-4o-mini"))
    ]
    call = a_call(chat([image_part(png(1024, 1024))]), a_policy(deployments=deployments))
    assert call.media is not None and call.media.formula_tokens == 25_501


def test_many_media_take_bounded_memory_and_are_counted_in_full() -> None:
    videos = [{"type": "video_url", "video_url": {"url": f"https://example.com/{i}"}} for i in range(100)]
    call = call_of(*videos)
    assert call.prompt_tokens_estimate >= 100 * 18_000 > FILL_TOKENS_MAX
    assert len(call.fingerprint) <= FILL_TOKENS_MAX // BLOCK_TOKENS + 100
    changed = call_of(*videos[:-1], image_part("https://example.com/other"), text_part("x" * BLOCK_BYTES))
    again = call_of(*videos, text_part("x" * BLOCK_BYTES))
    assert changed.fingerprint[-1] != again.fingerprint[-1]  # media beyond the bound break the prefix, too


def test_the_number_of_media_is_bounded() -> None:
    part = image_part("https://a.b/c")
    assert call_of(*[part] * ITEMS_MAX).prompt_tokens_estimate >= ITEMS_MAX * 765
    with pytest.raises(BadRequest, match="at most 4096 images, recordings and files") as refused:
        call_of(*[part] * (ITEMS_MAX + 1))
    assert refused.value.param == "messages"


def test_strange_headers_spend_the_prompts_budget_and_no_more() -> None:
    """A client could otherwise hold the event loop for seconds, with files that need many reads."""
    strange = image_part(b"\xff\xd8" + b"\xff\xe2\x00\x02" * 90)
    plain = image_part(png(2048, 4096))
    first = call_of(plain, *[strange] * (READS_MAX // 90 + 9), plain)
    assert first.media is not None and dict(first.media.by_kind)["image"] == 1105  # the last one counts as unknown
    bomb = b"%PDF-1.5 " + b"/ObjStm>>stream\n" + zlib.compress(bytes(INFLATED_MAX_BYTES))
    files = [samples.file_part(content) for content in (bomb, samples.pdf(3), samples.pdf(3, compressed=True))]
    media = call_of(*files).media
    assert media is not None and media.by_kind == (("unknown_file", 2 * 15_000), ("file", 4_500))


def test_the_bound_is_above_any_count_and_finite() -> None:
    assert call_of(text_part("hi")).media_tokens_bound == 0
    assert call_of(image_part(png(9, 9))).media_tokens_bound == IMAGE_TOKENS_BOUND
    assert call_of(*[image_part("https://a.b/c")] * 3).media_tokens_bound == 3 * IMAGE_TOKENS_BOUND


def test_a_spaced_body_of_text_and_an_image_has_the_fingerprint_of_a_compact_one() -> None:
    """A long body is not written again for its whitespace alone."""
    body = chat([text_part("hi"), image_part(png(1024, 1024, tail=bytes(200_000)))])
    compact = a_call(json.dumps(body, separators=(",", ":")).encode(), like("gpt-4o"))
    spaced = a_call(json.dumps(body).encode(), like("gpt-4o"))
    assert spaced.fingerprint == compact.fingerprint
    assert spaced.canonical_steps == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)
URLS = (
    st.builds(
        lambda head, tail: head + tail, st.sampled_from(["data:image/png;base64,", "data:", "https://"]), st.text()
    )
    | st.builds(data_url, st.binary(max_size=200), st.sampled_from(["image/png", "application/pdf", "audio/wav", ";;"]))
    | JSON
)
SOURCES = st.dictionaries(
    st.sampled_from(["url", "data", "file_data", "file_id", "filename", "format", "detail"]), URLS, max_size=4
)
PARTS = st.dictionaries(
    st.sampled_from(["type", "text", "image_url", "input_audio", "audio_url", "video_url", "file"]),
    SOURCES | URLS,
    max_size=4,
)


LIKE_GPT_4O = like("gpt-4o")


@given(PARTS | JSON)
def test_no_part_makes_the_reader_fail(part: Any) -> None:
    body = json.dumps(chat([part, text_part("x")])).encode()
    call = a_call(body, LIKE_GPT_4O)
    assert (call.media is None) == (media_item(msgspec.Raw(json.dumps(part).encode()), HeaderBudget()) is None)
    assert call.prompt_tokens_estimate > 0
