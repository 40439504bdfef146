"""Reads LoRA adapters in PEFT's format: a directory with adapter_config.json and adapter_model.safetensors.

A setting that changes the computation and is not implemented is refused, as for models (models/config.py), because an
adapter that does not load is better than one with wrong output. Source of the format: PEFT 0.17, `LoraConfig` and
`get_peft_model_state_dict`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from backend.engine.errors import AdapterError
from backend.model_files.text_part import language_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20

# Fields that change the computation, with the values that do not.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "modules_to_save": ([],),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "arrow_config": (),
    # The other methods of initialisation also change the model's own weights.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
N = TypeVar("N", int, float)

_PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The settings of adapter_config.json that this engine uses."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]  # by a regular expression for the end of a module's name
    alpha_pattern: Mapping[str, float]
    use_rslora: bool

    @classmethod
    def read(cls, folder: Path) -> LoraConfig:
        """Reads adapter_config.json. Raises `AdapterError`."""
        path = folder / CONFIG
        try:
            with path.open("rb") as file:
                raw = json.loads(file.read(MAX_CONFIG_BYTES + 1))
        except OSError as error:
            raise AdapterError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise AdapterError(f"{path} is not JSON of at most {MAX_CONFIG_BYTES} bytes: {error}") from error
        if not isinstance(raw, dict):
            raise AdapterError(f"{path} is not a JSON object")
        if (kind := raw.get("peft_type")) != "LORA":
            raise AdapterError(f"{path}: peft_type {kind!r} is not supported, only 'LORA'")
        for field, neutral in _NEUTRAL.items():
            if (value := raw.get(field)) is not None and value not in neutral:
                raise AdapterError(f"{path}: {field} {value!r} is not supported")

        def positive(field: str, value: object) -> float:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise AdapterError(f"{path}: {field} must be a positive number, not {value!r}")
            return value

        def pattern(field: str) -> dict[str, float]:
            found = raw.get(field) or {}
            if not isinstance(found, dict):
                raise AdapterError(f"{path}: {field} must be an object, not {found!r}")
            for key in found:
                try:
                    re.compile(key)
                except re.error as error:
                    raise AdapterError(f"{path}: {field}: {key!r} is not a regular expression: {error}") from error
            return {key: positive(f"{field}[{key!r}]", value) for key, value in found.items()}

        if not isinstance(use_rslora := raw.get("use_rslora") or False, bool):
            raise AdapterError(f"{path}: use_rslora must be true or false, not {use_rslora!r}")
        return cls(
            rank=int(positive("r", raw.get("r"))),
            alpha=positive("lora_alpha", raw.get("lora_alpha")),
            rank_pattern={key: int(value) for key, value in pattern("rank_pattern").items()},
            alpha_pattern=pattern("alpha_pattern"),
            use_rslora=use_rslora,
        )

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return _first_match(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of the product of a module's matrices."""
        rank = self.rank_of(module)
        return _first_match(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _first_match(pattern: Mapping[str, N], module: str, default: N) -> N:
    """The value of the first key that matches the whole name or the end of it after a dot, as PEFT looks it up."""
    return next((value for key, value in pattern.items() if re.fullmatch(rf"(.*\.)?({key})", module)), default)


class LoraTensors:
    """The open adapter_model.safetensors: which modules it has matrices for, and these matrices."""

    def __init__(self, path: Path, file: Any) -> None:
        """file: an open safetensors file. Raises `AdapterError` for a tensor that is not part of a LoRA adapter."""
        self._path = path
        self._file = file
        names: dict[str, str] = {}
        for stored in file.keys():  # noqa: SIM118  not a mapping
            if not stored.startswith(_PREFIX):
                raise AdapterError(f"{path}: the name of tensor {stored} does not begin with {_PREFIX}")
            names[stored.removeprefix(_PREFIX)] = stored
        self._names: dict[str, dict[str, str]] = {}  # by module and matrix
        for name, stored in language_tensors(names).items():
            if not (found := _NAME.fullmatch(name)):
                raise AdapterError(f"{path}: tensor {stored} is not supported, only lora_A.weight and lora_B.weight")
            # Adapters of a model without its output head omit the first word.
            module = found["module"] if found["module"].startswith("model.") else f"model.{found['module']}"
            self._names.setdefault(module, {})[found["matrix"]] = stored
        if not self._names:
            raise AdapterError(f"{path} has no tensors")

    @property
    def modules(self) -> list[str]:
        """The modules that the adapter changes, by their names in the model's checkpoint."""
        return list(self._names)

    def take(self, module: str, matrix: str, *shape: int) -> Tensor:
        """Reads matrix "A" or "B" of a module. Raises `AdapterError` if it is missing or has another shape."""
        if (stored := self._names[module].get(matrix)) is None:
            raise AdapterError(f"{self._path}: lora_{matrix}.weight of {module} is missing")
        if (found := tuple(self._file.get_slice(stored).get_shape())) != shape:
            raise AdapterError(f"{self._path}: tensor {stored} has shape {found}, expected {shape}")
        tensor: Tensor = self._file.get_tensor(stored)
        if not tensor.is_floating_point():
            raise AdapterError(f"{self._path}: tensor {stored} has dtype {tensor.dtype}, which is not supported")
        return tensor


@contextmanager
def open_tensors(folder: Path) -> Iterator[LoraTensors]:
    """Opens adapter_model.safetensors. Raises `AdapterError`, also for errors while the block reads tensors."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise AdapterError(
            f"{path} is missing; adapters in other formats, such as adapter_model.bin, are not supported"
        )
    try:
        with safe_open(path, framework="pt") as file:
            yield LoraTensors(path, file)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error


def digest(folder: Path) -> bytes:
    """SHA-256 over the contents of both files. Raises `AdapterError`."""
    total = sha256()
    for name in (CONFIG, WEIGHTS):
        try:
            with (folder / name).open("rb") as file:
                total.update(file_digest(file, "sha256").digest())
        except OSError as error:
            raise AdapterError(f"{folder / name} cannot be read: {error.strerror}") from error
    return total.digest()
