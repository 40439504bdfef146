"""How the formulas for media are corrected by the usage of replies: soon, within bounds, and for each tenant alone."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.base import estimate_call
from gateway.policy import Policy
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.prompts.media.calibration import FACTOR_MAX, LEARNED_MAX, STEP_MAX, MediaCalibration
from gateway.types import Call, PromptMedia
from tests.gateway.calls import a_call, a_policy, chat
from tests.gateway.prompts.media.samples import image_part, png, text_part

REMOTE = image_part("https://example.com/x.png")
POLICY = a_policy(models=[{"name": "m", "deployments": ["a", "b"], "media": {"like": "gpt-4o"}}])


def seen(calibration: MediaCalibration, *parts: object, tenant: str = "t", policy: Policy = POLICY) -> Call:
    """The call of a prompt, as a canonicaliser with this calibration makes it."""
    call = a_call(chat([*parts]), policy, tenant=tenant)
    if call.media is None:
        return call
    corrected = calibration.corrected_tokens(tenant, "m", call.media)
    media = msgspec.structs.replace(call.media, correction=corrected - call.media.formula_tokens)
    return msgspec.structs.replace(call, media=media)


def media_tokens(call: Call) -> int:
    assert call.media is not None
    return call.media.formula_tokens + call.media.correction


@pytest.mark.parametrize("real", [190, 765, 3_000])
def test_remote_images_converge_to_what_replies_report(real: int) -> None:
    calibration = MediaCalibration()
    text_tokens = seen(calibration, text_part("hi")).input_tokens_estimate
    for _ in range(20):
        calibration.learn(seen(calibration, text_part("hi"), REMOTE), text_tokens + real)
    call = seen(calibration, text_part("hi"), REMOTE)
    assert media_tokens(call) == pytest.approx(real, rel=0.05)
    assert call.input_tokens_estimate == pytest.approx(text_tokens + real, rel=0.05)
    assert call.tokens_estimate > call.input_tokens_estimate
    assert estimate_call(call, now=0.0).input_tokens == call.input_tokens_estimate


def test_the_correction_does_not_change_the_fingerprint() -> None:
    """A conversation's next turn must be found in the cache, whatever was learned meanwhile."""
    canonicaliser = Canonicaliser(b"secret")
    before = seen(canonicaliser.media_calibration, REMOTE)
    for _ in range(10):
        canonicaliser.media_calibration.learn(before, 3_000)
    after = seen(canonicaliser.media_calibration, REMOTE)
    assert after.input_tokens_estimate > 2 * before.input_tokens_estimate
    assert (after.fingerprint, after.prompt_tokens_estimate) == (before.fingerprint, before.prompt_tokens_estimate)


def test_remote_images_and_sized_ones_are_corrected_apart() -> None:
    calibration = MediaCalibration()
    for _ in range(30):
        calibration.learn(seen(calibration, REMOTE), 200)
    assert media_tokens(seen(calibration, image_part(png(1024, 1024)))) == 765


def test_several_kinds_share_the_error_by_their_tokens() -> None:
    calibration = MediaCalibration()
    sound = {"type": "audio_url", "audio_url": {"url": "https://example.com/x.mp3"}}  # 600 tokens
    images = [image_part(png(512, 512 + i)) for i in range(10)]
    for _ in range(40):
        call = seen(calibration, *images, sound)
        calibration.learn(call, call.input_tokens_estimate - media_tokens(call) + 8_000)
    assert media_tokens(seen(calibration, *images, sound)) == pytest.approx(8_000, rel=0.05)


def test_a_prompt_of_mostly_text_teaches_nothing() -> None:
    """Its text, whose tokens are an estimate, would drown the image."""
    calibration = MediaCalibration()
    for _ in range(50):
        calibration.learn(seen(calibration, text_part("x" * 8_000), REMOTE), 20_000)
    assert media_tokens(seen(calibration, REMOTE)) == 765


def test_text_is_subtracted_as_the_models_prompts_without_media_count_it() -> None:
    calibration = MediaCalibration()
    calibration.learn(seen(calibration, REMOTE), 773)
    text = text_part("x" * 2_400)  # counts 1,200 tokens instead of 600
    for _ in range(50):
        alone = seen(calibration, text)
        calibration.learn(alone, 2 * alone.prompt_tokens_estimate)
    for _ in range(50):
        calibration.learn(seen(calibration, text, REMOTE, REMOTE), 1_200 + 2 * 765)
    assert media_tokens(seen(calibration, REMOTE)) == pytest.approx(765, rel=0.1)


def test_one_reply_changes_little() -> None:
    for reported in (0, 10**12):
        calibration = MediaCalibration()
        calibration.learn(seen(calibration, REMOTE), reported)
        assert 765 / STEP_MAX < media_tokens(seen(calibration, REMOTE)) < 765 * STEP_MAX


def test_tenants_do_not_affect_each_other() -> None:
    calibration = MediaCalibration()
    for _ in range(50):
        calibration.learn(seen(calibration, REMOTE), 9_000)
    assert media_tokens(seen(calibration, REMOTE)) > 8_000
    assert media_tokens(seen(calibration, REMOTE, tenant="u")) == 765


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2**63)), max_size=60))
def test_whatever_is_reported_the_correction_stays_within_its_bounds(replies: list[tuple[bool, int]]) -> None:
    calibration, media = MediaCalibration(), PromptMedia((("image", 1_000), ("file", 500)), 10**6)
    call = msgspec.structs.replace(seen(calibration, REMOTE), media=media, prompt_tokens_estimate=1_510)
    text = msgspec.structs.replace(call, media=None)
    for with_media, reported in replies:
        calibration.learn(call if with_media else text, reported)
        corrected = calibration.corrected_tokens("t", "m", media)
        assert 1_500 / FACTOR_MAX - 1 <= corrected <= 1_500 * FACTOR_MAX + 1


def test_the_factors_of_the_least_recent_tenants_are_forgotten() -> None:
    calibration, call = MediaCalibration(), seen(MediaCalibration(), REMOTE)
    calibration.learn(call, 3_000)
    for number in range(LEARNED_MAX):
        calibration.learn(msgspec.structs.replace(call, model=call.model.model_copy(update={"name": f"{number}"})), 9)
    assert media_tokens(seen(calibration, REMOTE)) == 765
