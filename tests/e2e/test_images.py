"""Images from real clients, in three APIs, through a gateway to the bundled engine with a model that reads them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.backend.server.vision_checkpoint import build_vision_checkpoint
from tests.backend.vision_models import picture
from tests.e2e.processes import DEMO, PATIENCE_SECONDS, Gateway, Running, engine, gateway, key, simple_policy

pytest.importorskip("PIL", reason="the package pillow is not installed")
from PIL import Image

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

QUESTION = "what is in it"
ANSWER_TOKENS = 12


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("engine")
    model = build_vision_checkpoint(folder / "tiny-vl").path
    with engine(folder, "--model", str(model), "--served-model-name", DEMO, "--dtype", "float32") as started:
        yield started


@pytest.fixture(scope="module")
def front(reader: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway"), simple_policy(reader.url)) as running:
        yield running


def png(seed: int) -> str:
    """An image of 84 x 112 pixels, which are twelve tokens, in base64."""
    buffer = io.BytesIO()
    Image.fromarray(picture(84, 112, seed)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def chat_body(image: str) -> dict[str, Any]:
    parts = [
        {"type": "text", "text": QUESTION},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
    ]
    return {
        "model": DEMO, "messages": [{"role": "user", "content": parts}], "max_tokens": ANSWER_TOKENS, "temperature": 0,
    }  # fmt: skip


def direct(reader: Running, image: str) -> tuple[str, int]:
    """The answer of the engine without the gateway, and the length of the prompt."""
    answer = httpx2.post(f"{reader.url}/v1/chat/completions", json=chat_body(image), timeout=PATIENCE_SECONDS)
    found = answer.raise_for_status().json()
    return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens"]


def test_a_chat_has_an_image_and_is_billed_for_its_tokens(reader: Running, front: Gateway) -> None:
    image = png(1)
    reply = front.client().chat.completions.with_raw_response.create(**chat_body(image))
    found, (text, tokens) = reply.parse(), direct(reader, image)
    assert found.usage is not None
    assert (found.choices[0].message.content, found.usage.prompt_tokens) == (text, tokens)
    receipt = front.receipt(reply.headers["x-request-id"])
    assert receipt["input_uncached"] + receipt.get("cache_read", 0) == tokens


def test_images_of_the_responses_api_are_those_of_a_chat(reader: Running, front: Gateway) -> None:
    image = png(2)
    content: Any = [
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": f"data:image/png;base64,{image}", "detail": "auto"},
    ]
    response = front.client().responses.create(
        model=DEMO, input=[{"role": "user", "content": content}], max_output_tokens=ANSWER_TOKENS, temperature=0
    )
    assert response.usage is not None
    assert (response.output_text, response.usage.input_tokens) == direct(reader, image)


def test_images_of_the_messages_api_are_those_of_a_chat(reader: Running, front: Gateway) -> None:
    image = png(3)
    source = {"type": "base64", "media_type": "image/png", "data": image}
    content: Any = [{"type": "text", "text": QUESTION}, {"type": "image", "source": source}]
    with anthropic.Anthropic(base_url=front.url, api_key=key("dev"), max_retries=0, timeout=PATIENCE_SECONDS) as client:
        message = client.messages.create(
            model=DEMO, max_tokens=ANSWER_TOKENS, messages=[{"role": "user", "content": content}],
            extra_body={"temperature": 0},
        )  # fmt: skip
    text = "".join(block.text for block in message.content if block.type == "text")
    usage = message.usage
    assert (text, usage.input_tokens + (usage.cache_read_input_tokens or 0)) == direct(reader, image)


def test_a_second_call_finds_the_image_in_the_prefix_cache(front: Gateway) -> None:
    for _ in range(2):
        reply = front.client().chat.completions.create(**chat_body(png(4)))
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert (reply.usage.prompt_tokens_details.cached_tokens or 0) >= 16


def test_a_damaged_image_is_the_clients_error(front: Gateway) -> None:
    body = chat_body(base64.b64encode(b"no image at all").decode())
    with pytest.raises(openai.BadRequestError) as error:
        front.client().chat.completions.create(**body)
    assert error.value.param == "messages[0].content[1].image_url"
    assert "no image" in str(error.value)
