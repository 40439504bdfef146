"""Image files: the pixels of transformers' processor for every format, and clear errors for everything else."""

from __future__ import annotations

import base64
import contextlib
import io
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from backend.models.config import ModelConfig
from backend.models.qwen_vision import image_size, to_patches
from backend.models.vision_config import VisionConfig
from tests.backend.images.hostile_files import (
    GOOD,
    HOSTILE,
    chunk,
    encoded,
    exif_of,
    jpeg_of_scans,
    jpeg_with,
    png_with,
)
from tests.backend.vision_models import PIXELS, build, picture

pytest.importorskip("PIL", reason="the package pillow is not installed")
from PIL import Image, ImageOps
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


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_an_image_is_turned_as_its_camera_says(orientation: int, form: str, vision: VisionConfig) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(picture(112, 56)), form, exif=exif)
    expected = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert (decoded(data, vision) == expected).all()
    assert expected.shape == ((112, 56, 3) if orientation in (5, 6, 7, 8) else (56, 112, 3))


def test_sizes_equal_transformers(vision: VisionConfig) -> None:
    random = np.random.default_rng(5)
    for width, height in random.integers(1, 3000, (3000, 2)).tolist():
        if max(width, height) > 200 * min(width, height):
            continue
        theirs = smart_resize(height, width, 28, PIXELS["min_pixels"], PIXELS["max_pixels"])
        assert image_size(width, height, vision) == theirs[::-1], (width, height)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, vision: VisionConfig) -> None:
    data, message = HOSTILE[name]
    with pytest.raises(ImageError) as refused:
        decoded(data, vision)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(jpeg_of_scans(400, 40), id="scans"),
        pytest.param(jpeg_with(b"\xff\xfe\0\6\xff\xda\xff\xda" * 100), id="comments like scans"),
        pytest.param(png_with(chunk(b"tEXt", b"a\0b") * 1_000), id="texts"),
        pytest.param(encoded(Image.fromarray(picture(90, 70)), "GIF", comment=b"a" * 100_000), id="comment"),
        pytest.param(
            encoded(Image.fromarray(picture(90, 70)), "GIF", save_all=True,
                    append_images=[Image.fromarray(picture(90, 70, i)) for i in range(1, 9)]),
            id="animation",
        ),
        pytest.param(jpeg_with(b"")[:-2] + b"\xff\xd9" + b"\xff\xda" * 1_000, id="behind the end"),
    ],
)  # fmt: skip
def test_files_with_many_parts_are_read(data: bytes, vision: VisionConfig) -> None:
    expected = Image.open(io.BytesIO(data)).convert("RGB")
    assert decoded(data, vision).shape == (*image_size(*expected.size, vision)[::-1], 3)


def test_of_exif_data_only_the_orientation_is_decoded(vision: VisionConfig) -> None:
    """Decoded, each of the values takes sixteen times its bytes."""
    data = png_with(chunk(b"eXIf", exif_of(1, 2**20)))
    tracemalloc.start()
    try:
        assert decoded(data, vision).shape == (*image_size(70, 90, vision)[::-1], 3)
        assert tracemalloc.get_traced_memory()[1] < 3 * 10**6 + len(data) * 3
    finally:
        tracemalloc.stop()


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
