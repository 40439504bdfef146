"""The outline of a prompt: media count as they do elsewhere, and are compared by their bytes."""

from __future__ import annotations

from gateway.diagnosis.outline import MEDIA_CHARACTERS_MAX, CallOutline, parts_of
from gateway.prefix.fingerprint import BYTES_PER_TOKEN
from gateway.types import Usage
from tests.gateway.calls import a_call, chat
from tests.gateway.prompts.media.samples import image_part, png, text_part


def test_an_image_has_its_tokens_and_not_those_of_its_base64() -> None:
    large, same = (image_part(png(1008, 1008, tail=bytes(size))) for size in (300_000, 300_000))
    other = image_part(png(1008, 1008, tail=b"other"))
    outlines = [parts_of(a_call(chat([text_part("what is this?"), part]))) for part in (large, same, other)]
    assert abs(outlines[0][0].tokens - 36 * 36) < 10
    assert outlines[0] == outlines[1] != outlines[2]
    memory = CallOutline("x", outlines[0], 0, None, Usage()).bytes
    assert memory < 7_000


def test_the_memory_for_a_recording_is_bounded() -> None:
    film = {"type": "video_url", "video_url": {"url": "https://example.com/film.mp4"}}
    (part,) = parts_of(a_call(chat([film, film])))
    assert len(part.text) <= 2 * MEDIA_CHARACTERS_MAX + 1
    assert part.tokens >= MEDIA_CHARACTERS_MAX // BYTES_PER_TOKEN
