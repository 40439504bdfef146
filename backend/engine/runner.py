"""The model, its cache, and one forward pass: from a plan to what was computed. It remembers nothing about requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backend.attention import create_attention
from backend.engine.batch import make_batch, make_sampling_batch
from backend.engine.config import ResolvedConfig
from backend.engine.sampler import sample
from backend.engine.scheduler import Computed, Scheduled
from backend.layers.loader import LayerLoader
from backend.models import architecture
from backend.models.decoder import LayerCache
from backend.models.weights import Checkpoint
from backend.ops import create_ops
from backend.quantization import create_quantization


class Runner:
    """Raises `WeightsError` if the checkpoint does not fit the model."""

    def __init__(self, config: ResolvedConfig) -> None:
        torch.set_num_threads(config.num_threads)
        self._config = config
        ops = create_ops(config.ops)
        with Checkpoint(config.model_dir, config.dtype, config.device) as checkpoint:
            loader = LayerLoader(checkpoint, ops, create_quantization(config.quantization, ops))
            model_class = architecture(config.model.architecture)
            self._model = model_class(config.model, loader, config.max_model_len, config.device)
            checkpoint.finish()
        self._attention = create_attention(config.attention, scale=config.model.head_dim**-0.5)
        # Zeros, since attention multiplies masked values by zero and an uninitialised NaN would survive that.
        model = config.model
        shape = (model.num_layers, 2, config.num_blocks, config.block_size, model.num_kv_heads, model.head_dim)
        memory = torch.zeros(shape, dtype=config.dtype, device=config.device)
        self._cache = [LayerCache(key, value) for key, value in memory]

    @torch.inference_mode()
    def run(self, plan: Sequence[Scheduled]) -> list[Computed]:
        """Computes a non-empty plan: one result for each of its entries, in its order."""
        device = self._config.device
        batch = make_batch(plan, self._config.block_size, device)
        attend = self._attention.prepare(batch.attention, like=self._cache[0].key)
        hidden = self._model.forward(batch.input_ids, batch.positions, batch.slot_mapping, self._cache, attend)

        computed = [Computed() for _ in plan]
        for i, (scheduled, rows) in enumerate(
            zip(plan, torch.split(hidden, list(batch.attention.query_lens)), strict=True)
        ):
            if scheduled.request.pooling:
                computed[i] = Computed(hidden_sum=tuple(rows.float().sum(0).tolist()))
        if batch.sampled:
            logits = self._model.logits(hidden[batch.sampled_rows])
            requests = [plan[i].request for i in batch.sampled]
            sampling = make_sampling_batch(requests, self._config.model.vocab_size, device)
            for i, sampled in zip(batch.sampled, sample(logits, sampling), strict=True):
                computed[i] = Computed((sampled.token_id,), sampled.logprobs)
        return computed
