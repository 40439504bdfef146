"""Prompts with images: tokens and logits equal transformers' whole model in float64, whatever happens on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from backend.engine import image_encoder
from backend.engine.cached_block import content_of, extend_hashes
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import ConfigError
from backend.engine.graph_runner import GraphRunner
from backend.engine.graphs import NoCapture
from backend.engine.outputs import FinishReason, TokenLogprob
from backend.engine.prompt_images import PromptImages
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from tests.backend.recorded_logits import record_logits
from tests.backend.vision_models import IMAGE_TOKEN, VISION_END, VISION_START, Prompt, build, picture

NUM_TOKENS = 24
TOLERANCE = 1e-4
LANDSCAPE, PORTRAIT, SQUARE = picture(28 * 7, 28 * 3, 1), picture(28 * 4, 28 * 8, 2), picture(28 * 4, 28 * 4, 3)
PROMPTS = {
    "one": Prompt([5, 6, 7, LANDSCAPE, 8, 9, 10]),
    "two": Prompt([11, SQUARE, 12, 13, PORTRAIT, 14]),
    "adjacent": Prompt([SQUARE, LANDSCAPE, SQUARE, 15, 16]),
    "text": Prompt([(7 * i * i + 3 * i) % 240 for i in range(90)]),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen-vl")


@pytest.fixture(scope="module")
def model(directory: Path) -> PreTrainedModel:
    return build(directory)


@pytest.fixture
def load(model: PreTrainedModel, directory: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(
            Engine.load(EngineConfig(model_dir=directory, **{"num_blocks": 128, "num_threads": 1} | options))
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        engine.runner.model.close()


def run(
    engine: Engine, prompts: dict[str, Prompt], num_tokens: int = NUM_TOKENS, logprobs: int | None = 0
) -> tuple[dict[str, Request], dict[str, list[TokenLogprob]]]:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=logprobs)
    requests = {name: prompt.request(engine, name, sampling) for name, prompt in prompts.items()}
    for request in requests.values():
        engine.add(request)
    scored: dict[str, list[TokenLogprob]] = {name: [] for name in prompts}
    while engine.has_unfinished:
        for output in engine.step():
            scored[output.request_id] += output.logprobs
    engine.check_integrity()
    return requests, scored


def output_of(request: Request) -> list[int]:
    return request.token_ids[request.num_prompt_tokens :]


def check(model: PreTrainedModel, prompt: Prompt, request: Request, scored: Sequence[TokenLogprob] = ()) -> None:
    tokens = output_of(request)
    logits = prompt.logits(model, tokens)[len(prompt.token_ids) - 1 : -1]
    first, second = logits.topk(2).values.unbind(-1)
    assert (first - second).min() > 2 * TOLERANCE, "a model in which rounding decides proves nothing"
    assert tokens == logits.argmax(-1).tolist()
    assert len(set(tokens)) > len(tokens) // 4, "a model that repeats itself proves little"
    expected = logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()
    if scored:
        assert [token.logprob for token in scored] == pytest.approx(expected, rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("budget", [512, 16, 5, 1])
def test_a_mixed_batch_equals_transformers(load: Callable[..., Engine], model: PreTrainedModel, budget: int) -> None:
    """With small budgets, chunks begin and end within images, and decodes run beside them."""
    requests, scored = run(load(max_num_batched_tokens=budget), PROMPTS)
    for name, prompt in PROMPTS.items():
        check(model, prompt, requests[name], scored[name])


def test_logits_equal_transformers(load: Callable[..., Engine], model: PreTrainedModel) -> None:
    engine = load()
    seen = record_logits(engine)
    run(engine, {"two": PROMPTS["two"]}, 1)
    assert (seen[0][0] - PROMPTS["two"].logits(model)[-1]).abs().max().item() < TOLERANCE


def test_images_change_the_answer(load: Callable[..., Engine]) -> None:
    """Otherwise the tests above would prove nothing."""
    other = Prompt([5, 6, 7, picture(28 * 7, 28 * 3, 99), 8, 9, 10])
    turned = Prompt([5, 6, 7, picture(28 * 3, 28 * 7, 1), 8, 9, 10])
    requests, _ = run(load(), {"one": PROMPTS["one"], "other": other, "turned": turned})
    assert other.token_ids == turned.token_ids == PROMPTS["one"].token_ids
    assert len({tuple(output_of(request)) for request in requests.values()}) == 3


@pytest.mark.parametrize("logprobs", [0, None])
def test_the_second_turn_uses_the_first_ones_blocks(
    load: Callable[..., Engine], model: PreTrainedModel, logprobs: int | None
) -> None:
    engine = load()
    prompt = PROMPTS["two"]
    requests, _ = run(engine, {"first": prompt})
    assert engine.images and engine.images.num_encoded == 2
    second = Prompt([11, SQUARE, 12, 13, PORTRAIT, 14, *output_of(requests["first"]), 17, LANDSCAPE, 18])
    requests, scored = run(engine, {"second": second}, logprobs=logprobs)
    assert requests["second"].num_cached_tokens >= len(prompt.token_ids) // 16 * 16
    assert engine.images.num_encoded == 3  # the images of the first turn are cached as keys and values
    check(model, second, requests["second"], scored["second"])


def test_a_cached_prefix_may_end_within_an_image(
    load: Callable[..., Engine], model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_encoder, "IMAGE_CACHE_BYTES", 0)
    engine = load()
    run(engine, {"first": Prompt([5, PORTRAIT, 6])}, 1)
    second = Prompt([5, PORTRAIT, 7, 8])
    requests, scored = run(engine, {"second": second})
    cached = requests["second"].num_cached_tokens
    assert cached == 32 and 2 < cached < 2 + 32
    assert engine.images and engine.images.num_encoded == 2
    check(model, second, requests["second"], scored["second"])


def test_other_images_share_no_blocks(load: Callable[..., Engine]) -> None:
    engine = load()
    run(engine, {"first": Prompt([5, PORTRAIT, 6])})
    other = Prompt([5, picture(28 * 4, 28 * 8, 77), 6])
    requests, _ = run(engine, {"other": other, "same": Prompt([5, PORTRAIT, 6])})
    assert other.token_ids == requests["same"].prompt_token_ids
    assert requests["other"].num_cached_tokens == 0
    assert requests["same"].num_cached_tokens == 32


def test_a_block_says_which_images_it_has(load: Callable[..., Engine]) -> None:
    engine = load()
    request = PROMPTS["two"].request(engine, "r", SamplingParams(max_tokens=1))
    digests = [placed.image.digest.hex() for placed in request.images.images] if request.images else []
    extend_hashes(request, 3, 16)
    assert [content_of(request, i, 16).images for i in range(3)] == [
        (digests[0],), (digests[0], digests[1]), (digests[1],),
    ]  # fmt: skip


def test_the_order_of_images_and_their_places_are_hashed(load: Callable[..., Engine]) -> None:
    """Placeholders are the same token, so the tokens of these prompts are equal."""
    engine = load(block_size=64)
    tall, wide = picture(28, 56, 1), picture(28, 56, 2)
    prompts = {"ab": Prompt([tall, wide, 9]), "ba": Prompt([wide, tall, 9])}
    assert prompts["ab"].token_ids == prompts["ba"].token_ids
    sampling = SamplingParams(max_tokens=1)
    hashed = {prompts[name].request(engine, name, sampling).images for name in prompts}
    assert len({images.hashed(0, 64) for images in hashed if images}) == 2
    one = engine.images.image(picture(56, 28), b"x" * 32) if engine.images else None
    assert one
    assert PromptImages([(one, 3)]).hashed(0, 8) != PromptImages([(one, 4)]).hashed(0, 8)
    assert PromptImages([(one, 3)]).hashed(8, 16) == b""


def test_preempted_requests_are_computed_again(
    load: Callable[..., Engine], model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_encoder, "IMAGE_CACHE_BYTES", 0)  # so that their images are encoded again, too
    prompts = {f"{name} {i}": PROMPTS[name] for i in range(2) for name in ("two", "one", "text")}
    engine = load(num_blocks=16, max_model_len=160, enable_prefix_caching=False)
    requests, scored = run(engine, prompts, 40)
    assert sum(request.num_preemptions for name, request in requests.items() if "text" not in name)
    for name, prompt in prompts.items():
        check(model, prompt, requests[name], scored[name][-40:])


def test_embeddings_are_dropped_once_the_prompt_is_computed(load: Callable[..., Engine]) -> None:
    engine = load(max_num_batched_tokens=16)
    request = PROMPTS["two"].request(engine, "r", SamplingParams(max_tokens=4, temperature=0.0))
    engine.add(request)
    assert request.images
    square, portrait = (placed.image for placed in request.images.images)
    while request.num_computed_tokens < request.images.images[0].end:
        engine.step()
    assert square.kept is None  # type: ignore[attr-defined]
    while not request.num_output_tokens:
        engine.step()
    assert portrait.kept is None  # type: ignore[attr-defined]


def test_decodes_continue_while_an_image_is_encoded(
    load: Callable[..., Engine], model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    encoder: Any = engine.images
    may_encode, encode = threading.Event(), encoder._encode

    def held(*args: Any) -> torch.Tensor:
        assert may_encode.wait(60)
        result: torch.Tensor = encode(*args)
        return result

    monkeypatch.setattr(encoder, "_encode", held)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    text, image = (PROMPTS[name].request(engine, name, sampling) for name in ("text", "one"))
    engine.add(image)
    engine.add(text)
    while text.num_output_tokens < NUM_TOKENS:
        engine.step()
    assert image.num_computed_tokens == 4  # the text before the image
    assert engine.step() == []  # nothing can advance
    may_encode.set()
    while engine.has_unfinished:
        engine.step()
    check(model, PROMPTS["text"], text)
    check(model, PROMPTS["one"], image)


def test_an_urgent_image_is_encoded_first(load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load()
    encoder: Any = engine.images
    order: list[int] = []
    started, may_encode, encode = threading.Event(), threading.Event(), encoder._encode

    def noted(pixels: torch.Tensor, between: Any) -> torch.Tensor:
        order.append(len(pixels))
        started.set()
        assert may_encode.wait(60)
        result: torch.Tensor = encode(pixels, between)
        return result

    monkeypatch.setattr(encoder, "_encode", noted)
    images = [encoder.image(picture(28, 28 * i, i), bytes([i]) * 32) for i in range(1, 6)]
    images[0].is_ready(0)
    assert started.wait(60)
    for image, priority in zip(images[1:], (5, 0, 1, 7), strict=True):
        assert not image.is_ready(priority)
    aborted = images.pop(3)
    del aborted, image  # its request has ended
    may_encode.set()
    for image in images:
        assert image.is_ready(0, 60)
    assert order == [28, 28 * 3, 28 * 2, 28 * 5]


def test_embeddings_are_found_again_by_requests_with_the_same_salt_only(load: Callable[..., Engine]) -> None:
    """A quick answer would tell a tenant that another one has sent the same image."""
    encoder = load().images
    assert encoder
    encoded = []
    for salt in ("one", "one", "other", "one", "other"):
        assert encoder.image(picture(56, 28), b"x" * 32, salt).is_ready(0, 60)
        encoded.append(encoder.num_encoded)
    assert encoded == [1, 1, 2, 2, 2]


def test_without_a_thread_one_image_is_encoded_before_a_step(
    load: Callable[..., Engine], model: PreTrainedModel
) -> None:
    """As on a GPU."""
    engine = load()
    assert engine.images
    engine.images.uses_thread = False
    request = PROMPTS["two"].request(engine, "r", SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0))
    engine.add(request)
    for num_encoded, num_computed in ((1, 2), (2, 22), (2, 56)):
        engine.step()
        assert (engine.images.num_encoded, request.num_computed_tokens) == (num_encoded, num_computed)
    while engine.has_unfinished:
        engine.step()
    check(model, PROMPTS["two"], request)


def fail_on_height(engine: Engine, monkeypatch: pytest.MonkeyPatch, height: int, error: Exception) -> None:
    """Lets the encoder fail for every image with this height."""
    encoder: Any = engine.images
    encode = encoder._encode

    def fails(pixels: torch.Tensor, between: Any) -> torch.Tensor:
        if len(pixels) == height:
            raise error
        result: torch.Tensor = encode(pixels, between)
        return result

    monkeypatch.setattr(encoder, "_encode", fails)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("uses_thread", [True, False], ids=["on a thread", "before a step"])
def test_an_error_of_the_encoder_fails_the_requests_with_the_image(
    load: Callable[..., Engine], model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, uses_thread: bool, options: dict[str, Any],
) -> None:  # fmt: skip
    """All others get their tokens, and so does a later request that the encoder has no error for."""
    engine = load(max_num_batched_tokens=32, **options)
    assert engine.images
    engine.images.uses_thread = uses_thread
    fail_on_height(engine, monkeypatch, PORTRAIT.shape[0], MemoryError("no memory for the image"))
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    prompts = {"one": PROMPTS["one"], "two": PROMPTS["two"], "again": PROMPTS["two"], "text": PROMPTS["text"]}
    requests = {name: prompt.request(engine, name, sampling) for name, prompt in prompts.items()}
    for request in requests.values():
        engine.add(request)
    errors: dict[str, str | None] = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finish_reason is FinishReason.ERROR:
                errors[output.request_id] = output.error
    message = "image 2 of the request could not be encoded, because of an internal error"
    assert errors == {"two": message, "again": message}
    engine.check_integrity()
    for name in ("one", "text"):
        check(model, PROMPTS[name], requests[name])
    assert "no memory for the image" in caplog.text
    assert "Traceback" in caplog.text
    monkeypatch.undo()
    later, scored = run(engine, {"later": PROMPTS["two"]})
    check(model, PROMPTS["two"], later["later"], scored["later"])


def test_a_request_is_failed_that_comes_after_the_error(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices of one request have the same images, and may be added later."""
    engine = load()
    fail_on_height(engine, monkeypatch, PORTRAIT.shape[0], RuntimeError("broken"))
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    first = PROMPTS["two"].request(engine, "first", sampling)
    second = PROMPTS["two"].request(engine, "second", sampling)
    second.images = first.images
    engine.add(first)
    finished: dict[str, FinishReason | None] = {}
    while engine.has_unfinished:
        finished |= {output.request_id: output.finish_reason for output in engine.step()}
    engine.add(second)
    for _ in range(1000):
        finished |= {output.request_id: output.finish_reason for output in engine.step()}
        if len(finished) == 2:
            break
    assert finished == {"first": FinishReason.ERROR, "second": FinishReason.ERROR}
    engine.check_integrity()


def test_recorded_decode_steps_equal_eager_ones(load: Callable[..., Engine]) -> None:
    outputs = []
    for eager in (True, False):
        requests, _ = run(load(dtype="bfloat16", enforce_eager=eager), PROMPTS, 32, logprobs=None)
        outputs.append([output_of(requests[name]) for name in PROMPTS])
    assert outputs[0] == outputs[1]


def test_drafts_do_not_change_the_answer(load: Callable[..., Engine], model: PreTrainedModel, directory: Path) -> None:
    for options in ({"speculation": "ngram"}, {"speculation": "draft_model", "draft_model_dir": directory}):
        engine = load(**options)
        repeating = Prompt([5, SQUARE, *[31, 32, 33, 34] * 6, LANDSCAPE, *[31, 32, 33] * 3])
        requests, _ = run(engine, {"r": repeating, **PROMPTS}, logprobs=None)
        for name, prompt in PROMPTS.items():
            check(model, prompt, requests[name])
        logits = repeating.logits(model, output_of(requests["r"]))[len(repeating.token_ids) - 1 : -1]
        assert output_of(requests["r"]) == logits.argmax(-1).tolist()


def test_the_runner_of_gpus_computes_images(load: Callable[..., Engine], model: PreTrainedModel) -> None:
    """Here without captures: what they would compute, and the steps that are launched early."""
    engine = load(max_num_batched_tokens=32)
    engine.runner = GraphRunner(engine.config, NoCapture(), engine.runner.model)
    requests, _ = run(engine, PROMPTS, logprobs=None)
    for name, prompt in PROMPTS.items():
        check(model, prompt, requests[name])


def test_two_ranks_compute_the_tokens_of_one_process(load: Callable[..., Engine], model: PreTrainedModel) -> None:
    requests, scored = run(load(tensor_parallel_size=2, max_num_batched_tokens=32), PROMPTS)
    for name, prompt in PROMPTS.items():
        check(model, prompt, requests[name], scored[name])


def test_positions_equal_transformers(model: PreTrainedModel, load: Callable[..., Engine]) -> None:
    engine: Engine = load()
    prompt = PROMPTS["adjacent"]
    request = prompt.request(engine, "r", SamplingParams(max_tokens=1))
    ids = torch.tensor([prompt.token_ids])
    grids = torch.tensor([[1, image.shape[0] // 14, image.shape[1] // 14] for image, _ in prompt.images])
    inner: Any = model.model
    expected, deltas = inner.get_rope_index(ids, (ids == IMAGE_TOKEN).int(), grids)
    assert request.images
    count = len(prompt.token_ids)
    for start in range(count):
        for end in (start + 1, min(start + 7, count), count):
            assert request.images.positions(start, end).tolist() == expected[:, 0, start:end].tolist()
    assert request.images.position_offset(count) == deltas.item()


def test_text_alone_if_images_are_not_wanted(load: Callable[..., Engine], model: PreTrainedModel) -> None:
    engine = load(reads_images=False)
    assert engine.images is None
    requests, scored = run(engine, {"text": PROMPTS["text"]})
    check(model, PROMPTS["text"], requests["text"], scored["text"])


@pytest.mark.parametrize("bounds", [(28 * 28 * 3, 28 * 28 * 2), (1, 28 * 28 - 1)])
def test_impossible_bounds_are_refused(load: Callable[..., Engine], bounds: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="an image cannot have"):
        load(min_image_pixels=bounds[0], max_image_pixels=bounds[1])


def test_prompts_wrap_images_in_markers() -> None:
    assert PROMPTS["one"].token_ids[3:5] == [VISION_START, IMAGE_TOKEN]
    assert PROMPTS["one"].token_ids[-4] == VISION_END
