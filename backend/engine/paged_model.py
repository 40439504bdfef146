"""A model's weights and its paged cache. One call is one forward pass over the tokens of a step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from backend.attention import create_attention
from backend.attention.base import FULL_ATTENTION, AttentionMetadata, AttentionVariant, StepAttention
from backend.attention.native import NativeAttention
from backend.engine.batch import Batch
from backend.engine.config import ResolvedConfig
from backend.engine.decode_programs import DecodePrograms
from backend.engine.kv_memory import KvMemory
from backend.layers.forward_context import ForwardContext
from backend.layers.loader import LayerLoader
from backend.models import architecture
from backend.models.weights import Checkpoint
from backend.native.recording import Recorder, StopCheck, raise_if_interrupted
from backend.ops import create_ops
from backend.ops.native import NativeOps
from backend.quantization import create_quantization

# Of a step whose logits and tokens are recorded with it: the more there are, the less it brings, and the larger the
# memory for their logits, which a program keeps.
MAX_GREEDY_ROWS = 16


class PagedModel:
    """Raises `WeightsError` if the checkpoint does not fit the model."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.ops = ops = create_ops(config.ops)
        with Checkpoint(config.model_dir, config.dtype, config.device) as checkpoint:
            loader = LayerLoader(checkpoint, ops, create_quantization(config.quantization, ops))
            model_class = architecture(config.model.architecture)
            self._model = model_class(config.model, loader, config.max_model_len, config.device)
            checkpoint.finish()
        self.kv = KvMemory(config)
        self._attention = create_attention(config.attention, config.model.attention_scale, self.kv.form)
        self._like = torch.empty(config.model.head_dim, dtype=config.dtype, device=config.device)
        self.programs: DecodePrograms | None = None  # of `forward`
        self.greedy_programs: DecodePrograms | None = None  # of `next_tokens`
        if isinstance(ops, NativeOps) and isinstance(self._attention, NativeAttention) and not config.enforce_eager:
            recorder = Recorder(ops.call, self._attention.call)
            self.programs = DecodePrograms(config, self._forward, recorder)
            self.greedy_programs = DecodePrograms(config, self._next_tokens, recorder, MAX_GREEDY_ROWS)

    @property
    def needs_host_sync(self) -> bool:
        """Whether a step on a device has to wait in its middle for the host to know what it computed."""
        return self._model.needs_host_sync

    def forward(self, batch: Batch, is_interrupted: StopCheck | None = None) -> Tensor:
        """Runs one forward pass. Returns the final hidden states of the tokens that are read: [W, hidden_size].

        The result is valid until the next call. `is_interrupted` is called before the layers and between them; if it
        returns True, `StepInterrupted` is raised, and some of the batch's slots may already have been written.
        """
        if self.programs and self.programs.suit(batch.attention):
            return self.programs(batch, is_interrupted)
        raise_if_interrupted(is_interrupted)
        return self._forward(batch, is_interrupted)

    def _forward(self, batch: Batch, is_interrupted: StopCheck | None) -> Tensor:
        embedded, rotations = self._model.embedded(batch.input_ids), self._model.rotations(batch.positions)
        step = ForwardContext(rotations, batch.slot_mapping, self._prepared(batch.attention, is_interrupted))
        last = step
        if tail := batch.tail:
            last = replace(step, attend=self._prepared(tail.attention, is_interrupted), rows=tail.rows)
        return self._model.forward(embedded, self.kv.layers, step, last)

    def _prepared(self, attention: AttentionMetadata, is_interrupted: StopCheck | None) -> StepAttention:
        attend = self._attention.prepare(attention, like=self._like)
        return attend if is_interrupted is None else _Interruptible(attend, is_interrupted)

    def next_tokens(self, batch: Batch, is_interrupted: StopCheck | None = None) -> Tensor:
        """`greedy_tokens` of `forward`, [W] int64, valid until the next call. Raises what `forward` raises."""
        if self.greedy_programs and self.greedy_programs.suit(batch.attention):
            return self.greedy_programs(batch, is_interrupted)
        return self.greedy_tokens(self.forward(batch, is_interrupted))

    def _next_tokens(self, batch: Batch, is_interrupted: StopCheck | None) -> Tensor:
        return self.greedy_tokens(self._forward(batch, is_interrupted))

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """The tokens of the largest logits. hidden: [N, hidden_size] -> [N] int64."""
        return self._model.greedy_tokens(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [N, hidden_size] -> [N, vocab_size] float32."""
        return self._model.logits(hidden)


class _Interruptible(StepAttention):
    """Asks before the attention of each layer whether the step is still wanted."""

    def __init__(self, attend: StepAttention, is_interrupted: StopCheck) -> None:
        self._attend = attend
        self._is_given_up = is_interrupted

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, span: AttentionVariant = FULL_ATTENTION
    ) -> Tensor:
        raise_if_interrupted(self._is_given_up)
        return self._attend(query, key_cache, value_cache, span)
