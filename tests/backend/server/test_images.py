"""Images in chats, on a real server: tokens as those of transformers, usage, prefix caching, and errors."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from backend.engine.image_encoder import ImageEncoder
from backend.server.asgi import MAX_BODY_BYTES
from backend.server.messages import ImagePart, UserMessage
from tests.backend.images.hostile_files import HOSTILE, chunk, encoded, exif_of, png_with
from tests.backend.server.conftest import RunningServer, StartServer
from tests.backend.server.vision_checkpoint import VisionCheckpoint, build_vision_checkpoint
from tests.backend.vision_models import PIXELS, logits_of, picture

pytest.importorskip("PIL", reason="the package pillow is not installed")
from PIL import Image

from backend.server import images  # imports Pillow

GREEDY = {"temperature": 0, "max_tokens": 16, "return_token_ids": True}


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> VisionCheckpoint:
    return build_vision_checkpoint(tmp_path_factory.mktemp("models") / "tiny-vl")


@pytest.fixture(scope="module")
def server(start_server: StartServer, vision: VisionCheckpoint) -> Iterator[RunningServer]:
    with start_server("--limit-mm-per-prompt", '{"image": 3}', model=str(vision.path)) as running:
        yield running


def image(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(picture(width, height, seed))


def url_of(source: Image.Image | bytes, form: str = "PNG") -> str:
    file = io.BytesIO()
    if isinstance(source, Image.Image):
        source.save(file, form)
    data = source if isinstance(source, bytes) else file.getvalue()
    return f"data:image/{form.lower()};base64,{base64.b64encode(data).decode()}"


def image_part(source: Image.Image | bytes | str, **members: Any) -> dict[str, Any]:
    url = source if isinstance(source, str) else url_of(source)
    return {"type": "image_url", "image_url": {"url": url, **members}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def post(server: RunningServer, messages: list[Any], path: str = "v1/chat/completions", **fields: Any) -> Any:
    body = {"messages": messages, **(GREEDY if path.startswith("v1") else {}), **fields}
    return httpx2.post(f"{server.url}/{path}", json=body, timeout=120)


def complete(server: RunningServer, messages: list[Any], **fields: Any) -> Any:
    reply = post(server, messages, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def check_tokens(vision: VisionCheckpoint, reply: Any, images: list[Image.Image]) -> None:
    prompt, output = reply["prompt_token_ids"], reply["choices"][0]["token_ids"]
    logits = logits_of(vision.model, [*prompt, *output], images)[len(prompt) - 1 : -1]
    assert output == logits.argmax(-1).tolist()
    assert reply["usage"]["prompt_tokens"] == len(prompt)


def tokens_of(source: Image.Image) -> int:
    """By the rule of transformers, within the bounds of the checkpoint's processor."""
    height, width = smart_resize(source.height, source.width, 28, PIXELS["min_pixels"], PIXELS["max_pixels"])
    return int(height * width // 28**2)


def test_the_answer_is_that_of_transformers(server: RunningServer, vision: VisionCheckpoint) -> None:
    """In the order of the parts, with images that are scaled up and down."""
    images = [image(300, 200, 1), image(40, 90, 2)]
    parts = user(text_part("First "), image_part(images[0]), text_part("second"), image_part(images[1], detail="low"))
    reply = complete(server, [{"role": "system", "content": "Look."}, parts])
    check_tokens(vision, reply, images)
    prompt = reply["prompt_token_ids"]
    assert prompt.count(vision.image_token) == sum(map(tokens_of, images))
    runs = [i for i, token in enumerate(prompt) if token == vision.image_token]
    assert runs[tokens_of(images[0]) - 1] + 1 < runs[tokens_of(images[0])]


def test_the_next_turn_continues_the_cached_prefix(server: RunningServer, vision: VisionCheckpoint) -> None:
    first, second = image(200, 200, 3), image(90, 180, 4)
    messages = [user(image_part(first), text_part("What is this?"))]
    reply = complete(server, messages)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    messages += [
        {"role": "assistant", "content": reply["choices"][0]["message"]["content"]},
        user(text_part("And this?"), image_part(second)),
    ]
    turn = complete(server, messages)
    assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(reply["prompt_token_ids"]) // 16 * 16
    check_tokens(vision, turn, [first, second])
    other = complete(server, [user(image_part(image(200, 200, 5)), text_part("What is this?"))])
    assert other["prompt_token_ids"] == reply["prompt_token_ids"]
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_choices_and_streams_have_images(server: RunningServer, vision: VisionCheckpoint) -> None:
    messages = [user(image_part(image(120, 60, 6)), text_part("Name it."))]
    reply = complete(server, messages, n=3)
    assert len({tuple(choice["token_ids"]) for choice in reply["choices"]}) == 1
    check_tokens(vision, reply, [image(120, 60, 6)])
    client = server.client()
    typed: Any = messages
    stream = client.chat.completions.create(
        model=server.model, messages=typed, temperature=0, max_tokens=16, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == reply["choices"][0]["message"]["content"]
    assert last.usage and last.usage.prompt_tokens == reply["usage"]["prompt_tokens"]


def test_an_image_as_a_tool_result(server: RunningServer, vision: VisionCheckpoint) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [image_part(image(60, 60, 7))]},
    ]
    check_tokens(vision, complete(server, messages), [image(60, 60, 7)])


def test_tokens_are_counted_and_rendered_as_they_are_computed(server: RunningServer, vision: VisionCheckpoint) -> None:
    messages = [user(image_part(image(100, 200, 8)), text_part("What?"))]
    reply = complete(server, messages)
    counted = post(server, messages, "tokenize").json()
    assert counted["tokens"] == reply["prompt_token_ids"]
    rendered = post(server, messages, "v1/chat/completions/render").json()
    assert rendered["token_ids"] == reply["prompt_token_ids"]
    (place,) = rendered["features"]["mm_placeholders"]["image"]
    assert place == {
        "offset": reply["prompt_token_ids"].index(vision.image_token), "length": tokens_of(image(100, 200, 8)),
    }  # fmt: skip


def test_the_model_says_that_it_reads_images(server: RunningServer) -> None:
    (model,) = httpx2.get(f"{server.base_url}/models").json()["data"]
    assert model["architecture"]["input_modalities"] == ["text", "image"]


GOOD = url_of(image(60, 60))
REFUSED: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "a URL": ([image_part("https://example.com/a.png")], "content[0].image_url", "--allowed-media-domains"),
    "a file": ([text_part("a"), image_part("file:///etc/passwd")], "content[1].image_url", "data:"),
    "no image": ([image_part(b"no image at all")], "content[0].image_url", "is no image, or damaged"),
    "malformed base64": ([image_part("data:image/png;base64,$$$$")], "content[0].image_url", "malformed base64"),
    "thin": ([image_part(image(1, 300))], "content[0].image_url", "200 times"),
    "a second one": ([image_part(GOOD), image_part(b"x")], "content[1].image_url", "is no image"),
    "too many": ([image_part(GOOD)] * 4, "content[3].image_url", "at most 3 images, not 4"),
    "without a URL": ([{"type": "image_url", "image_url": {}}], "content[0].image_url", "url"),
    "a video": ([{"type": "video_url", "video_url": {"url": "data:"}}], "content[0].type", "video_url"),
    "a sound": ([{"type": "input_audio", "input_audio": {"data": ""}}], "content[0].type", "input_audio"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(server: RunningServer, name: str) -> None:
    parts, param, message = REFUSED[name]
    reply = post(server, [{"role": "user", "content": "Hello"}, user(*parts)])
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"].startswith(f"messages[1].{param}")
    assert message in error["message"]


def resident_bytes(server: RunningServer, counter: str = "VmRSS") -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.findall(rf"{counter}:\s*(\d+)", status)[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hostile_files_get_an_answer_or_a_400_in_bounded_memory(
    server: RunningServer, vision: VisionCheckpoint
) -> None:
    """Other requests are answered as before. The timeout of `post` is the bound in time."""
    flat = Image.new("RGB", (8_000, 8_000), (9, 99, 199))
    accepted: dict[str, bytes] = {
        "64 million pixels": encoded(flat, "PNG"),
        "an animation": encoded(image(60, 60), "GIF", save_all=True, append_images=[image(60, 60, 1)] * 9),
        "four colours": encoded(image(60, 60).convert("CMYK"), "JPEG"),
        "sixteen bits": encoded(image(60, 60).convert("L").convert("I").convert("I;16"), "PNG"),
        "turned": png_with(chunk(b"eXIf", exif_of(8, 2**20))),
        "nearly too thin": encoded(image(1, 199), "PNG"),
    }
    refused = {name: data for name, (data, _) in HOSTILE.items() if len(data) * 4 // 3 < MAX_BODY_BYTES - 10_000}
    before = resident_bytes(server)
    for name, data in (accepted | refused).items():
        reply = post(server, [user(text_part("a"), image_part(data))])
        if name in accepted:
            assert reply.status_code == 200, (name, reply.text)
        else:
            assert reply.status_code == 400, (name, reply.text)
            assert reply.json()["error"]["param"] == "messages[0].content[1].image_url"
    assert resident_bytes(server, "VmHWM") - before < 2**30
    check_tokens(vision, complete(server, [user(image_part(GOOD))]), [image(60, 60)])


def test_the_placeholder_in_a_text_is_refused(server: RunningServer) -> None:
    reply = post(server, [user(image_part(GOOD), text_part("<|image_pad|>"))])
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages"
    assert "2 places for 1 images" in reply.json()["error"]["message"]


def test_fields_that_images_exclude_are_refused(server: RunningServer) -> None:
    messages = [user(image_part(GOOD))]
    reply = post(server, messages, truncate_prompt_tokens=10)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    reply = post(server, messages, continue_final_message=True, add_generation_prompt=False)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "continue_final_message")


def test_images_of_system_and_assistant_messages_are_refused(server: RunningServer) -> None:
    for role in ("system", "assistant"):
        reply = post(server, [{"role": role, "content": [image_part(GOOD)]}, user(text_part("a"))])
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages[0].content[0].type")


def test_an_image_beyond_the_context_is_refused(server: RunningServer) -> None:
    reply = post(server, [user(image_part(GOOD))], max_tokens=2040)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_unknown_members_of_an_image_are_passed_over(server: RunningServer) -> None:
    reply = post(server, [user(image_part(GOOD, uuid="a") | {"uuid": "b"})])
    assert reply.status_code == 200, reply.text
    assert set(reply.headers["x-ignored-fields"].split(", ")) == {
        "messages[0].content[0].uuid", "messages[0].content[0].image_url.uuid",
    }  # fmt: skip


def test_other_streams_are_not_disturbed_by_damaged_images(server: RunningServer, vision: VisionCheckpoint) -> None:
    for _ in range(20):
        assert post(server, [user(image_part(b"\x89PNG\r\n\x1a\n" + bytes(100)))]).status_code == 400
    check_tokens(vision, complete(server, [user(image_part(GOOD))]), [image(60, 60)])


def test_models_that_read_text_alone_refuse_images_by_name(
    start_server: StartServer, vision: VisionCheckpoint, tmp_path: Path
) -> None:
    """A model without an image encoder, and one whose encoder is not loaded."""
    for options, model in ((["--limit-mm-per-prompt", '{"image": 0}'], str(vision.path)), ([], None)):
        with start_server(*options, model=model) as running:
            for path in ("v1/chat/completions", "tokenize"):
                reply = post(running, [user(text_part("a"), image_part(GOOD))], path)
                assert reply.status_code == 400
                error = reply.json()["error"]
                assert (error["param"], error["message"]) == (
                    "messages[0].content[1].image_url", "This model does not read images.",
                )  # fmt: skip
            (listed,) = httpx2.get(f"{running.base_url}/models").json()["data"]
            assert listed["architecture"]["input_modalities"] == ["text"]


def test_bounds_of_pixels_and_hosts_are_options(start_server: StartServer, vision: VisionCheckpoint) -> None:
    sizes = json.dumps({"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 9})
    options = ["--mm-processor-kwargs", sizes, "--allowed-media-domains", "localhost", "images.example"]
    with start_server(*options, model=str(vision.path)) as running:
        reply = complete(running, [user(image_part(image(620, 580)))])
        assert reply["prompt_token_ids"].count(vision.image_token) == 6
        for url, message in (
            (f"{running.url}/health".replace("127.0.0.1", "localhost"), "localhost has an address that is not public"),
            ("http://other.example/a.png", "--allowed-media-domains does not name other.example"),
        ):
            refused = post(running, [user(image_part(url))])
            assert refused.status_code == 400
            assert message in refused.json()["error"]["message"]


async def test_tenants_take_turns_when_images_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    release = threading.Event()

    def decode(data: bytes, _size: object) -> bytes:
        begun.append(data.decode())
        release.wait()
        return data

    monkeypatch.setattr(images, "decode", decode)
    loader = images.ImageLoader(cast(ImageEncoder, SimpleNamespace(config=None, image=lambda *_: None)), 16)
    many, one = (
        [UserMessage([ImagePart(url_of(data))] * count)] for data, count in ((b"hostile", 10), (b"innocent", 1))
    )
    hostile = asyncio.create_task(loader.load(many, "hostile"))
    while len(begun) < images.DECODING.running:
        await asyncio.sleep(0)
    innocent = asyncio.create_task(loader.load(one, "innocent"))
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(hostile, innocent)
    assert begun.index("innocent") <= images.DECODING.running + 1, "waits for what has begun and one piece more"
    loader.close()


async def test_one_request_may_have_more_images_than_usually_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "decode", lambda data, _size: data)
    count = images.DECODING.waiting + 10
    loader = images.ImageLoader(cast(ImageEncoder, SimpleNamespace(config=None, image=lambda *_: None)), count)
    loaded = await loader.load([UserMessage([ImagePart(url_of(b"image"))] * count)], "salt")
    assert len(loaded) == count
    loader.close()
