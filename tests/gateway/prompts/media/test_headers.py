"""Sizes of media from their headers: real and built files, truncated, lying and hostile ones."""

from __future__ import annotations

import base64
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompts.media.encoded import READ_MAX_BYTES, EncodedFile, HeaderBudget, split_data_url
from gateway.prompts.media.images import SEGMENTS_MAX, image_size
from gateway.prompts.media.pdf import PAGES_MAX, WINDOW_BYTES, pdf_pages
from gateway.prompts.media.recordings import SECONDS_MAX, recording_seconds
from tests.gateway.prompts.media import samples


def encoded(content: bytes) -> EncodedFile:
    return EncodedFile(memoryview(base64.b64encode(content)), HeaderBudget())


@pytest.mark.parametrize("name", samples.IMAGES)
def test_the_size_of_an_image(name: str) -> None:
    assert image_size(encoded(samples.IMAGES[name])) == samples.IMAGES_SIZE


def test_the_frame_of_a_photo_is_behind_its_metadata() -> None:
    """Cameras write previews and profiles of hundreds of kilobytes before the frame header."""
    jpeg = samples.IMAGES["plain.jpeg"]
    metadata = b"".join(b"\xff\xe2" + struct.pack(">H", 65_000) + bytes(64_998) for _ in range(20))
    assert image_size(encoded(jpeg[:2] + metadata + b"\xff\xff" + jpeg[2:])) == samples.IMAGES_SIZE
    assert image_size(encoded(jpeg[:2] + b"\xff\xe2\x00\x02" * SEGMENTS_MAX + jpeg[2:])) is None


def test_a_jpeg_without_a_frame_has_no_size() -> None:
    jpeg = samples.IMAGES["plain.jpeg"]
    assert image_size(encoded(jpeg[:2] + b"\xff\xda" + jpeg[2:])) is None
    assert image_size(encoded(b"\xff\xd8" + b"\xff\xe0\x00\x00" * 1_000)) is None


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_an_image_without_area_has_no_size(size: tuple[int, int]) -> None:
    assert image_size(encoded(samples.png(*size))) is None


@pytest.mark.parametrize(
    ("content", "seconds"),
    [
        (samples.wav(2.5), 2.5),
        (samples.wav(2.5)[:44] + bytes(8_000), 0.5),  # the header promises more than there is
        (samples.mp3(10), 10),
        (samples.mp3(10, id3_bytes=3_000), 10),
        (samples.mp3(3_600, count=True), 3_600),
        (samples.flac(61), 61),
        (samples.mp4(125.5), 125.5),
        (samples.mp4(125.5, version=1, moov_last=True), 125.5),
        (samples.mp4(10**6), SECONDS_MAX),
        (b"RIFF\0\0\0\0WAVEdata\xff\xff\xff\xff", 0),  # without a format
        (b"fLaC" + bytes(38), 0),
        (b"\xff" * 10_000, 0),
        (b"OggS" + bytes(100), 0),
        (b"", 0),
    ],
)  # fmt: skip
def test_the_duration_of_a_recording(content: bytes, seconds: float) -> None:
    assert recording_seconds(encoded(content)) == pytest.approx(seconds, rel=0.01)


def test_a_recording_that_was_streamed_has_no_length_in_its_header() -> None:
    content = bytearray(samples.wav(3))
    for length in (0, 2**32 - 1):
        struct.pack_into("<I", content, 40, length)
        assert recording_seconds(encoded(bytes(content))) == pytest.approx(3, rel=0.01)


@pytest.mark.parametrize("pages", [1, 12, 400])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("filler", [0, 3 * WINDOW_BYTES])
def test_the_pages_of_a_pdf(pages: int, compressed: bool, filler: int) -> None:
    assert pdf_pages(encoded(samples.pdf(pages, compressed=compressed, filler=filler))) == pages


@pytest.mark.parametrize(
    ("content", "pages"),
    [
        (b"%PDF-1.4 1 0 obj << /Linearized 1 /L 5 /H [1 2] /O 4 /N 31 /T 7 >> endobj", 31),
        (b"%PDF-1.4 /Type /Pages /Count 9999999", PAGES_MAX),
        (b"%PDF-1.4 /Type /Pages /Count 99999999999999999999", 0),
        (b"%PDF-1.4 /Type /Pages /Count -5", 0),
        (b"%PDF-1.4 " + b"1 0 obj <</Type/Page>> endobj " * 7, 7),
        (b"%PDF-1.4 /ObjStm>>stream\n not deflated", 0),
        (b"no PDF /Type /Pages /Count 5", 0),
    ],
)
def test_odd_pdfs(content: bytes, pages: int) -> None:
    assert pdf_pages(encoded(content)) == pages


def test_a_pdf_cannot_make_the_gateway_inflate_without_bound() -> None:
    bomb = zlib.compress(bytes(50_000_000))
    content = b"%PDF-1.5 " + b"/ObjStm >> stream\n" + bomb + (b"/ObjStm >> stream\n" + zlib.compress(b"x")) * 1_000
    assert pdf_pages(encoded(content)) == 0


@given(st.binary(max_size=300), st.integers(0, 310), st.integers(0, 100))
def test_a_read_decodes_only_what_is_asked(content: bytes, at: int, length: int) -> None:
    assert encoded(content).read(at, length) == content[at : at + length]


@given(st.binary(min_size=200, max_size=4_000), st.integers(0, 4_000), st.sampled_from([b"\n", b"\r\n", b" "]))
def test_line_breaks_within_base64(content: bytes, at: int, space: bytes) -> None:
    payload = base64.b64encode(content)
    lines = space.join(payload[i : i + 76] for i in range(0, len(payload), 76))
    assert EncodedFile(memoryview(lines), HeaderBudget()).read(at, 50) == content[at : at + 50]


def test_reads_are_bounded() -> None:
    file = encoded(bytes(2 * READ_MAX_BYTES))
    assert len(file.read(0, READ_MAX_BYTES - 1)) == READ_MAX_BYTES - 1
    assert [len(file.read(10, 5)), len(file.read(10, 5))] == [1, 0]


def test_url_safe_base64_is_read() -> None:
    content = b"\xff\xd8" + bytes(range(256))
    assert EncodedFile(memoryview(base64.urlsafe_b64encode(content)), HeaderBudget()).read(0, 258) == content


@pytest.mark.parametrize(
    ("url", "media_type"),
    [
        (b"data:image/png;base64,AAAA", b"image/png"),
        (b"  DATA:Image/PNG;charset=x;Base64,AAAA", b"image/png"),
        (b"data:;base64,AAAA", b""),
        (b"data:image/png,AAAA", None),
        (b"data:image/png;base64", None),
        (b"https://example.com/x;base64,AAAA", None),
        (b"data:" + b"x" * 10_000 + b";base64,AAAA", None),
        (b"", None),
    ],
)
def test_data_urls(url: bytes, media_type: bytes | None) -> None:
    found = split_data_url(memoryview(url))
    assert media_type == (None if found is None else found[0])
    assert found is None or bytes(found[1]) == b"AAAA"


FILES = (
    *samples.IMAGES.values(),
    *(samples.wav(1), samples.mp3(1), samples.mp3(2, id3_bytes=9, count=True), samples.flac(3), samples.mp4(4)),
    *(samples.pdf(3), samples.pdf(3, compressed=True), b"%PDF-", b"\xff\xfb\x90"),
)


@given(
    st.sampled_from(FILES),
    st.lists(st.tuples(st.integers(0, 700), st.binary(max_size=12)), max_size=6),
    st.integers(0, 3_000),
)
def test_no_header_makes_a_parser_fail(content: bytes, changes: list[tuple[int, bytes]], length: int) -> None:
    """Whatever a client changes in a file: a parser gives a size within its bounds, or none."""
    changed = bytearray(content)
    for at, written in changes:
        changed[at : at + len(written)] = written
    check_all(base64.b64encode(bytes(changed[:length])))


@given(st.binary(max_size=2_000))
def test_payloads_that_are_no_base64(payload: bytes) -> None:
    check_all(payload)


def check_all(payload: bytes) -> None:
    size = image_size(EncodedFile(memoryview(payload), HeaderBudget()))
    assert size is None or min(size) > 0
    assert 0 <= recording_seconds(EncodedFile(memoryview(payload), HeaderBudget())) <= SECONDS_MAX
    assert 0 <= pdf_pages(EncodedFile(memoryview(payload), HeaderBudget())) <= PAGES_MAX
