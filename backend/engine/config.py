"""How an engine is configured. `EngineConfig` is what was asked for; `resolve` makes a `ResolvedConfig` of it.

`EngineConfig` checks its values when it is made, against the tables of the families (attention, ops, quantization,
drafters, KV cache formats). `resolve` reads the checkpoint's configuration and looks at the machine: it chooses device
and dtype, the fastest kernels that run there, the number of threads, and the size of the KV cache.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from backend.attention import ATTENTIONS
from backend.engine.errors import ConfigError
from backend.engine.free_memory import free_memory_bytes
from backend.engine.image_options import IMAGE_CACHE_BYTES, encoder_dtype, with_image_options
from backend.engine.resolved_config import NATIVE, NONE, TRITON, ResolvedConfig
from backend.engine.speculation import DRAFTERS
from backend.engine.step_limits import StepLimits, choose_step_limits
from backend.engine.threads import ThreadChoice, choose_num_threads, num_cores
from backend.engine.torch_start import reason_to_wait
from backend.kv_cache import KV_FORMATS, create_kv_format
from backend.model_files import open_model_files
from backend.models.config import ModelConfig
from backend.native import compiler, library
from backend.ops import OPS
from backend.parallel.limits import check_devices, devices_of_ranks, refuse_undivided, threads_of_rank
from backend.parallel.shards import check_divisible
from backend.quantization import QUANTIZATIONS, bits_per_weight
from backend.triton_runtime import runs_triton

logger = logging.getLogger(__name__)  # INFO: progress

AUTO = "auto"
DRAFT_MODEL = "draft_model"
FP8 = "fp8_e4m3"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# A float16 checkpoint runs in bfloat16: float16 has no fast path on a CPU, and less range.
AUTO_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}

CPU_KV_CACHE_BYTES = 1 << 30
ENCODER_PROMPTS = 64  # of the longest, that an encoder's blocks are enough for
CPU_KV_CACHE_FRACTION = 0.5  # at most, of the memory that is free once the weights are loaded
GPU_KV_CACHE_FRACTION = 0.8  # of the memory that is free once the weights are loaded; the rest is for activations


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asked for. None and "auto" leave a choice to `resolve`.

    Raises `ConfigError`, naming the field, for values that cannot work.
    """

    model_dir: Path
    dtype: str = AUTO  # "float32" or "bfloat16"; auto: the checkpoint's
    device: str = AUTO  # "cpu", "cuda", "cuda:1"; auto: a GPU if there is one
    num_threads: int | None = None  # None: chosen by a short measurement (threads.py), again under load
    wait_for_kernels: bool = True  # False: torch computes while native kernels are compiled, if it can (torch_start.py)
    block_size: int = 16
    num_blocks: int | None = None  # None: as many as kv_cache_memory_bytes holds
    kv_cache_memory_bytes: int | None = None  # None: chosen from the free memory
    max_model_len: int | None = None  # None: the model's maximum, limited by the size of the KV cache
    max_num_seqs: int | None = None  # None: chosen by the device (step_limits.py)
    max_num_batched_tokens: int | None = None
    max_waiting: int = 512  # in addition to the max_num_seqs that can run
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = AUTO  # "int8" or "fp8_e4m3"; auto: the model's
    kv_host_bytes: int | None = None  # of host memory for evicted blocks; None: no second tier
    kv_host_dir: Path | None = None  # a directory for a file that holds them; None: in RAM
    attention: str = AUTO
    ops: str = AUTO
    enforce_eager: bool = False  # run decode steps without CUDA graphs and recordings: slower, needs less memory
    quantization: str = "none"
    speculation: str = NONE  # "ngram": drafts from the request's own tokens; "draft_model": from a smaller model
    draft_model_dir: Path | None = None
    max_draft_tokens: int = 8  # per request and step
    max_loras: int = 0  # LoRA adapters in memory, for which memory is set aside
    max_lora_rank: int = 16  # of each adapter
    tensor_parallel_size: int = 1  # processes that compute the model together, on a GPU each or on this CPU
    reads_images: bool = True  # False: the image encoder of a model that has one is not loaded
    min_image_pixels: int | None = None  # to which images are scaled; None: as preprocessor_config.json says
    max_image_pixels: int | None = None
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)  # of config.json's fields (model_files/pooling.py)

    def __post_init__(self) -> None:
        for name in (
            "num_threads",
            "block_size",
            "num_blocks",
            "kv_cache_memory_bytes",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_draft_tokens",
            "kv_host_bytes",
            "max_lora_rank",
            "tensor_parallel_size",
            "min_image_pixels",
            "max_image_pixels",
        ):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}", param=name)
        for name in ("max_waiting", "max_loras"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"{name} must be at least 0, not {value}", param=name)
        if self.num_blocks and self.kv_cache_memory_bytes:
            raise ConfigError(
                "num_blocks and kv_cache_memory_bytes exclude each other: both set the size", param="num_blocks"
            )
        for name, known in (
            ("dtype", {AUTO, *DTYPES}),
            ("kv_cache_dtype", KV_FORMATS.keys()),
            ("attention", {AUTO, *ATTENTIONS}),
            ("ops", {AUTO, *OPS}),
            ("quantization", QUANTIZATIONS.keys()),
            ("speculation", {NONE, *DRAFTERS}),
        ):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name} {value!r} is not one of {', '.join(sorted(known))}", param=name)
        if (self.speculation == DRAFT_MODEL) != (self.draft_model_dir is not None):
            raise ConfigError(
                f"draft_model_dir needs speculation {DRAFT_MODEL!r}, and conversely", param="draft_model_dir"
            )
        if self.tensor_parallel_size > 1:
            refuse_undivided(self)

    def resolve(self) -> ResolvedConfig:
        """Makes every choice that was left open, from the checkpoint and the machine. Reads only."""
        if self._may_start_with_torch():
            with_torch = replace(self, ops="reference", attention="sdpa")._resolve()
            cache_bytes = with_torch.num_blocks * self._block_bytes([with_torch.model], with_torch.dtype)
            cache_bytes += self.max_loras * lora_bytes(with_torch.model, self.max_lora_rank, with_torch.dtype.itemsize)
            reason = reason_to_wait(with_torch, cache_bytes, free_memory_bytes(with_torch.device))
            if reason is None:
                return replace(with_torch, starts_with_torch=True)
            logger.info("waiting until the native kernels are compiled: %s", reason)
        return self._resolve()

    def _may_start_with_torch(self) -> bool:
        """Whether the native kernels would be chosen, and a compiler would have to run first."""
        is_open = not self.wait_for_kernels and self.ops == self.attention == AUTO and self.tensor_parallel_size == 1
        return is_open and _device(self.device).type == "cpu" and not compiler.is_compiled()

    def _resolve(self) -> ResolvedConfig:
        model = ModelConfig.load(self.model_dir, self.hf_overrides)
        model = with_image_options(model, self.reads_images, self.min_image_pixels, self.max_image_pixels)
        draft = ModelConfig.load(self.draft_model_dir) if self.draft_model_dir else None
        dtype = DTYPES[AUTO_DTYPES[model.dtype] if self.dtype == AUTO else self.dtype]
        device = _device(self.device)
        if self.tensor_parallel_size > 1:
            check_devices(device, self.tensor_parallel_size)
            check_divisible(model, self.tensor_parallel_size)
        block_bytes = self._block_bytes([model, draft] if draft else [model], dtype)
        num_blocks = self.num_blocks or self._num_blocks(block_bytes, model, dtype, device)
        if self.quantization == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
            raise ConfigError("quantization 'fp8' needs a GPU of capability 9.0 or more", param="quantization")
        max_model_len = self.max_model_len or min(model.max_position_embeddings, num_blocks * self.block_size)
        _check_context(model, max_model_len)
        ops = _member("ops", self.ops, plain="reference", device=device)
        threads = (
            ThreadChoice(self.num_threads, "as configured")
            if self.num_threads
            else choose_num_threads(library.load() if ops == NATIVE else None, num_cores())
            if self.tensor_parallel_size == 1
            else threads_of_rank(num_cores(), self.tensor_parallel_size)
        )
        limits = choose_step_limits(device, self.max_num_seqs, self.max_num_batched_tokens)
        if model.encoder:
            limits = self._limits_of_encoder(limits, max_model_len)
        resolved = ResolvedConfig(
            model_dir=self.model_dir,
            model=model,
            dtype=dtype,
            device=device,
            num_threads=threads.count,
            num_threads_reason=threads.reason,
            adapts_threads=self.num_threads is None and self.tensor_parallel_size == 1,
            block_size=self.block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_waiting=self.max_waiting,
            enable_prefix_caching=self.enable_prefix_caching and model.encoder is None,
            kv_cache_dtype=self.kv_cache_dtype,
            num_host_blocks=self._num_host_blocks(self._block_bytes([model], dtype)),
            kv_host_dir=self.kv_host_dir,
            attention=self._attention(device),
            ops=ops,
            starts_with_torch=False,
            enforce_eager=self.enforce_eager,
            quantization=self.quantization,
            speculation=self.speculation,
            max_draft_tokens=self.max_draft_tokens,
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            tensor_parallel_size=self.tensor_parallel_size,
        )
        if draft is None or self.draft_model_dir is None:
            return resolved
        draft_config = replace(resolved, model_dir=self.draft_model_dir, model=draft)
        return replace(resolved, draft=draft_config)

    def _block_bytes(self, models: Sequence[ModelConfig], dtype: torch.dtype) -> int:
        """The memory of one block, on all ranks together: each of these has at least one key/value head.

        A draft model is on rank 0 only. It is counted for each rank, because all of them have as many blocks.
        """
        form, ranks = create_kv_format(self.kv_cache_dtype), self.tensor_parallel_size
        heads = [max(models[0].num_kv_heads, ranks), *(ranks * draft.num_kv_heads for draft in models[1:])]
        num_values = sum(
            2 * m.num_cached_layers * n * form.width(m.head_dim) for m, n in zip(models, heads, strict=True)
        )
        return self.block_size * num_values * form.dtype(dtype).itemsize

    def _limits_of_encoder(self, limits: StepLimits, max_model_len: int) -> StepLimits:
        """An encoder computes a whole prompt in one step, whatever its length."""
        if self.max_loras:
            raise ConfigError("encoders have no LoRA adapters", param="max_loras")
        if self.max_num_batched_tokens and self.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({max_model_len}): an encoder computes a prompt in one step",
                param="max_num_batched_tokens",
            )
        return StepLimits(limits.max_num_seqs, max(limits.max_num_batched_tokens, max_model_len))

    def _num_host_blocks(self, block_bytes: int) -> int:
        if self.kv_host_bytes is None:
            if self.kv_host_dir is not None:
                raise ConfigError("kv_host_dir needs kv_host_bytes", param="kv_host_dir")
            return 0
        if self.kv_host_bytes < block_bytes:
            raise ConfigError(
                f"{self.kv_host_bytes} bytes are too few: one block has {block_bytes} bytes", param="kv_host_bytes"
            )
        if not self.enable_prefix_caching:
            raise ConfigError("kv_host_bytes needs prefix caching, which is off", param="kv_host_bytes")
        return self.kv_host_bytes // block_bytes

    def _num_blocks(self, block_bytes: int, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
        if model.encoder:  # blocks take no memory: they are only counted
            return ENCODER_PROMPTS * -(-model.max_position_embeddings // self.block_size)
        memory = self.kv_cache_memory_bytes or self._cache_memory_bytes(model, dtype, device)
        if memory < block_bytes:
            raise ConfigError(
                f"{memory} bytes of KV cache are too few: one block has {block_bytes} bytes",
                param="kv_cache_memory_bytes",
            )
        return memory // block_bytes

    def _attention(self, device: torch.device) -> str:
        """The fastest attention that supports the device and the KV cache's format."""
        chosen = _member("attention", self.attention, plain="sdpa", device=device)
        if chosen == TRITON and self.kv_cache_dtype == FP8 and not _converts_fp8(device):
            if self.attention != AUTO:
                raise ConfigError(
                    f"attention {TRITON!r} does not support a KV cache of {FP8} on this GPU", param="attention"
                )
            return "sdpa"
        return chosen

    def _cache_memory_bytes(self, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
        """The size of the KV cache, from the memory that weights and LoRA adapters leave free.

        A GPU is assumed to be the engine's alone. A CPU's memory is shared with other processes, so the cache there is
        as large as the weights, and at least one GiB.
        """
        found = [free_memory_bytes(of_rank) for of_rank in devices_of_ranks(device, self.tensor_parallel_size)]
        if None in found:
            return CPU_KV_CACHE_BYTES
        free = len(found) * min(free for free in found if free is not None)  # each rank takes as much
        model_dirs = [model_dir for model_dir in (self.model_dir, self.draft_model_dir) if model_dir]
        bits = bits_per_weight(self.quantization)
        is_native = _member("ops", self.ops, plain="reference", device=device) == NATIVE
        is_divided = self.tensor_parallel_size > 1  # then blocks of numbers would have to be cut
        stays_quantized = is_native and bits is None and dtype is torch.bfloat16 and not is_divided
        counts = (1, self.tensor_parallel_size)  # as in `_block_bytes`
        weights = sum(
            count * open_model_files(model_dir).weights_bytes(dtype, bits, stays_quantized=stays_quantized)
            for count, model_dir in zip(counts, model_dirs, strict=False)
        )
        if model.vision:
            weights += open_model_files(self.model_dir).image_encoder_bytes(encoder_dtype(device, dtype))
            free -= IMAGE_CACHE_BYTES
        free -= weights + self.max_loras * lora_bytes(model, self.max_lora_rank, dtype.itemsize)
        if device.type == "cuda":
            return max(0, int(free * GPU_KV_CACHE_FRACTION))
        return min(max(CPU_KV_CACHE_BYTES, weights), max(0, int(free * CPU_KV_CACHE_FRACTION)))


def _converts_fp8(device: torch.device) -> bool:
    """Whether Triton can convert from fp8_e4m3 on this device: GPUs of capability 8.9 or later, and its interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _member(family: str, name: str, *, plain: str, device: torch.device) -> str:
    """The named member of a family, or the fastest one for the device. Raises `ConfigError` if it cannot run there."""
    if name == TRITON and not runs_triton(device):
        needs = "a GPU and the triton package, which comes with torch for CUDA"
        raise ConfigError(f"{family} {name!r} needs {needs}", param=family)
    if name != AUTO:
        return name
    if device.type == "cpu":
        return NATIVE if library.load() else plain
    return TRITON if runs_triton(device) else plain


def _device(name: str) -> torch.device:
    if name == AUTO:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}", param="device") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use cpu or cuda", param="device")
    if device.type != "cuda":
        return device
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(f"this machine has no device {name!r}", param="device")
    return torch.device("cuda", index)


def lora_bytes(model: ModelConfig, rank: int, itemsize: int) -> int:
    """The memory of a LoRA adapter with this rank that changes every module it can (layers/lora.py)."""
    attention = sum(map(sum, _attention_projections(model)))
    inner_sizes = (layer.experts.shared_size if layer.experts else model.intermediate_size for layer in model.layers)
    mlps = sum(3 * (model.hidden_size + inner) for inner in inner_sizes if inner)
    return rank * itemsize * (attention * len(model.layers) + mlps)


def _attention_projections(model: ModelConfig) -> list[tuple[int, int]]:
    """The inputs and outputs of each projection of an attention layer."""
    hidden, heads, latent = model.hidden_size, model.num_heads, model.latent
    query, key_value = heads * model.head_dim, model.num_kv_heads * model.head_dim
    if latent is None:
        return [(hidden, query), (hidden, key_value), (hidden, key_value), (query, hidden)]
    rank = latent.query_rank
    return [
        *([(hidden, query)] if rank is None else [(hidden, rank), (rank, query)]),
        (hidden, latent.rank + latent.rotated_dim),
        (latent.rank, heads * (latent.plain_dim + latent.value_dim)),
        (heads * latent.value_dim, hidden),
    ]


def _check_context(model: ModelConfig, max_model_len: int) -> None:
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {max_model_len} exceeds the model's maximum of {model.max_position_embeddings}",
            param="max_model_len",
        )
