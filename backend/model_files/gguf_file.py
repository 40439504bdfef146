"""Reader of a model in GGUF format. If llama.cpp has split the model into several files, the first one is opened.

`gguf_header.py` reads the metadata, `gguf_architectures.py` translates names, and `gguf_tokenizer.py` builds the
tokenizer. Files are memory-mapped, and a tensor is read when its reader is called. Matrices in MXFP4 and the types of
gguf_blocks.py stay quantized; the latter are views of the mapping, so that nothing is copied before the kernels pack
them, and a second start reads from the page cache. Other tensors are dequantized.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from tokenizers import Tokenizer
from torch import Tensor

from backend.engine.errors import UnsupportedModel, WeightsError
from backend.model_files.base import ModelFiles, TensorReaders, bytes_of_weights
from backend.model_files.directory import DEFAULT_TEMPLATE, TEMPLATE_FILE
from backend.model_files.gguf_architectures import (
    OUTER_MODULES,
    PARAMETERS,
    GgufArchitecture,
    architecture_of,
    common_fields,
    long_rope,
)
from backend.model_files.gguf_blocks import KINDS, BlockRows, BlockTensor, bytes_in_memory
from backend.model_files.gguf_header import GgufHeader, MalformedGguf, TensorInfo, read_header
from backend.model_files.gguf_tokenizer import end_token_ids, make_tokenizer, special_tokens
from backend.model_files.mxfp4 import GROUP as MXFP4_GROUP
from backend.model_files.mxfp4 import Mxfp4Tensor
from backend.model_files.quantized_tensor import StoredTensor, dequantized

SPLIT_NAME = re.compile(r"(.*)-00001-of-(\d{5})\.gguf")
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+(?:\.weight|\.bias)?)")
# Factors that divide the rotary frequencies of Llama 3 and Phi-3. In transformers they are in config.json.
FREQUENCIES, SHORT_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
DERIVED = (FREQUENCIES, SHORT_FACTORS, LONG_FACTORS)
STAY_QUANTIZED = {*KINDS, GGMLQuantizationType.MXFP4.name}
POOLING_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}  # of `pooling_type`, under sentence-transformers' names
PLAIN = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Shard:
    """One open GGUF file of a model."""

    data: mmap
    header: GgufHeader


class GgufFile(ModelFiles):
    """Reader of a model in one or several GGUF files.

    `--quantization` selects the format in which the engine stores weights in memory. By default, matrices stay in the
    types of the file, if the kernels can multiply these.
    """

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    @cached_property
    def _config(self) -> dict[str, Any]:
        header, architecture = self._header, self._architecture
        with _errors_name(self.path):
            fields = common_fields(header) | architecture.fields(header)
            if factors := self._frequency_factors():
                fields["rope_parameters"] = fields["rope_parameters"] | long_rope(header, *factors)
            return {
                **fields,
                "architectures": [architecture.transformers_name],
                "dtype": self._dtype(),
                "eos_token_id": end_token_ids(header),
            }

    def generation_config(self) -> dict[str, Any]:
        keys = {name: f"general.sampling.{key}" for key, name in SAMPLING.items()}
        with _errors_name(self.path):
            return {name: self._header.get(key, 0.0) for name, key in keys.items() if key in self._header}

    def tokenizer(self) -> Tokenizer:
        with _errors_name(self.path):
            return make_tokenizer(self._header)

    def tokenizer_config(self) -> dict[str, Any]:
        with _errors_name(self.path):
            return dict(special_tokens(self._header))

    def chat_templates(self) -> dict[str, str]:
        header, key = self._header, "tokenizer.chat_template"
        with _errors_name(self.path):
            names = {name: f"{key}.{name}" for name in header.items(f"{key}s", str)} | {DEFAULT_TEMPLATE: key}
            stored = {name: template for name, key in names.items() if (template := header.get(key, ""))}
        # Ollama's conversions have no template, because Ollama renders prompts itself.
        beside = self.path.with_name(TEMPLATE_FILE)
        return stored or ({DEFAULT_TEMPLATE: beside.read_text(encoding="utf-8")} if beside.is_file() else {})

    def modules(self) -> list[tuple[str, dict[str, Any]]]:
        """Translates `pooling_type`, which embedding models have. llama.cpp normalises their vectors."""
        with _errors_name(self.path):
            mode = POOLING_MODES.get(
                self._header.get(f"{self._header.get('general.architecture', '')}.pooling_type", 0)
            )
        return [] if mode is None else [("Pooling", {"pooling_mode": mode}), ("Normalize", {})]

    @contextmanager
    def tensors(self) -> Iterator[TensorReaders]:
        with ExitStack() as opened:
            sources: TensorReaders = {}
            for part in self._open(opened):
                for info in part.header.tensors.values():
                    if info.name not in DERIVED:
                        self._add(sources, part.data, info)
            yield sources

    def weights_bytes(
        self, dtype: torch.dtype, linear_bits: float | None = None, *, stays_quantized: bool = False
    ) -> int:
        tensors = self._header.tensors.values()
        kept = [
            info for info in tensors if stays_quantized and info.kind.name in STAY_QUANTIZED and len(info.shape) > 1
        ]
        names = {info.name for info in kept}
        others = {info.name: info.shape for info in tensors if info.name not in names}
        return bytes_of_weights(others, dtype, linear_bits) + sum(
            bytes_in_memory(info.kind, info.num_bytes) for info in kept
        )

    @cached_property
    def _header(self) -> GgufHeader:
        """Returns the header of the complete model: metadata from the first file and tensors from all files."""
        with ExitStack() as opened:
            parts = self._open(opened)
            tensors = {name: info for part in parts for name, info in part.header.tensors.items()}
            return GgufHeader(parts[0].header.metadata, tensors)

    @cached_property
    def _architecture(self) -> GgufArchitecture:
        with _errors_name(self.path):
            return architecture_of(self._header)

    def _open(self, opened: ExitStack) -> list[_Shard]:
        return [_open_shard(path, opened) for path in self.weight_files()]

    def weight_files(self) -> list[Path]:
        if (split := SPLIT_NAME.fullmatch(self.path.name)) is None:
            return [self.path]
        stem, count = split.groups()
        return [self.path.with_name(f"{stem}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1)]

    def _dtype(self) -> str:
        """Returns the dtype of the weights before quantization.

        GGUF has no field for this dtype, so it is derived from the embeddings.
        """
        kind = self._header.tensors["token_embd.weight"].kind
        return {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}.get(kind, "bfloat16")

    def _frequency_factors(self) -> tuple[list[float], list[float]] | None:
        """Returns the rope factors for contexts up to the original length and for longer ones, or None without any."""
        present = [name for name in DERIVED if name in self._header.tensors]
        if not present:
            return None
        factors: dict[str, list[float]] = {}
        with ExitStack() as opened:
            for part in self._open(opened):
                for name in part.header.tensors.keys() & set(present):
                    factors[name] = dequantized(_read_tensor(part.data, part.header.tensors[name])).tolist()
        short = factors.get(SHORT_FACTORS) or factors.get(FREQUENCIES)
        long = factors.get(LONG_FACTORS) or factors.get(FREQUENCIES)
        if short is None or long is None:
            raise MalformedGguf(f"only one of {SHORT_FACTORS} and {LONG_FACTORS} is present")
        return short, long

    def _add(self, sources: TensorReaders, data: mmap, info: TensorInfo) -> None:
        with _errors_name(self.path):
            made = self._sources(data, info)
            if duplicates := sorted(sources.keys() & made.keys()):
                raise MalformedGguf(f"{info.name} is {duplicates[0]}, which is also present under another name")
            sources.update(made)

    def _sources(self, data: mmap, info: TensorInfo) -> TensorReaders:
        """Returns the readers of one tensor's parts, by the names that these parts have in transformers."""
        read = partial(_read_tensor, data, info)
        outer, _, kind = info.name.rpartition(".")
        if outer in OUTER_MODULES:
            return {f"{OUTER_MODULES[outer]}.{kind}": self._undo_conversion(outer, read)}
        if (parts := LAYER_TENSOR.fullmatch(info.name)) is None:
            return {info.name: read}  # no model uses this name, so `Checkpoint.finish` reports it
        layer, rest = parts.groups()
        if parameter := PARAMETERS.get(rest):
            return {f"model.layers.{layer}.{parameter}": read}
        module, _, kind = rest.rpartition(".")
        # The experts of a layer are one tensor. Each expert gets its own reader.
        sources: TensorReaders = {}
        for short_name, rows in self._architecture.names(module, self._header).items():
            name = f"model.layers.{layer}.{short_name}.{kind}"
            if "{}" not in name:
                sources[name] = self._undo_conversion(module, partial(_select_rows, read, rows))
                continue
            for i in range(info.shape[0]):
                sources[name.format(i)] = partial(_select_rows, partial(_read_tensor, data, info, i), rows)
        return sources or {info.name: read}

    def _undo_conversion(self, module: str, read: Callable[[], StoredTensor]) -> Callable[[], StoredTensor]:
        """Returns a reader that reverts what llama.cpp's conversion changed."""
        architecture = self._architecture
        if module.endswith("norm") and architecture.norm_offset:
            return lambda: dequantized(read()) - architecture.norm_offset
        if architecture.interleaved and module in ("attn_q", "attn_k"):
            num_heads = self._config["num_attention_heads" if module == "attn_q" else "num_key_value_heads"]
            return lambda: _in_half_layout(read(), num_heads)
        return read


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Adds the file's path to the errors that the block raises."""
    try:
        yield
    except MalformedGguf as error:
        raise WeightsError(f"{path} is not a valid GGUF file: {error}") from error
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error.message}") from error


def _open_shard(path: Path, opened: ExitStack) -> _Shard:
    try:
        file = opened.enter_context(path.open("rb"))
        # Not closed, because tensors can be views of it: the mapping ends with the last reference to it.
        data = mmap(file.fileno(), 0, access=ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise WeightsError(f"{path} cannot be read: {error}") from error
    with _errors_name(path):
        return _Shard(data, read_header(data))


def _read_tensor(data: mmap, info: TensorInfo, expert: int | None = None) -> StoredTensor:
    """Reads a tensor or one expert of it. Dequantizes it unless it is a matrix in a type that stays quantized."""
    shape, start, num_bytes = info.shape, info.start, info.num_bytes
    if expert is not None:
        shape, num_bytes = shape[1:], num_bytes // shape[0]
        start += expert * num_bytes
    content = _view(data, start, num_bytes)
    if info.kind.name in KINDS and len(shape) == 2:
        return BlockTensor((BlockRows(info.kind, content.view(shape[0], -1)),))
    if info.kind is not GGMLQuantizationType.MXFP4:
        return _dequantize(content, info, shape)
    blocks = content.view(*shape[:-1], -1, 1 + MXFP4_GROUP // 2).clone()
    codes, exponents = blocks[..., 1:], blocks[..., 0].contiguous()
    return (
        Mxfp4Tensor.from_adjacent_pairs(codes, exponents)
        if info.adjacent_pairs
        else Mxfp4Tensor(codes.flatten(-2), exponents)
    )


def _view(data: mmap, start: int, num_bytes: int) -> Tensor:
    """Returns a part of a file as uint8, without a copy. Writing to it would end the process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the memory is read-only
        return torch.frombuffer(data, dtype=torch.uint8, count=num_bytes, offset=start)


def _select_rows(read: Callable[[], StoredTensor], rows: slice) -> StoredTensor:
    return read()[rows]


def _dequantize(content: Tensor, info: TensorInfo, shape: tuple[int, ...]) -> Tensor:
    if info.kind in PLAIN:
        values = content.numpy().view(PLAIN[info.kind])
    else:
        try:
            values = dequantize(content.view(math.prod(shape[:-1]), -1).numpy(), info.kind)
        except NotImplementedError as error:
            raise WeightsError(f"tensor {info.name} has the unsupported quantization type {info.kind.name}") from error
    return torch.from_numpy(values.reshape(shape).copy())


def _in_half_layout(weight: StoredTensor, num_heads: int) -> StoredTensor:
    """Reorders the rows of a weight, or of a bias."""
    if isinstance(weight, BlockTensor):
        return weight.reordered(lambda rows: _to_half_layout(rows, num_heads))
    return _to_half_layout(dequantized(weight), num_heads)


def _to_half_layout(weight: Tensor, num_heads: int) -> Tensor:
    """Undoes llama.cpp's reordering of query and key rows. The converter interleaved the two halves of each head.

    ggml's "normal" rotation rotates adjacent rows; transformers' rotation pairs the two halves of a head.
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
