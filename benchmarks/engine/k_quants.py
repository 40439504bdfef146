"""Quantizes weights to Q4_K and Q6_K, which the `gguf` package can only read. llama.cpp searches for better scales.

Layout of the blocks: `block_q4_K` and `block_q6_K` of ggml, 256 weights each.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 256


def quantize(values: Array, kind: Kind) -> Array:
    """Returns a matrix [outs, ins] in this type as [outs, bytes of a row]."""
    if kind not in (Kind.Q4_K, Kind.Q6_K):
        return np.asarray(gguf.quantize(values, kind))
    blocks = values.reshape(-1, BLOCK).astype(np.float32)
    return (_q4_k if kind is Kind.Q4_K else _q6_k)(blocks).reshape(len(values), -1)


def _q4_k(blocks: Array) -> Array:
    groups = blocks.reshape(-1, 8, 32)
    least = np.minimum(groups.min(-1), 0)
    scales, factor = _in_integers((groups.max(-1) - least) / 15, 63)
    minima, factor_of_minima = _in_integers(-least, 63)
    step, low = _usable(scales * factor), minima * factor_of_minima
    codes = np.clip(np.rint((groups + low[..., None]) / step[..., None]), 0, 15).astype(np.uint8)
    pairs = codes.reshape(-1, 4, 2, 32)
    quarters = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    scales, minima = scales.astype(np.uint8), minima.astype(np.uint8)
    low_half = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minima)]
    high_half = (scales[:, 4:] & 15) | minima[:, 4:] << 4
    return np.concatenate((_halves(factor), _halves(factor_of_minima), *low_half, high_half, quarters), -1)


def _q6_k(blocks: Array) -> Array:
    groups = blocks.reshape(-1, 16, 16)
    scales, factor = _in_integers(np.abs(groups).max(-1) / 31, 127)
    step = _usable(scales * factor)
    codes = (np.clip(np.rint(groups / step[..., None]), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4).reshape(-1, 128)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce(codes >> 4 << shifts, axis=2).reshape(-1, 64)
    return np.concatenate((low, high, scales.astype(np.int8).view(np.uint8), _halves(factor)), -1)


def _in_integers(numbers: Array, most: int) -> tuple[Array, Array]:
    """Returns numbers [blocks, groups] from 0 on as integers up to `most`, and each block's factor [blocks, 1]."""
    factor = (numbers.max(-1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    return np.clip(np.rint(numbers / _usable(factor)), 0, most), factor


def _usable(divisor: Array) -> Array:
    return np.where(divisor > 0, divisor, 1)


def _halves(factor: Array) -> Array:
    return factor.astype(np.float16).view(np.uint8)
