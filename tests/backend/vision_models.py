"""A tiny random Qwen2.5-VL, made with transformers, and prompts with images for it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from backend.engine.engine import Engine
from backend.engine.prompt_images import PromptImages
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from tests.backend.checkpoints import SHAPE

pytest.importorskip("PIL", reason="the package pillow is not installed")
from PIL import Image

VISION_START, VISION_END, IMAGE_TOKEN, VIDEO_TOKEN = 251, 252, 253, 254
PIXELS: dict[str, Any] = {"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 60}
CONFIG: dict[str, Any] = {
    "text_config": {
        **SHAPE, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0},
    },
    "vision_config": {
        "depth": 3, "hidden_size": 64, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
        "window_size": 84, "fullatt_block_indexes": [1],
    },
    "image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END, "tie_word_embeddings": False,
}  # fmt: skip


def build(directory: Path, **changes: Any) -> PreTrainedModel:
    """Saves the checkpoint in float32, and returns the model in float64."""
    torch.manual_seed(7)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model("qwen2_5_vl", **CONFIG | changes)
    )
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_q" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif name.endswith(("lm_head.weight", "embed_tokens.weight")):
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.3 if "visual" not in name else 0.12)
    model.save_pretrained(directory)
    Qwen2VLImageProcessorPil(**PIXELS).save_pretrained(directory)
    return model.double()


def picture(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """A random RGB image with structure at several scales."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (max(2, height // 9), max(2, width // 7), 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


class Prompt:
    """A prompt of token ids and images, for the engine and for transformers."""

    def __init__(self, parts: Sequence[int | NDArray[np.uint8]]) -> None:
        """`parts`: token ids, and images whose sides are multiples of 28 pixels, so that nothing is scaled."""
        self.token_ids: list[int] = []
        self.images: list[tuple[NDArray[np.uint8], int]] = []
        for part in parts:
            if isinstance(part, int):
                self.token_ids.append(part)
                continue
            self.token_ids.append(VISION_START)
            self.images.append((part, len(self.token_ids)))
            self.token_ids += [IMAGE_TOKEN] * (part.shape[0] * part.shape[1] // 28**2)
            self.token_ids.append(VISION_END)

    def request(self, engine: Engine, name: str, sampling: SamplingParams, **fields: Any) -> Request:
        encoder, images = engine.images, None
        if self.images:
            assert encoder
            images = PromptImages(
                [(encoder.image(each, sha256(each.tobytes()).digest()), start) for each, start in self.images]
            )
        return Request(name, self.token_ids, sampling, images=images, **fields)

    def logits(self, model: PreTrainedModel, output: Sequence[int] = ()) -> torch.Tensor:
        """transformers' logits after each token: [tokens, vocabulary]."""
        pictures = [Image.fromarray(each) for each, _ in self.images]
        return logits_of(model, [*self.token_ids, *output], pictures)


def logits_of(model: PreTrainedModel, token_ids: Sequence[int], images: Sequence[Image.Image]) -> torch.Tensor:
    """transformers' logits after each token of a prompt with images: [tokens, vocabulary]."""
    ids = torch.tensor([token_ids])
    inputs: dict[str, Any] = {}
    if images:
        processed = Qwen2VLImageProcessorPil(**PIXELS)(list(images))
        inputs["pixel_values"] = torch.from_numpy(np.asarray(processed["pixel_values"])).to(model.dtype)
        inputs["image_grid_thw"] = torch.from_numpy(np.asarray(processed["image_grid_thw"]))
    types = (ids == model.config.image_token_id).int()
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, mm_token_type_ids=types, **inputs).logits[0]
    return logits
