"""Reader of model directories in transformers' layout: JSON files, and safetensors in one file or in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from backend.engine.errors import ConfigError, WeightsError
from backend.model_files.base import ModelFiles, TensorReaders, bytes_of_weights
from backend.model_files.quantized_checkpoints import plain_readers, plain_shapes
from backend.model_files.text_part import (
    image_encoder_tensors,
    is_multimodal,
    language_config,
    language_tensors,
    reads_images,
    with_outer_module,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DEFAULT_TEMPLATE = "default"
TEMPLATE_FILE = "chat_template.jinja"

Value = TypeVar("Value")


class ModelDirectory(ModelFiles):
    """Reader of a model directory in transformers' layout."""

    def config(self) -> dict[str, Any]:
        """Reads config.json. For a multimodal model, returns the configuration of its language model."""
        return language_config(_read_object(self.path / "config.json"))

    def image_settings(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Reads preprocessor_config.json, or else processor_config.json, which transformers 5 writes."""
        config = _read_object(self.path / "config.json")
        if not reads_images(config):
            return None
        processor = self._read_if_present("processor_config.json").get("image_processor") or {}
        return config, self._read_if_present("preprocessor_config.json") or processor

    def generation_config(self) -> dict[str, Any]:
        return self._read_if_present("generation_config.json")

    def tokenizer(self) -> Tokenizer:
        """Reads tokenizer.json, whose post-processor decides whether a bos token is added.

        `add_bos_token` in tokenizer_config.json is ignored. transformers 5 does the same if there is a tokenizer.json.
        """
        path = self.path / "tokenizer.json"
        if not path.exists():
            raise ConfigError(
                f"{self.path} has no tokenizer.json; only fast tokenizers are supported", param="model_dir"
            )
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        return self._read_if_present("special_tokens_map.json") | self._read_if_present("tokenizer_config.json")

    def chat_templates(self) -> dict[str, str]:
        """Reads `chat_template.jinja` and `additional_chat_templates/`, or else `tokenizer_config.json`."""
        file = self.path / TEMPLATE_FILE
        extra = sorted((self.path / "additional_chat_templates").glob("*.jinja"))
        if file.exists() or extra:
            sources = {path.stem: path.read_text(encoding="utf-8") for path in extra}
            if file.exists():
                sources[DEFAULT_TEMPLATE] = file.read_text(encoding="utf-8")
            return sources
        stored = self._read_if_present("tokenizer_config.json").get("chat_template") or {}
        if isinstance(stored, str):
            return {DEFAULT_TEMPLATE: stored}
        return {entry["name"]: entry["template"] for entry in stored}

    def modules(self) -> list[tuple[str, dict[str, Any]]]:
        """Reads modules.json, and the config.json of each module that has a folder."""
        path = self.path / "modules.json"
        if not path.exists():
            return []
        listed = _read_json(path)
        if not isinstance(listed, list) or not all(isinstance(each, dict) and "type" in each for each in listed):
            raise ConfigError(f"{path} is not a list of modules", param="model_dir")
        return [
            (str(each["type"]), self._read_if_present(f"{folder}/config.json") if (folder := each.get("path")) else {})
            for each in listed
        ]

    @contextmanager
    def tensors(self) -> Iterator[TensorReaders]:
        with ExitStack() as files:
            stored: TensorReaders = {name: partial(file.get_tensor, name) for name, file in self._open(files).items()}
            yield plain_readers(self._of_language_model(stored), self._quantization)

    @contextmanager
    def image_encoder_tensors(self) -> Iterator[TensorReaders]:
        with ExitStack() as files:
            stored: TensorReaders = {name: partial(file.get_tensor, name) for name, file in self._open(files).items()}
            yield plain_readers(image_encoder_tensors(stored), self._quantization)

    def image_encoder_bytes(self, dtype: torch.dtype) -> int:
        with ExitStack() as files:
            stored = {name: file.get_slice(name).get_shape() for name, file in self._open(files).items()}
            return bytes_of_weights(plain_shapes(image_encoder_tensors(stored), self._quantization), dtype, None)

    def weights_bytes(
        self, dtype: torch.dtype, linear_bits: float | None = None, *, stays_quantized: bool = False
    ) -> int:
        with ExitStack() as files:
            shapes: dict[str, list[int]] = {
                name: file.get_slice(name).get_shape() for name, file in self._open(files).items()
            }
            plain = plain_shapes(self._of_language_model(shapes), self._quantization)
            return bytes_of_weights(plain, dtype, linear_bits)

    @property
    def _quantization(self) -> Mapping[str, Any]:
        return self.config().get("quantization_config") or {}

    def _of_language_model(self, sources: Mapping[str, Value]) -> dict[str, Value]:
        is_part = is_multimodal(_read_object(self.path / "config.json"))
        return _without_drafts(with_outer_module(language_tensors(sources) if is_part else sources), self.config())

    def _open(self, files: ExitStack) -> dict[str, safe_open]:
        """Opens all shards and returns the file of each tensor."""
        sources: dict[str, safe_open] = {}
        try:
            for path in self.weight_files():
                file = files.enter_context(safe_open(path, framework="pt"))
                sources.update(dict.fromkeys(file.keys(), file))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"the weights in {self.path} cannot be read: {error}") from error
        return sources

    def weight_files(self) -> list[Path]:
        index = self.path / INDEX
        if not index.exists():
            return [self.path / SINGLE]
        try:
            weight_map: Mapping[str, str] = json.loads(index.read_bytes())["weight_map"]
        except (ValueError, KeyError) as error:
            raise WeightsError(f"{index} is not a valid index of shards: {error!r}") from error
        return [self.path / name for name in sorted(set(weight_map.values()))]

    def _read_if_present(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return _read_object(path) if path.exists() else {}


def _without_drafts(sources: dict[str, Value], config: Mapping[str, Any]) -> dict[str, Value]:
    """Drops the layers behind the last one that predict more tokens than the next, as DeepSeek V3 has one."""
    first = config.get("num_hidden_layers") or 0
    drafts = tuple(f"model.layers.{first + i}." for i in range(config.get("num_nextn_predict_layers") or 0))
    return {name: source for name, source in sources.items() if not name.startswith(drafts)} if drafts else sources


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="model_dir") from error


def _read_object(path: Path) -> dict[str, Any]:
    value = _read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", param="model_dir")
    return value
