"""Decodes an image file and scales it, with the same pixels as transformers for the same file.

The files come from clients. Only the formats in `FORMATS` are tried, the size is checked before a pixel is decoded, and
a large image is decoded alone, since its pixels take up to half a GiB on the way.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import threading
import warnings
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from backend.images import structure

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of an animation, the first picture
MAX_BYTES = 20 * 1024 * 1024  # of a file
MAX_PIXELS = 64_000_000  # of a file, before it is scaled
LARGE_PIXELS = 16_000_000  # images with more are decoded one after the other
MAX_ASPECT_RATIO = 200  # of the longer side to the shorter one, as in transformers
_TURNS = {  # by the orientation in EXIF data
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip

# Clients would fill the log with what Pillow says about their files.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
# Pillow checks the sizes of frames, too, and warns of those that it does not refuse.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
warnings.simplefilter("error", Image.DecompressionBombWarning)
_large = threading.Lock()


class ImageError(Exception):
    """Why an image cannot be used, in words for the client. The text continues a sentence about the image."""


def data_of_url(url: str) -> bytes:
    """The bytes in a `data:` URL. Raises `ImageError`."""
    head, comma, payload = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ImageError("must be a `data:` URL with base64, such as `data:image/png;base64,...`")
    if len(payload) > MAX_BYTES * 4 // 3 + 4:
        raise ImageError(f"has more than {MAX_BYTES:,} bytes")
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        raise ImageError("contains malformed base64") from None


def decode(data: bytes, scaled_size: Callable[[int, int], tuple[int, int]]) -> NDArray[np.uint8]:
    """The pixels of an image file in red, green and blue: [height, width, 3].

    `scaled_size` gets the width and height of the image and returns those of the result. The image is turned as its
    EXIF data says, and transparent pixels get the colour that they have in the file. Raises `ImageError`.
    """
    if len(data) > MAX_BYTES:
        raise ImageError(f"has more than {MAX_BYTES:,} bytes")
    if excess := structure.excess(data):
        raise ImageError(f"has {excess}")
    with _hostile(), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ImageError(f"has {width} x {height} pixels, more than {MAX_PIXELS:,}")
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise ImageError(f"has {width} x {height} pixels, more than {MAX_ASPECT_RATIO} times as long as wide")
        with _large if width * height > LARGE_PIXELS else contextlib.nullcontext():
            image.load()
            turned = _turned(image).convert("RGB")
            scaled = turned.resize(scaled_size(*turned.size), Image.Resampling.BICUBIC)
            pixels: NDArray[np.uint8] = np.array(scaled)
    return pixels


def _turned(image: Image.Image) -> Image.Image:
    """Turns an image as its EXIF data says. `ImageOps.exif_transpose` would also decode all other data, and write it.

    That can take 30 times the bytes of the file.
    """
    turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    return image if turn is None else image.transpose(turn)


@contextlib.contextmanager
def _hostile() -> Iterator[None]:
    """Turns everything that Pillow raises for a malformed file into an `ImageError`."""
    try:
        yield
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"has more than {MAX_PIXELS:,} pixels") from None
    except Exception as error:  # its decoders raise almost everything for a malformed file
        raise ImageError(f"is no image, or damaged; the formats are {', '.join(FORMATS)}") from error
