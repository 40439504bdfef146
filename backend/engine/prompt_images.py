"""The images of a prompt: where their tokens are, at which positions, and which of them can be computed. No tensors.

An image takes `rows * columns` tokens of the prompt, row by row. Their input embeddings come from the image encoder
(image_encoder.py), which runs beside the steps, so a step computes a prompt only up to the first image that is not
encoded yet. Attention is causal within an image, as between words. So chunks and cached prefixes may end anywhere.

Models that read images rotate queries and keys by three positions of a token: its time, row and column. All tokens of
an image have the same time, and the text after an image of r rows and c columns begins max(r, c) positions after it.
Source: transformers, `Qwen2_5_VLModel.get_rope_index`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Image(Protocol):
    """An image as the engine sees it. Belongs to the engine's thread once its request is submitted."""

    digest: bytes  # of its content: images with equal digests have equal embeddings
    rows: int  # of tokens
    columns: int
    has_failed: bool  # it cannot be encoded, because of an error in the image encoder

    def is_ready(self, priority: int, seconds: float = 0.0) -> bool:
        """Whether its embeddings are there. If not, has it encoded, and waits for at most `seconds`.

        The image of the request with the lowest `priority` is encoded first.
        """
        ...

    def release(self) -> None:
        """Drops the embeddings. `is_ready` makes them again, if the request is preempted and needs them once more."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image whose tokens begin at `start`. `offset`: what is added to an index there to get the position."""

    image: Image
    start: int
    offset: int

    @property
    def end(self) -> int:
        return self.start + self.image.rows * self.image.columns

    @property
    def offset_after(self) -> int:
        return self.offset + max(self.image.rows, self.image.columns) - (self.end - self.start)


class PromptImages:
    """The images of one prompt, in their order. A token of text follows each of them."""

    def __init__(self, images: Sequence[tuple[Image, int]]) -> None:
        """`images`: each with the index of its first token."""
        self.images: list[PlacedImage] = []
        offset = 0
        for image, start in images:
            self.images.append(placed := PlacedImage(image, start, offset))
            offset = placed.offset_after

    @property
    def end(self) -> int:
        """The index after the last token of an image."""
        return self.images[-1].end

    @property
    def error(self) -> str | None:
        """Why the prompt cannot be computed, in words for the client. None if it can."""
        number = next((i for i, placed in enumerate(self.images, 1) if placed.image.has_failed), 0)
        return f"image {number} of the request could not be encoded, because of an internal error" if number else None

    def overlapping(self, start: int, end: int) -> list[PlacedImage]:
        """The images that have tokens in this range."""
        return [each for each in self.images if each.start < end and each.end > start]

    def num_computable(self, start: int, num_tokens: int, priority: int, seconds: float = 0.0) -> int:
        """How many of the `num_tokens` from `start` on can be computed. Has the first missing image encoded.

        Waits for that image for at most `seconds`.
        """
        for placed in self.overlapping(start, start + num_tokens):
            if not placed.image.is_ready(priority, seconds):
                return max(0, placed.start - start)
        return num_tokens

    def release(self, num_computed_tokens: int) -> None:
        """Drops the embeddings of all images whose tokens have been computed."""
        for placed in self.images:
            if placed.end <= num_computed_tokens:
                placed.image.release()

    def position_offset(self, index: int) -> int:
        """What is added to the index of a token of text, of the prompt or the output, to get its position."""
        return next((each.offset_after for each in reversed(self.images) if each.end <= index), 0)

    def positions(self, start: int, end: int) -> NDArray[np.int64]:
        """The times, rows and columns of the tokens in a range: [3, end - start]."""
        indexes = np.arange(start, end)
        positions = np.tile(indexes + self.position_offset(start), (3, 1))
        for placed in self.overlapping(start, end):
            positions[:, placed.end - start :] = indexes[placed.end - start :] + placed.offset_after
            covered = slice(max(0, placed.start - start), placed.end - start)
            rows, columns = np.divmod(indexes[covered] - placed.start, placed.image.columns)
            positions[:, covered] = placed.start + placed.offset
            positions[1, covered] += rows
            positions[2, covered] += columns
        return positions

    def hashed(self, start: int, end: int) -> bytes:
        """What a block's hash covers of images: the digest of each that has tokens in it, and where it begins."""
        return b"".join(
            each.image.digest + struct.pack("<q", each.start - start) for each in self.overlapping(start, end)
        )
