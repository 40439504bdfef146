"""A model's weights together with its paged KV cache. `forward` is one forward pass over the tokens of a step.

On a CPU, decode steps of few sequences are replayed from a recording (decode_programs.py) if native kernels are used
and no sequence has an adapter; everything else runs through `_forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backend.attention import create_attention
from backend.attention.base import FULL_ATTENTION, AttentionMetadata, AttentionVariant, StepAttention
from backend.attention.native import NativeAttention
from backend.engine.batch import Batch
from backend.engine.decode_programs import DecodePrograms
from backend.engine.kv_memory import KvMemory
from backend.engine.resolved_config import ResolvedConfig
from backend.families import load_member
from backend.layers.division import WHOLE, Division
from backend.layers.forward_context import ForwardContext
from backend.layers.loader import LayerLoader
from backend.layers.lora import LoraTarget
from backend.models import architecture
from backend.models.encoder import Encoder
from backend.models.weights import Checkpoint
from backend.native.recording import Recorder, StopCheck, raise_if_interrupted
from backend.ops import create_ops
from backend.ops.native import NativeOps
from backend.quantization import create_quantization

if TYPE_CHECKING:
    from backend.engine.graphs import GraphCapture

LEADERS = {"rank 0": "backend.parallel.leader:LeaderModel"}
# The largest decode step whose logits and tokens are recorded, too. With more rows, the recording saves less, and each
# program keeps more memory for their logits.
MAX_GREEDY_ROWS = 16


class PagedModel:
    """Weights, KV cache and kernels on one device. Not thread-safe."""

    def __init__(self, config: ResolvedConfig, kv: KvMemory | None = None, division: Division = WHOLE) -> None:
        """Loads the weights and allocates the cache, unless it is that of another copy of the same model.

        config: if the model is divided among processes, that of this process's part. Raises `WeightsError` if the
        checkpoint does not fit the model.
        """
        self.ops = ops = create_ops(config.ops)
        with Checkpoint(config.model_dir, config.dtype, config.device, division) as checkpoint:
            loader = LayerLoader(checkpoint, ops, create_quantization(config.quantization, ops), division)
            self._encoder = Encoder(config.model, loader) if config.model.encoder else None
            if self._encoder is None:
                model_class = architecture(config.model.architecture)
                self._model = model_class(config.model, loader, config.max_model_len, config.device)
            checkpoint.finish()
        self.kv = kv or KvMemory(config)
        self._attention = create_attention(config.attention, config.model.attention_scale, self.kv.format)
        self._heads = config.model.num_heads, config.model.num_kv_heads
        self._like = torch.empty(config.model.head_dim, dtype=config.dtype, device=config.device)
        self.programs: DecodePrograms | None = None  # recordings of `forward`
        self.greedy_programs: DecodePrograms | None = None  # recordings of `next_tokens`
        records = self._encoder is None and not config.enforce_eager
        if records and isinstance(ops, NativeOps) and isinstance(self._attention, NativeAttention):
            recorder = Recorder(ops.call, self._attention.call)
            self.programs = DecodePrograms(config, self._forward, recorder)
            self.greedy_programs = DecodePrograms(config, self._next_tokens, recorder, MAX_GREEDY_ROWS)

    def set_num_threads(self, num_threads: int) -> None:
        """Sets how many threads the native kernels use, from the next step on. The results stay the same."""
        for user in (self.ops, self._attention):
            if isinstance(user, NativeOps | NativeAttention):
                user.call.num_threads = num_threads
        for programs in (self.programs, self.greedy_programs):
            if programs:
                programs.forget()

    def watch(self, fail: Callable[[str], None]) -> None:
        """Calls `fail` with the reason, from another thread, if another process that computes the model ends."""

    def check(self) -> None:
        """Raises `RankFailed` if another process has ended. Then the last results may be wrong."""

    def close(self) -> None:
        """Ends the other processes that compute the model."""

    def capture_of_ranks(self, capture: GraphCapture) -> GraphCapture:
        """Captures steps in all processes that compute the model. `capture`: in this one."""
        return capture

    @property
    def needs_host_sync(self) -> bool:
        """Whether a step on a device must wait in its middle until the host has read a result."""
        return self._model.needs_host_sync

    @property
    def lora_targets(self) -> dict[str, LoraTarget]:
        """The modules that LoRA adapters may change, by the checkpoint's names. Encoders have none."""
        return {} if self._encoder is not None else self._model.lora_targets

    def tile_tokens(self, longest: int) -> int:
        """How many tokens a tile of `AttentionWork` has, for steps in which a sequence has up to `longest`."""
        return self._attention.tile_tokens(longest, *self._heads, like=self._like)

    @property
    def queries_per_key(self) -> int:
        """How many query heads share a key/value head."""
        return self._heads[0] // self._heads[1]

    def warm_up_lengths(self, longest: int) -> list[int]:
        """As `Attention.warm_up_lengths`."""
        return self._attention.warm_up_lengths(longest, self._like)

    def forward(self, batch: Batch, is_interrupted: StopCheck | None = None) -> Tensor:
        """Runs one forward pass. Returns the final hidden states of the output rows: [W, hidden_size].

        The result is valid until the next call. `is_interrupted` is called before the layers and between them; if it
        returns True, `StepInterrupted` is raised, and some of the batch's slots may already have been written.
        """
        if self.programs and not batch.adapters and not batch.images and self.programs.fits(batch.attention):
            return self.programs(batch, is_interrupted)
        raise_if_interrupted(is_interrupted)
        return self._forward(batch, is_interrupted)

    def _forward(self, batch: Batch, is_interrupted: StopCheck | None) -> Tensor:
        if self._encoder is not None:
            lens = batch.attention.query_lens
            hidden = self._encoder(batch.input_ids, batch.positions, lens, is_interrupted)
            return hidden if batch.output_rows is None else hidden[batch.output_rows.rows]
        embedded, positions = self._model.embedded(batch.input_ids), batch.positions
        if batch.images:  # the only place where tokens of images differ from text
            embedded, positions = batch.images.inserted(embedded), batch.images.positions
        rotations = self._model.rotations(positions)
        adapters, output_adapters = batch.adapters or (None, None)
        attend = self._prepared(batch.attention, is_interrupted)
        context = ForwardContext(rotations, batch.slot_mapping, attend, None, adapters, adapters)
        last_context = context  # of the last layer, which computes the output rows only
        if output := batch.output_rows:
            attend = self._prepared(output.attention, is_interrupted)
            last_context = replace(context, attend=attend, rows=output.rows, kept_adapters=output_adapters)
        return self._model.forward(embedded, self.kv.layers, context, last_context)

    def _prepared(self, attention: AttentionMetadata, is_interrupted: StopCheck | None) -> StepAttention:
        attend = self._attention.prepare(attention, like=self._like)
        return attend if is_interrupted is None else _InterruptibleAttention(attend, is_interrupted)

    def next_tokens(self, batch: Batch, is_interrupted: StopCheck | None = None) -> Tensor:
        """`greedy_tokens` of `forward`, [W] int64, valid until the next call. Raises what `forward` raises."""
        if self.greedy_programs and not batch.adapters and self.greedy_programs.fits(batch.attention):
            return self.greedy_programs(batch, is_interrupted)
        return self.greedy_tokens(self.forward(batch, is_interrupted))

    def _next_tokens(self, batch: Batch, is_interrupted: StopCheck | None) -> Tensor:
        return self.greedy_tokens(self._forward(batch, is_interrupted))

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """The argmax of the logits. hidden: [N, hidden_size] -> [N] int64."""
        return self._model.greedy_tokens(hidden)

    def pooled(self, hidden: Tensor) -> Tensor:
        """The vectors of requests with pooling: hidden [N, hidden_size] -> [N, hidden_size or num_labels] float32."""
        return (self._encoder or self._model).pooled(hidden)

    def scores(self, hidden: Tensor) -> Tensor:
        """The logits for `Ops.choose`: hidden [N, hidden_size] -> [N, vocab_size] in float32 or the model's dtype."""
        return self._model.scores(hidden)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: [N, hidden_size] -> [N, vocab_size] float32, written to `out` if given."""
        return self._model.logits(hidden, out)


class _InterruptibleAttention(StepAttention):
    """Checks for an interruption before the attention of each layer."""

    def __init__(self, attend: StepAttention, is_interrupted: StopCheck) -> None:
        self._attend = attend
        self._is_interrupted = is_interrupted

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, variant: AttentionVariant = FULL_ATTENTION
    ) -> Tensor:
        raise_if_interrupted(self._is_interrupted)
        return self._attend(query, key_cache, value_cache, variant)


def create_model(config: ResolvedConfig) -> PagedModel:
    """Loads the model, in several processes if so configured. Raises `WeightsError` or `RankFailed`."""
    if config.tensor_parallel_size == 1:
        return PagedModel(config)
    leader: PagedModel = load_member(LEADERS, "rank 0")(config)
    return leader
