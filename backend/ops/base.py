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
from backend.ops.sampling import Bias, LogprobTensors, Penalties, RandomRows

INT4_GROUP = 32  # weights that share a scale
# What the codes of MXFP4 stand for, doubled, so that all are whole; scales are half of what they are (OCP Microscaling
# 1.0, section 5.3).
MXFP4_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
SWIGLU_OAI_SLOPE, SWIGLU_OAI_LIMIT = 1.702, 7.0


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """What every query and every key is normed by, head by head."""

    query: Tensor  # [D]
    key: Tensor  # [D], of the same dtype
    eps: float


class Ops(ABC):
    """What a layer does besides attention, and how tokens come of logits. T is the number of tokens in the step, over
    all requests.

    Inputs are not changed, but for the caches in `store_kv`, and for logits where it is said. Results have the dtype of
    the first argument; sums over a row are taken in float32. A row's result depends on that row alone, whatever stands
    beside it.
    """

    reads_mxfp4: ClassVar[bool] = False  # whether `linear_mxfp4` is as fast as the others

    def pack(self, weight: Tensor, dtype: torch.dtype, gate: str | None = None) -> Tensor:
        """A weight as `linear` and `linear_int8`, with inputs of this `dtype` and this `gate`, read it fastest: itself,
        or a copy, which may have a form of this member's own with more dimensions than two."""
        return weight

    @abstractmethod
    def to_int4(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A weight as `linear_int4` takes it: numbers and scales, by the scale of each group that brings them closest
        to it, of those that have its largest weight at one of `ENDS` (int4.py). [out, in]"""

    def pack_int4(self, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The same for `linear_int4` and `linear_mxfp4`, which take the scales beside it all the same."""
        return weight

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of a weight, which may be packed without a gate. ids: [T] -> [T, in]."""
        return F.embedding(ids, weight)

    def gather(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows of a contiguous table. table: [N, D]; ids: [T] int64, each below N, which not every member checks
        -> [T, D]."""
        return table[ids]

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x: [T, D]; the factor as float32 has it."""
        return x * factor

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y, both [T, D]."""
        return x + y

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: str | None = None) -> Tensor:
        """x: [T, in], weight: [out, in], bias: [out] -> [T, out]. With a gate, the result goes through
        `gated`: [T, out / 2]."""

    @abstractmethod
    def linear_int8(
        self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, gate: str | None = None
    ) -> Tensor:
        """The same with a weight held in int8, [out, in], and scales in float32, [out]: weight * scales."""

    @abstractmethod
    def linear_int4(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """The same with a weight held in groups of `INT4_GROUP` along its rows, [out, in / 2] uint8, and a scale for
        each, [out, in / INT4_GROUP] bfloat16. A group's first half stands in the low four bits of its bytes and its
        second half in the high ones, each number 8 more than it is: (number - 8) * scale."""

    @abstractmethod
    def linear_mxfp4(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """The same of numbers that are the `MXFP4_NUMBERS` in places of four bits."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [..., D], weight: [D]: x / sqrt(mean(x²) + eps) * weight. A weight in float32 is applied in float32."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and x + residual itself."""

    @abstractmethod
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [T, H, D]; cos, sin: [T, R/2], float32. Rotates pairs (i, i + R/2) of the first R dimensions, as Llama
        checkpoints expect; the others stay, and so do all where R is 0."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2I] -> silu(gate) * up: [T, I]."""

    @abstractmethod
    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2I] -> gelu(gate) * up: [T, I], by the tanh approximation that Gemma was trained with."""

    def swiglu_oai(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2I] -> (up + 1) * gate * sigmoid(1.702 * gate): [T, I], with gate at most 7 and up between -7
        and 7, as gpt-oss was trained."""
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
        form: KvFormat = PLAIN,
    ) -> Tensor:
        """What stands between the projections and attention: queries and keys normed, if at all, and rotated; keys and
        values stored. qkv: [T, (Hq + 2 Hkv) D], contiguous; rope: cos and sin; caches and slots as for
        `store_kv`, in a form for qkv's dtype -> the queries, [T, Hq, D]."""
        kv_heads, dim = caches[0].shape[2], form.head_dim(caches[0].shape[3])
        heads = qkv.view(len(qkv), -1, dim)
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if norms:
            query, key = self.rms_norm(query, norms.query, norms.eps), self.rms_norm(key, norms.key, norms.eps)
        self.store_kv(form.encode(self.rope(key, *rope)), form.encode(value), *caches, slots)
        return self.rope(query, *rope)

    def route(self, scores: Tensor, num_chosen: int, normalise: bool) -> tuple[Tensor, Tensor]:
        """Which experts a token visits: those of its largest scores, and the shares that they have of the softmax over
        all of them, or over those that are chosen if it is to be normalised. scores: [T, E] -> [T, K] float32 and
        [T, K] int64."""
        shares, chosen = scores.float().softmax(-1).topk(num_chosen, dim=-1)
        return (shares / shares.sum(-1, keepdim=True) if normalise else shares), chosen

    def mixture_of_experts(self, experts: Sequence[Expert]) -> MixtureOfExperts:
        """Of all of a layer's experts, which it may take the place of: their weights may be held in another form."""
        return SequentialExperts(experts)

    def gated(self, x: Tensor, gate: str | None) -> Tensor:
        """What "silu" (`silu_mul`), "gelu_tanh" (`gelu_mul`) or "swiglu_oai" make of a product: [T, 2I] -> [T, I];
        without a gate, the product itself."""
        match gate:
            case None:
                return x
            case "silu":
                return self.silu_mul(x)
            case "gelu_tanh":
                return self.gelu_mul(x)
            case "swiglu_oai":
                return self.swiglu_oai(x)
        raise ValueError(f"there is no gate {gate!r}")

    @abstractmethod
    def store_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        """key, value: [T, Hkv, W]; caches: [num_blocks, block_size, Hkv, W], of the same dtype; slots: [T], over all
        blocks."""

    def logits(self, x: Tensor, factor: float, softcap: float | None) -> Tensor:
        """A head's results in float32, times the factor, and capped where there is a cap: logits become softcap *
        tanh(logits / softcap). x: [N, vocab_size] -> the same shape."""
        logits = x.float() if factor == 1.0 else x.float() * factor
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """Of each row the first of its largest numbers. logits: [N, vocab_size] -> [N] int64."""

    @abstractmethod
    def penalise(self, logits: Tensor, penalties: Penalties) -> Tensor:
        """Applies penalties to single entries. logits: [N, vocab_size] float32, may be overwritten -> the same shape.

        An entry is divided by its repetition penalty, or multiplied by it if it is below 0. The frequency penalty times
        the count is subtracted, and the presence penalty if the count is not 0.
        """

    @abstractmethod
    def add_bias(self, logits: Tensor, bias: Bias) -> Tensor:
        """The same with a bias added to entries."""

    @abstractmethod
    def forbid(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> Tensor:
        """The same with -inf for what is not allowed. rows: [G] int64; allowed: [G, ceil(vocab_size / 32)] int32, of
        token i bit i % 32 of word i // 32."""

    @abstractmethod
    def draw(self, logits: Tensor, random: RandomRows) -> Tensor:
        """One token for each random row, by the softmax of logits / temperature over what its filters keep: the first
        up to which, in the order of the vocabulary, it sums to more than the row's `uniform` share of all. Without
        filters, nothing of it waits for a device. logits: [N, vocab_size] float32 -> [R] int64."""

    @abstractmethod
    def logprobs(self, logits: Tensor, rows: Tensor | None, token_ids: Tensor, num_top: int) -> LogprobTensors:
        """The log-softmax of rows, at one token of each and at its `num_top` likeliest ones, or as many as there are.
        NaN stands above inf. All log-probabilities of a row are NaN if one of its logits is NaN or inf, or all are
        -inf. logits: [N, vocab_size] float32; rows: [L] int64, or None for all; token_ids: [L] int64."""


def whole_rows(x: Tensor) -> Tensor:
    """With contiguous rows, however far apart: as a part of a projection is."""
    whole = x.stride(-1) == 1 and (x.dim() < 3 or x.stride(1) == x.shape[2])
    return x if whole else x.contiguous()
