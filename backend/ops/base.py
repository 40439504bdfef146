"""The interface of the operations: what a layer computes besides attention, and how tokens are made of logits.

`Ops` has three groups of methods: linear layers and their packed weights; what is between them (norms, rotary
embeddings, gates, the router of a mixture of experts, storing keys and values); and the sampling of tokens from logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.kv_cache.base import KvFormat
from backend.kv_cache.plain import PLAIN
from backend.ops.experts import Expert, MixtureOfExperts, SequentialExperts
from backend.ops.sampling import LogitBias, LogprobTensors, Penalties, RandomRows

INT4_GROUP = 32  # weights that share a scale
# The values of the codes of MXFP4, doubled so that all are whole; the scales are halved (OCP Microscaling 1.0, section
# 5.3).
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
SWIGLU_OAI_SLOPE, SWIGLU_OAI_LIMIT = 1.702, 7.0


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The weights of the RMS norms that are applied to each query head and each key head."""

    query: Tensor  # [D]
    key: Tensor  # [D], of the same dtype
    eps: float


class Ops(ABC):
    """The operations. In shapes, T is the number of tokens in the step, over all requests.

    Inputs are not changed, except for the caches in `store_kv`, and for logits where a method says so. Results have the
    dtype of the first argument; sums over a row are computed in float32. The result of a row depends on that row only,
    not on the other rows of the batch.
    """

    reads_mxfp4: ClassVar[bool] = False  # whether `linear_mxfp4` is as fast as the other products

    def pack(self, weight: Tensor, dtype: torch.dtype, gate: str | None = None) -> Tensor:
        """A weight in the layout that `linear` and `linear_int8` read fastest, for inputs of `dtype` and this `gate`.

        Returns the weight itself, or a copy in a layout of this member's own, which may have more than two dimensions.
        """
        return weight

    @abstractmethod
    def to_int4(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Quantises a weight, [out, in], to the codes and scales of `linear_int4`.

        For each group, of the scales that map its largest weight to one of `SCALE_ENDS` (int4.py), the one with the
        smallest squared error is taken.
        """

    def pack_int4(self, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """`pack` for `linear_int4` and `linear_mxfp4`, which are still called with the scales, too."""
        return weight

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of a weight, which may be packed without a gate. ids: [T] -> [T, in]."""
        return F.embedding(ids, weight)

    def gather(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows of a contiguous table. table: [N, D]; ids: [T] int64 -> [T, D]. Not every member checks that ids < N."""
        return table[ids]

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor. x: [T, D]; the factor is rounded to float32."""
        return x * factor

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y, both [T, D]."""
        return x + y

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: str | None = None) -> Tensor:
        """x: [T, in], weight: [out, in], bias: [out] -> [T, out]. With a gate, `gated` of that: [T, out / 2]."""

    @abstractmethod
    def linear_int8(
        self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, gate: str | None = None
    ) -> Tensor:
        """`linear` with a weight in int8, [out, in], and float32 scales, [out]: the weight is weight * scales."""

    @abstractmethod
    def linear_int4(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """`linear` with a weight in groups of `INT4_GROUP` along its rows: [out, in / 2] uint8.

        Each group has a bfloat16 scale, [out, in / INT4_GROUP]. The first half of a group is in the low four bits of
        its bytes and the second half in the high ones. A code stands for (code - 8) * scale.
        """

    @abstractmethod
    def linear_mxfp4(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """`linear_int4` with codes that stand for MXFP4_VALUES[code] * scale."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [..., D], weight: [D]: x / sqrt(mean(x²) + eps) * weight. A weight in float32 is applied in float32."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and x + residual itself."""

    @abstractmethod
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding. x: [T, H, D]; cos, sin: [T, R/2], float32.

        Rotates pairs (i, i + R/2) of the first R dimensions, as Llama checkpoints expect. The other dimensions stay
        unchanged. R may be 0.
        """

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2I] -> silu(gate) * up: [T, I]."""

    @abstractmethod
    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2I] -> gelu(gate) * up: [T, I], with the tanh approximation that Gemma was trained with."""

    def swiglu_oai(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2I] -> (up + 1) * gate * sigmoid(1.702 * gate): [T, I], as gpt-oss was trained.

        The gate is clamped to at most 7, and up to between -7 and 7.
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
        """Everything between the qkv projection and attention: returns the queries and stores keys and values.

        Queries and keys are normalised if there are `norms`, and rotated. qkv: [T, (Hq + 2 Hkv) D], contiguous; rope:
        cos and sin; caches and slots as for `store_kv`, in a format for qkv's dtype -> the queries, [T, Hq, D].
        """
        kv_heads, dim = caches[0].shape[2], kv_format.head_dim(caches[0].shape[3])
        heads = qkv.view(len(qkv), -1, dim)
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if norms:
            query, key = self.rms_norm(query, norms.query, norms.eps), self.rms_norm(key, norms.key, norms.eps)
        self.store_kv(kv_format.encode(self.rope(key, *rope)), kv_format.encode(value), *caches, slots)
        return self.rope(query, *rope)

    def route(self, scores: Tensor, num_chosen: int, normalise: bool) -> tuple[Tensor, Tensor]:
        """The top-k experts of each token, and their weights. scores: [T, E] -> [T, K] float32 and [T, K] int64.

        The weights are the softmax over all experts, or over the chosen ones if they are to be normalised.
        """
        weights, chosen = scores.float().softmax(-1).topk(num_chosen, dim=-1)
        return (weights / weights.sum(-1, keepdim=True) if normalise else weights), chosen

    def mixture_of_experts(self, experts: Sequence[Expert]) -> MixtureOfExperts:
        """The mixture of all experts of a layer. It may hold their weights in another layout, in place of theirs."""
        return SequentialExperts(experts)

    def gated(self, x: Tensor, gate: str | None) -> Tensor:
        """Applies "silu" (`silu_mul`), "gelu_tanh" (`gelu_mul`) or "swiglu_oai" to a product: [T, 2I] -> [T, I].

        Without a gate, returns the product itself.
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

    @abstractmethod
    def store_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        """Writes keys and values to their slots. key, value: [T, Hkv, W]; slots: [T], counted over all blocks.

        Caches: [num_blocks, block_size, Hkv, W], of the same dtype.
        """

    def logits(self, x: Tensor, factor: float, softcap: float | None) -> Tensor:
        """The output head's results as float32 logits, multiplied by the factor. x: [N, vocab_size] -> the same shape.

        With a softcap, logits become softcap * tanh(logits / softcap).
        """
        logits = x.float() if factor == 1.0 else x.float() * factor
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """The index of the largest number of each row; of equals, the first. logits: [N, vocab_size] -> [N] int64."""

    @abstractmethod
    def penalise(self, logits: Tensor, penalties: Penalties) -> Tensor:
        """Applies penalties to single entries. logits: [N, vocab_size] float32, may be overwritten -> the same shape.

        An entry is divided by its repetition penalty, or multiplied by it if it is below 0. The frequency penalty times
        the count is subtracted, and the presence penalty if the count is not 0.
        """

    @abstractmethod
    def add_bias(self, logits: Tensor, bias: LogitBias) -> Tensor:
        """Adds a bias to single entries. Logits as for `penalise`."""

    @abstractmethod
    def forbid(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> Tensor:
        """Sets all tokens of the rows to -inf that are not allowed. Logits as for `penalise`.

        rows: [G] int64; allowed: [G, ceil(vocab_size / 32)] int32, where token i is bit i % 32 of word i // 32.
        """

    @abstractmethod
    def draw(self, logits: Tensor, random: RandomRows) -> Tensor:
        """Samples one token for each random row. logits: [N, vocab_size] float32 -> [R] int64.

        The distribution is the softmax of logits / temperature over the tokens that the row's filters keep. The token
        is the first, in the order of the vocabulary, up to which it sums to more than the row's `uniform` share of the
        total. Without filters, no part of it waits for a device.
        """

    @abstractmethod
    def logprobs(self, logits: Tensor, rows: Tensor | None, token_ids: Tensor, num_top: int) -> LogprobTensors:
        """The log-softmax of rows, at one token of each and at its `num_top` most likely ones (or all there are).

        NaN ranks above inf. All log-probabilities of a row are NaN if one of its logits is NaN or inf, or if all are
        -inf. logits: [N, vocab_size] float32; rows: [L] int64, or None for all; token_ids: [L] int64.
        """


def whole_rows(x: Tensor) -> Tensor:
    """x, or a copy, with contiguous rows. The rows may be any distance apart, as in a part of a projection."""
    whole = x.stride(-1) == 1 and (x.dim() < 3 or x.stride(1) == x.shape[2])
    return x if whole else x.contiguous()
