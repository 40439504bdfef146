"""Interface of the operations (`Ops`): the computations of a layer except attention, and sampling from logits.

`Ops` has three groups of methods. The first group is linear layers and the packing of their weights. The second group
is the operations between linear layers: norms, rotary embeddings, gates, the router of a mixture of experts, and
storing keys and values. The third group is the sampling of tokens from logits. An implementation must provide the
abstract methods, and can override the others with faster ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.kv_cache.base import KvFormat
from backend.kv_cache.plain import PLAIN
from backend.ops.experts import Expert, MixtureOfExperts, SequentialExperts
from backend.ops.sampling import LogitBias, LogprobTensors, Penalties, RandomRows, RowPenalties, StepRows

T = TypeVar("T", Tensor, Tensor | None)

INT4_GROUP = 32  # weights that share a scale
# The numbers that the codes of MXFP4 stand for, doubled so that all are integers. The scales are halved (OCP
# Microscaling 1.0, section 5.3).
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
SWIGLU_OAI_SLOPE, SWIGLU_OAI_LIMIT = 1.702, 7.0
FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max
SMALLEST_FP8_SCALE = 1e-30  # for a row of zeros, which stays zeros


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the RMS norms that are applied to each query head and each key head."""

    query: Tensor  # [D]
    key: Tensor  # [D], of the same dtype
    eps: float


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """Weight in a block type of GGUF files, in the layout of the implementation that packed it."""

    kind: str  # as in gguf_blocks.py, such as "q4_k"
    values: Tensor
    outs: int
    ins: int


class Ops(ABC):
    """Base class of the operations. In shapes, T is the number of tokens in the step, over all requests.

    A method must not change its arguments, except the caches in `store_kv` and logits where a docstring allows it. A
    result has the dtype of the first argument. Sums over a row are computed in float32. The result of a row must depend
    on that row only, not on the other rows of the batch.
    """

    reads_mxfp4: ClassVar[bool] = False  # whether `linear_mxfp4` is as fast as the other linear layers

    def pack(self, weight: Tensor, dtype: torch.dtype, gate: str | None = None) -> Tensor:
        """Converts a weight to the layout that `linear` and `linear_int8` read fastest.

        Returns the weight itself, or a copy in this implementation's own layout. The copy may have more than two
        dimensions. `dtype` is the dtype of the layer's inputs, and `gate` its gate.
        """
        return weight

    @abstractmethod
    def to_int4(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Quantises a weight [out, in] and returns the codes and scales for `linear_int4`.

        For each group, tries the scales that map its largest weight to one of `SCALE_ENDS` (int4.py). Selects the scale
        with the smallest squared error.
        """

    def pack_int4(self, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Converts a weight to the layout that `linear_int4` and `linear_mxfp4` read fastest, as `pack` does.

        The copy may contain the scales, but both methods must still be called with the scales.
        """
        return weight

    def packs_blocks(self, kind: str, outs: int, dtype: torch.dtype) -> bool:
        """Whether `pack_blocks` accepts a weight of this block type with `outs` outputs, for inputs in `dtype`."""
        return False

    def pack_blocks(self, blocks: Sequence[Tensor], kind: str, ins: int, gate: str | None = None) -> PackedBlocks:
        """Packs a weight in a block type of GGUF files for `linear_blocks`.

        blocks: one or several [out, bytes of a row] uint8, whose outputs follow each other. Only for weights for which
        `packs_blocks` is true.
        """
        raise NotImplementedError

    def linear_blocks(
        self, x: Tensor, parts: Sequence[PackedBlocks], bias: Tensor | None, gate: str | None = None
    ) -> Tensor:
        """Computes `linear` with a weight whose outputs are those of the parts, one after the other.

        A gate is only allowed with one part that was packed with this gate. Inputs are rounded to int8 with one scale
        for 32 of them, as llama.cpp does.
        """
        raise NotImplementedError

    def embedding_blocks(self, ids: Tensor, weight: PackedBlocks) -> Tensor:
        """Returns the rows of a weight that was packed without a gate, in bfloat16: ids [T] -> [T, in]."""
        raise NotImplementedError

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Returns the rows of a weight for ids: [T] -> [T, in]. The weight may be packed, but only without a gate."""
        return F.embedding(ids, weight)

    def gather(self, table: Tensor, ids: Tensor) -> Tensor:
        """Returns rows of a contiguous table: table [N, D], ids [T] int64 -> [T, D].

        The caller must ensure that ids < N. Not every implementation checks it.
        """
        return table[ids]

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Returns x * factor, for x [T, D]. The factor is rounded to float32."""
        return x * factor

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns x + y, both [T, D]."""
        return x + y

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: str | None = None) -> Tensor:
        """Computes a linear layer: x [T, in], weight [out, in], bias [out] -> [T, out].

        With a gate, returns `gated` of the result: [T, out / 2].
        """

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        gate: str | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Computes `add_rms_norm` and `linear` of its result, and returns the layer's result and x + residual.

        A residual of None counts as zero. None if this implementation does not compute both at once.
        """
        return None

    @abstractmethod
    def linear_int8(
        self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, gate: str | None = None
    ) -> Tensor:
        """Computes `linear` with a weight in int8 [out, in] and float32 scales [out].

        The weight that the layer applies is weight * scales.
        """

    @abstractmethod
    def linear_int4(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """Computes `linear` with a weight in four-bit codes, [out, in / 2] uint8.

        `INT4_GROUP` codes along a row form a group with a bfloat16 scale, [out, in / INT4_GROUP]. The first half of a
        group is in the low four bits of its bytes, and the second half in the high four bits. A code stands for the
        number (code - 8) * scale.
        """

    @abstractmethod
    def linear_mxfp4(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """Computes `linear_int4` with codes that stand for the numbers MXFP4_VALUES[code] * scale."""

    def round_to_fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rounds each row to fp8 (e4m3) with a scale of its own, so that its largest number keeps its value.

        x: [N, D] -> values [N, D] e4m3, contiguous, and scales [N, 1] float32.
        """
        scales = (x.abs().amax(dim=1, keepdim=True).float() / LARGEST_FP8).clamp_(min=SMALLEST_FP8_SCALE)
        return (x.float() / scales).to(FP8), scales

    def norm_round_to_fp8(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes `add_rms_norm` and `round_to_fp8` of its result. A residual of None counts as zero.

        Returns the values and scales as `round_to_fp8`, and x + residual.
        """
        if residual is None:
            return *self.round_to_fp8(self.rms_norm(x, weight, eps)), x
        normed, total = self.add_rms_norm(x, residual, weight, eps)
        return *self.round_to_fp8(normed), total

    def gate_round_to_fp8(self, x: Tensor, gate: str) -> tuple[Tensor, Tensor]:
        """Computes `gated` and `round_to_fp8` of its result: x [N, 2 D] -> values [N, D] and scales [N, 1]."""
        return self.round_to_fp8(self.gated(x, gate))

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the RMS norm, x / sqrt(mean(x²) + eps) * weight, for x [..., D] and weight [D].

        A weight in float32 is applied in float32.
        """

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns the RMS norm of x + residual, and x + residual."""

    @abstractmethod
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Applies the rotary embedding to x [T, H, D], with cos and sin [T, R/2] in float32.

        Rotates the pairs (i, i + R/2) of the first R dimensions, as Llama checkpoints expect. The other dimensions stay
        unchanged. R may be 0.
        """

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) * up: gate_up [T, 2I] -> [T, I]."""

    @abstractmethod
    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns gelu(gate) * up: gate_up [T, 2I] -> [T, I].

        Uses the tanh approximation of gelu, with which Gemma was trained.
        """

    def swiglu_oai(self, gate_up: Tensor) -> Tensor:
        """Returns (up + 1) * gate * sigmoid(1.702 * gate), as in gpt-oss: gate_up [T, 2I] -> [T, I].

        The gate is clamped to at most 7, and `up` to the range from -7 to 7.
        """
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=SWIGLU_OAI_LIMIT), up.clamp(-SWIGLU_OAI_LIMIT, SWIGLU_OAI_LIMIT)
        return (up + 1) * (gate * torch.sigmoid(SWIGLU_OAI_SLOPE * gate))

    def norm_rope_store(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        rope: tuple[Tensor, Tensor],
        caches: tuple[Tensor, Tensor],
        slots: Tensor,
        kv_format: KvFormat = PLAIN,
    ) -> Tensor:
        """Performs all steps between the qkv projection and attention. Returns the queries, [T, Hq, D].

        Normalises queries and keys if `norms` is given, rotates them, and stores keys and values in the caches.
        qkv: [T, (Hq + 2 Hkv) D], contiguous. rope: cos and sin as for `rope`. caches, slots: as for `store_kv`, in a
        cache format for qkv's dtype.
        """
        kv_heads, dim = caches[0].shape[2], kv_format.head_dim(caches[0].shape[3])
        heads = qkv.view(len(qkv), -1, dim)
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if norms:
            query, key = self.rms_norm(query, norms.query, norms.eps), self.rms_norm(key, norms.key, norms.eps)
        self.encode_and_store_kv(self.rope(key, *rope), value, *caches, slots, kv_format)
        return self.rope(query, *rope)

    def route(self, scores: Tensor, num_chosen: int, normalise: bool) -> tuple[Tensor, Tensor]:
        """Returns the weights and numbers of each token's top-k experts.

        scores: [T, E] -> weights [T, K] float32 and numbers [T, K] int64. The weights are the softmax over all experts,
        or over the chosen experts if `normalise` is true.
        """
        weights, chosen = scores.float().softmax(-1).topk(num_chosen, dim=-1)
        return (weights / weights.sum(-1, keepdim=True) if normalise else weights), chosen

    def mixture_of_experts(self, experts: Sequence[Expert]) -> MixtureOfExperts:
        """Returns the mixture of all experts of a layer.

        The mixture may store its own copy of the experts' weights in another layout, in place of the original weights.
        """
        return SequentialExperts(experts)

    def gated(self, x: Tensor, gate: str | None) -> Tensor:
        """Applies the gate "silu" (`silu_mul`), "gelu_tanh" (`gelu_mul`) or "swiglu_oai": x [T, 2I] -> [T, I].

        Returns x itself if `gate` is None.
        """
        match gate:
            case None:
                return x
            case "silu":
                return self.silu_mul(x)
            case "gelu_tanh":
                return self.gelu_mul(x)
            case "swiglu_oai":
                return self.swiglu_oai(x)
        raise ValueError(f"unknown gate {gate!r}")

    def to_packed_order(self, values: T, weight: Tensor, gate: str | None) -> T:
        """Returns a bias or scales [out], if there are any, in the order of the outputs of a packed weight.

        `pack` may reorder the outputs of a weight that has a gate. With the gate, `linear` and the other methods
        restore their order. Without it, they return them in the order of the packed weight, see `from_packed_order`.
        """
        return values

    def from_packed_order(self, product: Tensor, weight: Tensor, gate: str | None) -> Tensor:
        """Restores the order of the outputs of `linear` without the gate for which the weight was packed: [T, out]."""
        return product

    @abstractmethod
    def store_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        """Writes keys and values [T, Hkv, W] to their slots [T] in the caches. Slots are numbered over all blocks.

        The caches have shape [num_blocks, block_size, Hkv, W] and the dtype of the keys and values.
        """

    def encode_and_store_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, kv_format: KvFormat
    ) -> None:
        """Encodes keys and values [T, Hkv, D] and writes them to their slots, as `store_kv`."""
        if kv_format.scales_apart:
            kv_format.store(key, key_cache, slots)
            kv_format.store(value, value_cache, slots)
        else:
            self.store_kv(kv_format.encode(key), kv_format.encode(value), key_cache, value_cache, slots)

    def logits(self, x: Tensor, factor: float, softcap: float | None) -> Tensor:
        """Returns the output head's results, x [N, vocab_size], as float32 logits multiplied by the factor.

        With a softcap, the logits become softcap * tanh(logits / softcap).
        """
        logits = x.float() if factor == 1.0 else x.float() * factor
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """Returns the index of the largest logit of each row: logits [N, vocab_size] -> [N] int64.

        If several logits are equal, the first index is returned.
        """

    @abstractmethod
    def choose(self, scores: Tensor, random: RandomRows | None, penalties: RowPenalties | None) -> Tensor:
        """Returns the token of each row: drawn in the random rows, and the most likely one in the others.

        scores: [N, vocab_size], the logits in float32 or the model's dtype, may be overwritten. Result: [N] int64.
        """

    @abstractmethod
    def penalise(self, logits: Tensor, penalties: Penalties) -> Tensor:
        """Applies penalties to single logits. May overwrite `logits`, [N, vocab_size] float32. Returns the same shape.

        A logit is divided by its repetition penalty, or multiplied by it if the logit is below 0. Then the frequency
        penalty times the output count is subtracted. The presence penalty is subtracted if the count is not 0.
        """

    @abstractmethod
    def add_bias(self, logits: Tensor, bias: LogitBias) -> Tensor:
        """Adds a bias to single logits. May overwrite `logits`, as `penalise`."""

    @abstractmethod
    def forbid(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> Tensor:
        """Sets the logits of the rows to -inf at all tokens that are not allowed.

        May overwrite `logits`, as `penalise`. rows: [G] int64. allowed: [G, ceil(vocab_size / 32)] int32. Bit i % 32 of
        word i // 32 is set if token i is allowed.
        """

    @abstractmethod
    def draw(self, logits: Tensor, random: RandomRows) -> Tensor:
        """Samples one token for each random row: logits [N, vocab_size] float32 -> token ids [R] int64.

        The distribution is the softmax of logits / temperature over the tokens that the row's filters keep. The
        probabilities are summed in the order of the vocabulary. The sampled token is the first one at which the sum
        exceeds the row's `uniform` share of the total. Without filters, this method does not wait for the device.
        """

    @abstractmethod
    def logprobs(self, logits: Tensor, rows: Tensor | None, token_ids: Tensor, num_top: int) -> LogprobTensors:
        """Returns the log-probabilities of one token per row and of the row's `num_top` most likely tokens.

        logits: [N, vocab_size] float32. rows: [L] int64, or None for all rows. token_ids: [L] int64. If `num_top`
        exceeds the vocabulary, all tokens are returned. NaN ranks above inf. All log-probabilities of a row are NaN if
        one of its logits is NaN or inf, or if all of them are -inf.
        """

    @abstractmethod
    def sample_rows(self, logits: Tensor, rows: StepRows, *, has_changes: bool) -> Tensor:
        """Samples one token for each row: logits [S, vocab_size] float32, unchanged -> token ids [S] int64.

        Unless `has_changes`, no row has penalties, biases or a mask, and these are not read. Otherwise, the input
        tokens are counted first, as by `StepRows.count_inputs`. The token is that of `argmax` if the row is greedy, and
        that of `draw` if it is random.
        """

    @abstractmethod
    def score_rows(self, logits: Tensor, rows: StepRows, token_ids: Tensor, num_top: int) -> LogprobTensors:
        """Returns what `logprobs` does, for the rows with SCORED. The results of other rows have no meaning.

        logits: [S, vocab_size] float32. token_ids: [S] int64. `num_top` is at most the size of the vocabulary. NaN need
        not rank above inf.
        """


def whole_rows(x: Tensor) -> Tensor:
    """Returns x or a copy of it in which each row is contiguous.

    The rows may be any distance apart, as in a part of a fused projection.
    """
    whole = x.stride(-1) == 1 and (x.dim() < 3 or x.stride(1) == x.shape[2])
    return x if whole else x.contiguous()
