"""The memory of the KV cache, all layers and blocks of it in one tensor."""

from __future__ import annotations

import torch

from backend.engine.config import ResolvedConfig
from backend.kv_cache import create_kv_form
from backend.layers.step import LayerCache


class KvMemory:
    def __init__(self, config: ResolvedConfig) -> None:
        model, form = config.model, create_kv_form(config.kv_cache_dtype)
        width = form.width(model.head_dim)
        shape = (model.num_layers, 2, config.num_blocks, config.block_size, model.num_kv_heads, width)
        # Zeros, since attention multiplies masked values by zero and an uninitialised NaN would survive that.
        self._memory = torch.zeros(shape, dtype=form.dtype(config.dtype), device=config.device)
        self.form = form
        self.layers = [LayerCache(key, value, form) for key, value in self._memory]
