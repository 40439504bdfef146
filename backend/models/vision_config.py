"""Settings of a model's image encoder and of how images are prepared for it, from the files of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.engine.errors import UnsupportedModel
from backend.model_files.base import ModelFiles

# The defaults of transformers' Qwen2VLImageProcessor, for fields that preprocessor_config.json omits.
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
BICUBIC = 3  # Pillow's number
_ALWAYS: Mapping[str, Any] = {
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": BICUBIC,
}  # fmt: skip
_RESCALE_FACTOR = 1 / 255


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The image encoder of Qwen2.5-VL. A token is a square of `merge_size` by `merge_size` patches."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int  # pixels of a side
    merge_size: int  # patches of a side of a token
    frames: int  # that a patch has in the checkpoint; those of an image are equal
    window_tokens: int  # tokens of a side of the windows to which most layers' attention is limited
    full_layers: tuple[int, ...]  # the layers with attention to the whole image
    output_size: int  # the language model's hidden size
    image_token_id: int  # stands for one token of an image in a prompt
    rope_sections: tuple[int, ...]  # how many frequencies rotate by time, row and column
    min_pixels: int  # to which an image is scaled
    max_pixels: int
    mean: tuple[float, ...]  # of the channels red, green and blue, from 0 to 1
    std: tuple[float, ...]

    @property
    def token_side(self) -> int:
        """Pixels of a side of the square that a token stands for."""
        return self.patch_size * self.merge_size


def read_vision(files: ModelFiles) -> VisionConfig | None:
    """Reads the settings. None if the model, or the engine for this model, reads text alone.

    Raises `UnsupportedModel` for a setting that is not implemented, and KeyError for a missing field.
    """
    settings = files.image_settings()
    if settings is None:
        return None
    config, processor = settings
    vision, text = config["vision_config"], config.get("text_config") or config
    if (activation := vision.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModel(f"vision_config.hidden_act {activation!r} is not supported, only 'silu'")
    patch_size, merge_size = vision.get("patch_size", 14), vision.get("spatial_merge_size", 2)
    frames = vision.get("temporal_patch_size", 2)
    _check_processor(processor, {"patch_size": patch_size, "merge_size": merge_size, "temporal_patch_size": frames})
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    size = processor.get("size") or {}
    return VisionConfig(
        hidden_size=vision["hidden_size"],
        intermediate_size=vision["intermediate_size"],
        num_layers=vision["depth"],
        num_heads=vision["num_heads"],
        patch_size=patch_size,
        merge_size=merge_size,
        frames=frames,
        window_tokens=vision.get("window_size", 112) // merge_size // patch_size,
        full_layers=tuple(vision["fullatt_block_indexes"]),
        output_size=vision["out_hidden_size"],
        image_token_id=config["image_token_id"],
        rope_sections=tuple(rope.get("mrope_section") or (16, 24, 24)),
        min_pixels=processor.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS,
        max_pixels=processor.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS,
        mean=tuple(processor.get("image_mean") or CLIP_MEAN),
        std=tuple(processor.get("image_std") or CLIP_STD),
    )


def _check_processor(processor: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    for name, value in {**_ALWAYS, **sizes}.items():
        if processor.get(name, value) != value:
            raise UnsupportedModel(f"preprocessor_config.json: {name} {processor[name]!r} is not supported")
    if abs(processor.get("rescale_factor", _RESCALE_FACTOR) - _RESCALE_FACTOR) > 1e-9:
        raise UnsupportedModel("preprocessor_config.json: rescale_factor is supported as 1/255 only")
