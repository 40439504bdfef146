"""Image files: the pixels of transformers' processor for every format, and clear errors for everything else."""

from __future__ import annotations

import base64
import contextlib
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from backend.models.config import ModelConfig
from backend.models.qwen_vision import image_size, to_patches
from backend.models.vision_config import VisionConfig
from tests.backend.vision_models import PIXELS, build, picture

pytest.importorskip("PIL", reason="the package pillow is not installed")
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from backend.images import decoding
from backend.images.decoding import ImageError, data_of_url, decode


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> VisionConfig:
    build(directory := tmp_path_factory.mktemp("qwen-vl"))
    vision = ModelConfig.load(directory).vision
    assert vision and (vision.min_pixels, vision.max_pixels) == (PIXELS["min_pixels"], PIXELS["max_pixels"])
    return vision


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def decoded(data: bytes, vision: VisionConfig) -> NDArray[np.uint8]:
    return decode(data, lambda width, height: image_size(width, height, vision))


def of_transformers(image: Image.Image) -> NDArray[np.float32]:
    """The processor's patches, without the second frame, which equals the first: [patches, 3 * 14 * 14]."""
    values = np.asarray(Qwen2VLImageProcessorPil(**PIXELS)([image])["pixel_values"])
    frames = values.reshape(len(values), 3, 2, -1)
    assert (frames[:, :, 0] == frames[:, :, 1]).all()
    return frames[:, :, 0].reshape(len(values), -1)


@pytest.mark.parametrize("size", [(56, 84), (100, 37), (640, 480), (31, 400), (3, 5), (28, 28), (1, 199)])
def test_pixels_equal_those_of_transformers(size: tuple[int, int], vision: VisionConfig) -> None:
    """Scaled up, down, or not at all."""
    image = Image.fromarray(picture(*size))
    patches = to_patches(torch.from_numpy(decoded(encoded(image, "PNG"), vision)), vision)
    expected = of_transformers(image)
    assert patches.shape == expected.shape
    assert np.abs(patches.numpy() - expected).max() < 1e-6


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16"])
def test_every_colour_mode_is_converted_as_by_transformers(mode: str, vision: VisionConfig) -> None:
    image = Image.fromarray(picture(90, 70))
    image = image.convert("L").convert("I").convert("I;16") if mode == "I;16" else image.convert(mode)
    form = "JPEG" if mode == "CMYK" else "PNG"
    data = encoded(image, form)
    patches = to_patches(torch.from_numpy(decoded(data, vision)), vision)
    assert np.abs(patches.numpy() - of_transformers(Image.open(io.BytesIO(data)).convert("RGB"))).max() < 1e-6


@pytest.mark.parametrize("form", decoding.FORMATS)
def test_every_format_is_read(form: str, vision: VisionConfig) -> None:
    data = encoded(Image.fromarray(picture(60, 60)), form)
    assert decoded(data, vision).shape == (56, 56, 3)


def test_an_image_is_turned_as_its_camera_says(vision: VisionConfig) -> None:
    image = Image.fromarray(picture(112, 56))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    data = encoded(image, "JPEG", exif=exif, quality=95)
    assert decoded(data, vision).shape == (112, 56, 3)


def test_sizes_equal_transformers(vision: VisionConfig) -> None:
    random = np.random.default_rng(5)
    for width, height in random.integers(1, 3000, (3000, 2)).tolist():
        if max(width, height) > 200 * min(width, height):
            continue
        theirs = smart_resize(height, width, 28, PIXELS["min_pixels"], PIXELS["max_pixels"])
        assert image_size(width, height, vision) == theirs[::-1], (width, height)


def png(width: int, height: int, rows: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def gif(width: int, height: int) -> bytes:
    """A picture on a screen of 10 x 10 pixels."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 10, 10, 0x80, 0, 0) + bytes(6)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00;"


GOOD = encoded(Image.fromarray(picture(90, 70)), "PNG")
HOSTILE = {
    "a bomb of pixels": (png(30_000, 30_000, bytes(1000)), "has more than 64,000,000 pixels"),
    "a smaller bomb": (png(9_000, 8_000, bytes(1000)), "has more than 64,000,000 pixels"),
    "a bomb in a frame": (gif(60_000, 60_000), "has more than 64,000,000 pixels"),
    "a larger bomb": (png(2**31 - 1, 2**31 - 1, b""), "pixels"),
    "thin": (png(1, 1000, bytes(4000)), "more than 200 times as long as wide"),
    "truncated": (GOOD[: len(GOOD) // 2], "is no image, or damaged"),
    "without pixels": (png(50, 50, b""), "is no image, or damaged"),
    "empty": (b"", "is no image, or damaged"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no image, or damaged"),
    "another format": (encoded(Image.fromarray(picture(60, 60)), "TIFF"), "the formats are PNG, JPEG"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "is no image"),
    "too many bytes": (GOOD + bytes(decoding.MAX_BYTES), "has more than 20,971,520 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, vision: VisionConfig) -> None:
    data, message = HOSTILE[name]
    with pytest.raises(ImageError) as refused:
        decoded(data, vision)
    assert message in str(refused.value)


def test_damaged_files_raise_nothing_else(vision: VisionConfig) -> None:
    random = np.random.default_rng(1)
    for form in decoding.FORMATS:
        good = encoded(Image.fromarray(picture(40, 50)), form)
        for _ in range(150):
            data = bytearray(good)
            for place in random.integers(0, min(len(data), 200), 4):
                data[place] = int(random.integers(256))
            with contextlib.suppress(ImageError):
                decoded(bytes(data), vision)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png,abc", "must be a `data:` URL with base64"),
        ("data:image/png;base64", "must be a `data:` URL with base64"),
        ("data:image/png;base64,a$$b", "malformed base64"),
        ("data:image/png;base64," + "A" * (decoding.MAX_BYTES * 2), "has more than"),
    ],
)
def test_malformed_data_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        data_of_url(url)


def test_the_type_of_a_data_url_does_not_matter(vision: VisionConfig, tmp_path: Path) -> None:
    url = "data:image/jpeg;base64," + base64.b64encode(GOOD).decode()
    assert data_of_url(url) == GOOD
