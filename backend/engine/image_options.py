"""Applies the options for images to a model's settings, and chooses how images are encoded."""

from __future__ import annotations

from dataclasses import replace

import torch

from backend.engine.errors import ConfigError
from backend.models.config import ModelConfig

IMAGE_CACHE_BYTES = 256 * 2**20  # of embeddings that no request needs at the moment (image_encoder.py)


def with_image_options(
    model: ModelConfig, reads_images: bool, min_pixels: int | None, max_pixels: int | None
) -> ModelConfig:
    """Returns the model's settings with these bounds of an image's size, or without the image encoder.

    None keeps a bound. Raises `ConfigError` for bounds that no image can have, or that the model does not need.
    """
    vision = model.vision if reads_images else None
    if vision is None:
        if min_pixels or max_pixels:
            raise ConfigError("min_pixels and max_pixels need a model that reads images", param="max_image_pixels")
        return replace(model, vision=None)
    vision = replace(vision, min_pixels=min_pixels or vision.min_pixels, max_pixels=max_pixels or vision.max_pixels)
    smallest = vision.token_side**2
    if not max(vision.min_pixels, smallest) <= vision.max_pixels:
        raise ConfigError(
            f"an image cannot have from {vision.min_pixels} to {vision.max_pixels} pixels: a token has {smallest}",
            param="max_image_pixels",
        )
    return replace(model, vision=vision)


def encoder_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The model's dtype, but float32 on a CPU on which torch emulates matrix multiplications of the dtype."""
    if device.type != "cpu" or (dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()):
        return dtype
    return torch.float32
