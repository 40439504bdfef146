"""Reads the header of a GGUF file: metadata, and the position and type of each tensor.

Specification of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

The `gguf` package provides types, sizes and formulas. Its reader creates an array for every string, which takes seconds
for a vocabulary of 150,000 tokens. The reader in this module takes a fraction of a second, and its errors say where a
file is malformed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from mmap import mmap
from typing import Any, TypeVar, cast

from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 had other field lengths and was in use for two months of 2023
MAX_DIMENSIONS = 4  # ggml's limit
# Ollama used this type number for MXFP4 before ggml had one. Adjacent numbers share a byte. In ggml, the number meant
# Q4_2, a type that was removed before GGUF existed.
OLLAMA_MXFP4 = 4
SCALARS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.FLOAT32: "f", GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q", GGUFValueType.FLOAT64: "d",
}  # fmt: skip
UINT64 = struct.Struct("<Q")

T = TypeVar("T", int, float, str, bool)


class MalformedGguf(Exception):
    """A GGUF file is truncated or its metadata are inconsistent."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Position, shape and type of one tensor in a GGUF file."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first, as in torch; the file has the reverse order
    kind: GGMLQuantizationType
    start: int  # offset in the file, in bytes
    num_bytes: int
    adjacent_pairs: bool = False  # whether the type in the file is `OLLAMA_MXFP4`


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensor list of a GGUF file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def get(self, key: str, default: T, *, above: float | None = None) -> T:
        """Returns the value of a metadata key, or the default if the key is missing.

        Raises `MalformedGguf` for a value of another type than the default's and for a number not above `above`.
        """
        value = self.metadata.get(key, default)
        expected_type = type(default)
        if expected_type is float and type(value) is int:
            value = float(value)
        if type(value) is not expected_type:
            raise MalformedGguf(f"{key} is {value!r}, not of type {expected_type.__name__}")
        if above is not None and isinstance(value, int | float) and not value > above:
            raise MalformedGguf(f"{key} is {value!r}, not above {above:g}")
        return value

    def items(self, key: str, expected_type: type[T]) -> list[T]:
        """Returns an array of the metadata, empty if the key is missing.

        Raises `MalformedGguf` for items of another type.
        """
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or any(type(item) is not expected_type for item in value):
            raise MalformedGguf(f"{key} is not a list of type {expected_type.__name__}")
        return cast("list[T]", value)

    def __contains__(self, key: str) -> bool:
        return key in self.metadata


def read_header(data: mmap) -> GgufHeader:
    """Reads the header and checks that every tensor lies within the file. Raises `MalformedGguf`."""
    cursor = _Cursor(data)
    if cursor.take(len(MAGIC)) != MAGIC:
        raise MalformedGguf("it does not start with GGUF")
    version = cursor.number("I")
    if version not in VERSIONS:
        raise MalformedGguf(f"its version is {version}, but only {' and '.join(map(str, VERSIONS))} are supported")
    num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(key)
    # The cursor checks every length, so a wrong count raises an error at the end of the file.
    relative = [cursor.tensor() for _ in range(num_tensors)]  # offsets are relative to the tensor data
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise MalformedGguf(f"general.alignment is {alignment!r}")
    base = -(-cursor.position // alignment) * alignment
    tensors = {}
    for info in relative:
        end = base + info.start + info.num_bytes
        if end > len(data):
            raise MalformedGguf(f"it is truncated: tensor {info.name} ends at byte {end}, the file at {len(data)}")
        if info.name in tensors:
            raise MalformedGguf(f"tensor {info.name} is duplicated")
        tensors[info.name] = replace(info, start=base + info.start)
    return GgufHeader(metadata, tensors)


class _Cursor:
    """Reads the values of a file one after another. Raises `MalformedGguf` at the end of the file."""

    def __init__(self, data: mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self._data):
            raise MalformedGguf(f"it is truncated: byte {end} is missing, the file has {len(self._data)}")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        text = self.take(self.number("Q"))
        # A token can be a part of a character, but the supported vocabularies escape such bytes.
        return text.decode("utf-8", errors="replace")

    def value(self, key: str) -> Any:
        kind = self._kind(key)
        if kind is not GGUFValueType.ARRAY:
            return self.string() if kind is GGUFValueType.STRING else self.number(SCALARS[kind])
        item, count = self._kind(key), self.number("Q")
        if item is GGUFValueType.ARRAY:
            raise MalformedGguf(f"{key} is an array of arrays")
        if item is not GGUFValueType.STRING:
            size = struct.calcsize(f"<{SCALARS[item]}")
            return list(struct.unpack(f"<{count}{SCALARS[item]}", self.take(size * count)))
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """As `count` times `string`, but several times faster: vocabularies have 100,000 tokens and more."""
        data, size, end, strings = self._data, len(self._data), self.position, list[str]()
        for _ in range(count):
            start = end + 8
            end = start + UINT64.unpack_from(data, end)[0] if start <= size else start
            if end > size:
                raise MalformedGguf(f"it is truncated: byte {end} is missing, the file has {size}")
            strings.append(data[start:end].decode("utf-8", errors="replace"))
        self.position = end
        return strings

    def tensor(self) -> TensorInfo:
        name, num_dimensions = self.string(), self.number("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise MalformedGguf(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(num_dimensions))[::-1]
        if 0 in shape:
            raise MalformedGguf(f"tensor {name} is empty")
        code = self.number("I")
        adjacent_pairs = code == OLLAMA_MXFP4
        try:
            kind = GGMLQuantizationType.MXFP4 if adjacent_pairs else GGMLQuantizationType(code)
        except ValueError as error:
            raise MalformedGguf(f"tensor {name} has the unknown quantization type {code}") from error
        return TensorInfo(name, shape, kind, self.number("Q"), _num_bytes(name, shape, kind), adjacent_pairs)

    def _kind(self, key: str) -> GGUFValueType:
        code = self.number("I")
        try:
            return GGUFValueType(code)
        except ValueError as error:
            raise MalformedGguf(f"{key} has the unknown type {code}") from error


def _num_bytes(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block_length, block_bytes = GGML_QUANT_SIZES[kind]
    if shape and shape[-1] % block_length:
        raise MalformedGguf(
            f"tensor {name} has rows of {shape[-1]}, not a multiple of {kind.name}'s block of {block_length}"
        )
    return math.prod(shape) // block_length * block_bytes
