"""Which rows of a step are tokens of images: their input embeddings, and the positions of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.attention.uploads import upload
from backend.engine.image_encoder import EncoderImage
from backend.engine.plan import ScheduledRequest


def has_image_tokens(scheduled: ScheduledRequest) -> bool:
    """Whether the step computes tokens of an image for this request."""
    images = scheduled.request.images
    return images is not None and bool(images.overlapping(scheduled.start, scheduled.end))


class StepImages(NamedTuple):
    """The rows of a step that are tokens of images."""

    rows: Tensor  # [M] int64: their indexes among the T rows
    embeddings: Tensor  # [M, hidden_size]
    positions: Tensor  # [3, T] int64: of all rows

    @staticmethod
    def of(plan: Sequence[ScheduledRequest], positions: NDArray[np.int64], device: torch.device) -> StepImages | None:
        """None if the plan computes no token of an image. positions: [T], of tokens of text."""
        if not any(map(has_image_tokens, plan)):
            return None
        of_axes = np.tile(positions, (3, 1))
        rows, embeddings, begin = [], [], 0
        for scheduled in plan:
            if (images := scheduled.request.images) and has_image_tokens(scheduled):
                part = slice(begin, begin + scheduled.num_tokens)
                of_axes[:, part] = images.positions(scheduled.start, scheduled.end)
                for placed in images.overlapping(scheduled.start, scheduled.end):
                    first, last = max(scheduled.start, placed.start), min(scheduled.end, placed.end)
                    rows.append(np.arange(first, last) - scheduled.start + begin)
                    image = placed.image
                    assert isinstance(image, EncoderImage)
                    embeddings.append(image.embeddings[first - placed.start : last - placed.start])
            begin += scheduled.num_tokens
        return StepImages(
            upload(torch.from_numpy(np.concatenate(rows)), device),
            torch.cat(embeddings),
            upload(torch.from_numpy(of_axes), device),
        )

    def inserted(self, embedded: Tensor) -> Tensor:
        """The input embeddings of the step, [T, hidden_size], with those of images in their rows."""
        return embedded.index_copy(0, self.rows, self.embeddings)
