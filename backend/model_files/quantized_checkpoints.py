"""Quantized checkpoints in transformers' layout: FP8, int8, AWQ, GPTQ and compressed-tensors, read as plain weights.

config.json names the method, `quant_method`. The checkpoint has one weight as several tensors, whose names have a
common stem: `q_proj.qweight`, `q_proj.scales` and `q_proj.qzeros` for `q_proj.weight`. `plain_readers` replaces the
readers of these tensors by one reader of the plain weight, in float32, which is computed when the weight is read.
Weights of modules that the checkpoint does not quantize are left as they are.

The values are exactly those that the checkpoint stores. A checkpoint that also prescribes how to round activations is
computed without this rounding. Layouts:

* `fp8` (DeepSeek's and Qwen's): e4m3 `weight` times `weight_scale_inv`, one scale per block.
* `compressed-tensors`, `fbgemm_fp8` and `modelopt`: `weight` in e4m3 or int8 times `weight_scale`, one scale per
  tensor, output or block; or `weight_packed` in int32 with one scale per group of inputs.
* `gptq`: `qweight` [in / n, out], n inputs to an int32; `qzeros` [groups, out / n], one less than the zero point;
  `g_idx` [in], the group of each input.
* `awq`: `qweight` [in, out / 8] and `qzeros` [groups, out / 8], with the eight outputs of an int32 in their own order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from backend.engine.errors import UnsupportedModel, WeightsError
from backend.model_files.base import TensorReaders

SCALED, GPTQ, AWQ = ("compressed-tensors", "fbgemm_fp8", "fp8", "modelopt"), "gptq", "awq"
METHODS = (*SCALED, GPTQ, AWQ)
WORD_BITS = 32
PACKED_BITS = (2, 4, 8)  # in words of which every number is whole
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each four bits of a word, lowest bits first

# Tensors that only describe how a weight or its inputs are quantized.
_HELPERS = (
    "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape",
    "weight_g_idx", "weight_scale_2", "input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale",
    "q_scale", "input_scale_ub",
)  # fmt: skip


def check_method(quantization: Mapping[str, Any]) -> None:
    """Raises `UnsupportedModel` if config.json's `quantization_config` describes a form that cannot be read."""
    method = quantization.get("quant_method")
    if method not in METHODS:
        raise UnsupportedModel(
            f"quantization_config.quant_method {method!r} is not supported, only {', '.join(METHODS)}"
        )
    if method in (AWQ, GPTQ) and (bits := quantization.get("bits", 4)) not in PACKED_BITS[1 if method == AWQ else 0 :]:
        raise UnsupportedModel(f"quantization_config.bits {bits} is not supported")
    if method == AWQ and (version := str(quantization.get("version", "gemm")).lower()) != "gemm":
        raise UnsupportedModel(f"quantization_config.version {version!r} is not supported, only 'gemm'")
    if method == "modelopt" and (algorithm := quantization.get("quant_algo", "FP8")) != "FP8":
        raise UnsupportedModel(f"quantization_config.quant_algo {algorithm!r} is not supported, only 'FP8'")
    if quantization.get("format") in ("nvfp4-pack-quantized", "marlin-24", "sparse-24-bitmask", "sparse-bitmask"):
        raise UnsupportedModel(f"quantization_config.format {quantization['format']!r} is not supported")


def plain_readers(readers: TensorReaders, quantization: Mapping[str, Any]) -> TensorReaders:
    """Returns readers of plain weights in place of those of quantized ones. Readers raise `WeightsError`."""
    method = quantization.get("quant_method")
    if method not in METHODS:
        return readers
    plain: TensorReaders = {}
    for name, read in readers.items():
        stem, _, kind = name.rpartition(".")
        if kind in _HELPERS:
            continue
        if kind in ("qweight", "weight_packed"):
            plain[f"{stem}.weight"] = _Weight(stem, kind, readers, quantization)
        elif kind == "weight" and any(f"{stem}.{scale}" in readers for scale in ("weight_scale", "weight_scale_inv")):
            plain[name] = _Weight(stem, kind, readers, quantization)
        else:
            plain[name] = read
    return plain


def plain_shapes(shapes: Mapping[str, Sequence[int]], quantization: Mapping[str, Any]) -> dict[str, list[int]]:
    """Returns the shapes of plain weights, transposed or not, for a checkpoint whose tensors have these shapes."""
    if quantization.get("quant_method") not in METHODS:
        return {name: list(shape) for name, shape in shapes.items()}
    per_word = WORD_BITS // _bits(quantization)
    plain: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        kind = name.rpartition(".")[2]
        if kind not in _HELPERS:
            plain[name] = [*shape[:-1], shape[-1] * per_word] if kind in ("qweight", "weight_packed") else list(shape)
    return plain


def _bits(quantization: Mapping[str, Any]) -> int:
    """Returns the bits of a packed number. compressed-tensors names them for each group of modules."""
    groups = quantization.get("config_groups")
    if isinstance(groups, Mapping):
        weights = [group.get("weights") or {} for group in groups.values() if isinstance(group, Mapping)]
        return next((int(given["num_bits"]) for given in weights if "num_bits" in given), 4)
    return int(quantization.get("bits", 4))


class _Weight:
    """Reader of one plain weight, made of the tensors whose names begin with `stem`."""

    def __init__(self, stem: str, kind: str, readers: TensorReaders, quantization: Mapping[str, Any]) -> None:
        self._stem = stem
        self._kind = kind
        self._readers = readers
        self._quantization = quantization

    def __call__(self) -> Tensor:
        """Returns the weight [out, in] in float32. Raises `WeightsError`."""
        try:
            if self._kind == "weight":
                return self._scaled()
            if self._kind == "weight_packed":
                return self._compressed()
            return self._awq() if self._quantization.get("quant_method") == AWQ else self._gptq()
        except (RuntimeError, IndexError, ValueError) as error:
            raise WeightsError(f"the quantized weight {self._stem} cannot be read: {error}") from error

    def _scaled(self) -> Tensor:
        weight = self._tensor("weight").float()
        scale = self._tensor("weight_scale" if self._has("weight_scale") else "weight_scale_inv").float()
        if scale.numel() == 1:
            return weight * scale.reshape(())
        if scale.dim() == 1:
            return weight * scale[:, None]
        rows, columns = self._block(weight, scale)
        spread = scale.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)
        return weight * spread[:, : weight.shape[1]]

    def _block(self, weight: Tensor, scale: Tensor) -> tuple[int, int]:
        """Returns the rows and columns of a block with one scale. config.json or else the shapes tell them."""
        given = self._quantization.get("weight_block_size")
        if given and self._has("weight_scale_inv"):
            return int(given[0]), int(given[1])
        return -(-weight.shape[0] // scale.shape[0]), -(-weight.shape[1] // scale.shape[1])

    def _compressed(self) -> Tensor:
        bits = _bits(self._quantization)
        out_features, in_features = (int(n) for n in self._tensor("weight_shape"))
        values = unpacked(self._tensor("weight_packed"), bits)[:, :in_features] - (1 << (bits - 1))
        scale = self._tensor("weight_scale").float()
        zeros = torch.zeros_like(scale)
        if self._has("weight_zero_point"):
            stored = self._tensor("weight_zero_point")
            if stored.dtype == torch.int32:  # packed along the outputs
                zeros = unpacked(stored.t(), bits).t()[:out_features].float() - (1 << (bits - 1))
            else:
                zeros = stored.float()
        groups = self._groups("weight_g_idx", in_features, scale.shape[1])
        return (values.float() - zeros[:, groups]) * scale[:, groups]

    def _gptq(self) -> Tensor:
        bits = _bits(self._quantization)
        values = unpacked(self._tensor("qweight").t(), bits)  # [out, in]
        scale = self._tensor("scales").float().t()  # [out, groups]
        stored = unpacked(self._tensor("qzeros"), bits).t()
        # Version 1 of the format stores zero points minus one, and the sum wraps around as the number's bits do.
        offset = 0 if self._quantization.get("checkpoint_format") == "gptq_v2" else 1
        zeros = ((stored + offset) & ((1 << bits) - 1)).float() if offset else stored.float()
        groups = self._groups("g_idx", values.shape[1], scale.shape[1])
        return (values.float() - zeros[:, groups]) * scale[:, groups]

    def _awq(self) -> Tensor:
        bits = _bits(self._quantization)
        values, zeros = (unpacked(self._tensor(kind), bits, AWQ_ORDER) for kind in ("qweight", "qzeros"))
        scale = self._tensor("scales").float()  # [groups, out]
        groups = self._groups("g_idx", values.shape[0], scale.shape[0])
        return ((values - zeros[groups]).float() * scale[groups]).t().contiguous()

    def _groups(self, kind: str, num_inputs: int, num_groups: int) -> Tensor:
        """Returns the group of each input."""
        if self._has(kind):
            return self._tensor(kind).long()
        return torch.arange(num_inputs) // -(-num_inputs // num_groups)

    def _has(self, kind: str) -> bool:
        return f"{self._stem}.{kind}" in self._readers

    def _tensor(self, kind: str) -> Tensor:
        if not self._has(kind):
            raise WeightsError(f"tensor {self._stem}.{kind} is missing")
        return cast(Tensor, self._readers[f"{self._stem}.{kind}"]())


def unpacked(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Unpacks the numbers of each word along the last dimension: [..., n] int32 -> [..., n * 32 / bits] int32.

    The lowest bits are the first number, or number `order[0]` of the word's numbers.
    """
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
    if order is not None:
        places = sorted(range(len(order)), key=order.__getitem__)
        numbers = numbers[..., places]
    return numbers.flatten(-2)
