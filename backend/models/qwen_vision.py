"""The image encoder of Qwen2.5-VL: a transformer over the patches of one image, and the projection of its tokens.

Most layers attend within windows, and a few to the whole image. Patches are sorted so that those of a window follow
each other, and windows of one size too: attention within windows is then one call per size, without padding. Computed
by torch alone, on any device. Source: transformers, `Qwen2_5_VisionTransformerPretrainedModel`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.models.vision_config import VisionConfig
from backend.models.weights import Checkpoint

NORM_EPS = 1e-6
ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class _Layer:
    norm1: Tensor
    qkv: tuple[Tensor, Tensor]  # weight and bias, as of all linear layers here
    proj: tuple[Tensor, Tensor]
    norm2: Tensor
    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Windows:
    """The order in which the patches of an image are computed."""

    tokens: Tensor  # [N]: the image's tokens, window by window
    sizes: list[tuple[int, int]]  # how many windows follow each other, and of how many patches each of them is


class QwenVisionEncoder:
    """Loaded image encoder. Its only state is its weights, so several threads may use it."""

    def __init__(self, config: VisionConfig, checkpoint: Checkpoint) -> None:
        """Takes the tensors `visual.*`. Raises `WeightsError` if one is missing or has another shape."""
        self._config = config
        self._dtype = checkpoint.dtype
        size, inner, take = config.hidden_size, config.intermediate_size, checkpoint.take

        def linear(name: str, out: int, ins: int) -> tuple[Tensor, Tensor]:
            return take(f"visual.{name}.weight", out, ins), take(f"visual.{name}.bias", out)

        patch = (size, 3, config.frames, config.patch_size, config.patch_size)
        # All frames of an image are equal, so the weights of the frames can be added. In float32, to lose nothing.
        weight = take("visual.patch_embed.proj.weight", *patch, dtype=torch.float32)
        self._patch_embedding = weight.sum(2).flatten(1)
        self._layers = []
        for i in range(config.num_layers):
            block = f"blocks.{i}"
            gate, up = (linear(f"{block}.mlp.{name}", inner, size) for name in ("gate_proj", "up_proj"))
            self._layers.append(
                _Layer(
                    norm1=take(f"visual.{block}.norm1.weight", size),
                    qkv=linear(f"{block}.attn.qkv", 3 * size, size),
                    proj=linear(f"{block}.attn.proj", size, size),
                    norm2=take(f"visual.{block}.norm2.weight", size),
                    gate_up=(torch.cat((gate[0], up[0])), torch.cat((gate[1], up[1]))),
                    down=linear(f"{block}.mlp.down_proj", size, inner),
                )
            )
        merged = size * config.merge_size**2
        self._merger_norm = take("visual.merger.ln_q.weight", size)
        self._merger = linear("merger.mlp.0", merged, merged), linear("merger.mlp.2", config.output_size, merged)
        dim = size // config.num_heads // 2
        device = self._patch_embedding.device
        self._frequencies = (1.0 / ROPE_THETA ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)).to(device)

    @torch.inference_mode()
    def __call__(self, pixels: Tensor, between_layers: Callable[[], None]) -> Tensor:
        """Encodes an image: pixels [H, W, 3] uint8, as `image_size` has scaled it -> [tokens, output_size].

        `between_layers` is called before each layer; what it raises ends the work.
        """
        config = self._config
        rows, columns = (side // config.token_side for side in pixels.shape[:2])
        windows = _windows(rows, columns, config.window_tokens, config.merge_size**2)
        order = windows.tokens.to(self._patch_embedding.device)
        patches = to_patches(pixels.to(order.device), config)
        hidden = F.linear(patches, self._patch_embedding).to(self._dtype)
        hidden = hidden.unflatten(0, (rows * columns, -1))[order].flatten(0, 1)
        rotation = self._rotation(rows, columns, order)
        whole = [(1, len(hidden))]
        for i, layer in enumerate(self._layers):
            between_layers()
            hidden = self._layer(layer, hidden, rotation, whole if i in config.full_layers else windows.sizes)
        hidden = self._norm(hidden, self._merger_norm).view(rows * columns, -1)
        first, last = self._merger
        merged = F.linear(F.gelu(F.linear(hidden, *first)), *last)
        return torch.empty_like(merged).index_copy_(0, order, merged)

    def _layer(
        self, layer: _Layer, hidden: Tensor, rotation: tuple[Tensor, Tensor], windows: list[tuple[int, int]]
    ) -> Tensor:
        qkv = F.linear(self._norm(hidden, layer.norm1), *layer.qkv)
        query, key, value = qkv.unflatten(-1, (3, self._config.num_heads, -1)).unbind(1)  # [patches, heads, dim]
        query, key = _rotated(query, *rotation), _rotated(key, *rotation)
        attended, begin = [], 0
        for count, length in windows:
            end = begin + count * length
            parts = (part[begin:end].unflatten(0, (count, length)).transpose(1, 2) for part in (query, key, value))
            attended.append(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(0, 1))
            begin = end
        hidden = hidden + F.linear(torch.cat(attended).flatten(1), *layer.proj)
        gate, up = F.linear(self._norm(hidden, layer.norm2), *layer.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, *layer.down)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, NORM_EPS)

    def _rotation(self, rows: int, columns: int, order: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all patches in their order, [patches, 1, dim / 2] float32: by row, then by column."""
        merge = self._config.merge_size
        row, column = torch.meshgrid(
            torch.arange(rows * merge, device=order.device),
            torch.arange(columns * merge, device=order.device),
            indexing="ij",
        )
        axes = (_by_token(axis[..., None], merge)[order].flatten() for axis in (row, column))
        angles = torch.cat([axis[:, None].float() * self._frequencies for axis in axes], dim=-1)[:, None]
        return angles.cos(), angles.sin()


def image_size(width: int, height: int, config: VisionConfig) -> tuple[int, int]:
    """The width and height to which an image is scaled: multiples of a token's side, within the bounds of pixels.

    Source: transformers, `smart_resize`.
    """
    side = config.token_side
    scaled = round(height / side) * side, round(width / side) * side
    pixels = scaled[0] * scaled[1]
    if pixels > config.max_pixels:
        factor = math.sqrt((height * width) / config.max_pixels)
        scaled = max(side, int(height / factor / side) * side), max(side, int(width / factor / side) * side)
    elif pixels < config.min_pixels:
        factor = math.sqrt(config.min_pixels / (height * width))
        scaled = math.ceil(height * factor / side) * side, math.ceil(width * factor / side) * side
    return scaled[1], scaled[0]


def to_patches(pixels: Tensor, config: VisionConfig) -> Tensor:
    """The normalised patches of an image, token by token: [H, W, 3] uint8 -> [patches, 3 * patch_size**2] float32."""
    mean, std = (torch.tensor(values, device=pixels.device) for values in (config.mean, config.std))
    normalised = ((pixels.float() * (1 / 255) - mean) / std).permute(2, 0, 1)  # [3, H, W]
    size = config.patch_size
    patches = (
        normalised.unflatten(1, (-1, size)).unflatten(3, (-1, size)).permute(1, 3, 0, 2, 4)
    )  # [rows, columns, ...]
    return _by_token(patches.flatten(2), config.merge_size).flatten(0, 1)


def _by_token(patches: Tensor, merge_size: int) -> Tensor:
    """Sorts patches by token: [rows, columns, n] -> [tokens, merge_size**2, n]."""
    blocks: Tensor = patches.unflatten(1, (-1, merge_size)).unflatten(0, (-1, merge_size))
    return blocks.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _windows(rows: int, columns: int, side: int, patches_per_token: int) -> _Windows:
    """Divides the tokens of an image into windows of `side` by `side` tokens, from its first row and column."""
    index = torch.arange(rows * columns).view(rows, columns)
    by_size: defaultdict[int, list[Tensor]] = defaultdict(list)
    for band in index.split(side):
        for window in band.split(side, dim=1):
            by_size[window.numel()].append(window.flatten())
    tokens = torch.cat([window for windows in by_size.values() for window in windows])
    return _Windows(tokens, [(len(windows), size * patches_per_token) for size, windows in by_size.items()])


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves of each head, in float32: [patches, heads, dim]."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
