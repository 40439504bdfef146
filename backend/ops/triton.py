"""Operations by Triton kernels (triton_kernels.py, triton_expert_kernels.py).

Linear layers with unquantised weights use torch, and so cuBLAS, except for a single row (triton_row_kernels.py). Linear
layers with int8 and int4 weights read the
quantised weight if they have few rows. With many rows, they expand the weight first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from backend.kv_cache.base import KvFormat
from backend.kv_cache.plain import PLAIN, PlainFormat
from backend.kv_cache.scaled import Fp8Format, Int8Format
from backend.ops import triton_kernels as kernels
from backend.ops import triton_sampling_kernels as kernels_of_sampling
from backend.ops.base import FP8, INT4_GROUP, LARGEST_FP8, SMALLEST_FP8_SCALE, HeadNorms, whole_rows
from backend.ops.experts import Expert, MixtureOfExperts, SequentialExperts
from backend.ops.kernel_ops import KernelOps
from backend.ops.sampling import MAX_BIASES, LogprobTensors, RandomRows, StepRows
from backend.ops.triton_experts import FORMATS, TritonMixtureOfExperts, route
from backend.ops.triton_row_kernels import linear_row
from backend.triton_runtime import early_start, exact_rounding, is_interpreted, operands, starts_early

MAX_ROWS = 64  # rows for which kernels read a quantised weight; with more rows, expanding it once costs less
MIN_ROWS = 16  # rows of the smallest matrix multiplication
BLOCK_OUTS, BLOCK_INS = 32, 128
STAGES = {torch.bfloat16: 4, torch.float32: 2}  # stages of prefetching that fit into the shared memory of small GPUs
GATED_BLOCK = 1024
HEADS, HEADS_WARPS = 16, 4  # heads of a token that one program normalises and rotates, and its warps
FP8_BLOCK = 4096
LOGITS_BLOCK, LOGITS_WARPS = 8192, 16
# Of a single row: inputs that a program reads at once, its outputs and its warps. On an H200, one sequence of an 8B
# model with 8 outputs is 1.6 % slower, and one of a 0.6B model as fast.
ROW_INPUTS, ROW_OUTPUTS, ROW_WARPS = 1024, 4, 4
MULTIPLE = 16  # of which the inputs of a single row's layer are a multiple, so that all its loads are wide
MAX_NORM = 16_384  # inputs of the widest norm that is computed inside a single row's layer


FORMAT_CODES: dict[type[KvFormat], int] = {
    PlainFormat: kernels.PLAIN.value,
    Int8Format: kernels.INT8.value,
    Fp8Format: kernels.FP8.value,
}


class TritonOps(KernelOps):
    """Operations by Triton kernels, on a GPU or in Triton's interpreter."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: str | None = None) -> Tensor:
        """By cuBLAS, or for a single row by a kernel that includes the gate."""
        if _is_row(x, weight):
            return _linear_row(x, None, None, 0.0, weight, bias, gate)[0]
        return super().linear(x, weight, bias, gate)

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
        """By one kernel, for a single row."""
        if not _is_row(x, weight) or x.shape[1] > MAX_NORM:
            return None
        return _linear_row(x, residual, norm_weight, eps, weight, bias, gate)

    def linear_int8(
        self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, gate: str | None = None
    ) -> Tensor:
        if len(x) > MAX_ROWS:
            return super().linear_int8(x, weight, scales, bias, gate)
        x, output, grid, rows = _product(x, weight)
        kernels.linear_int8[grid](
            x, weight, scales, bias, output, *output.shape, x.shape[1], x.stride(0),
            HAS_BIAS=bias is not None, OPERANDS=operands(x.dtype), BLOCK_M=rows, BLOCK_N=BLOCK_OUTS, BLOCK_K=BLOCK_INS,
            num_stages=STAGES[x.dtype],
        )  # fmt: skip
        return self.gated(output, gate)

    def linear_int4(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """By a kernel that unpacks the weight, for up to MAX_ROWS rows."""
        if len(x) > MAX_ROWS:
            return super().linear_int4(x, weight, scales, bias)
        x, output, grid, rows = _product(x, weight)
        kernels.linear_int4[grid](
            x, weight, scales, bias, output, *output.shape, x.shape[1], x.stride(0),
            HAS_BIAS=bias is not None, OPERANDS=operands(x.dtype), BLOCK_M=rows, BLOCK_N=BLOCK_OUTS, GROUP=INT4_GROUP,
            num_stages=STAGES[x.dtype],
        )  # fmt: skip
        return output

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
        x, dim = whole_rows(x), x.shape[-1]
        output = x.new_empty(x.shape)
        if residual is not None:
            residual = residual.contiguous()
        total = None if residual is None else torch.empty_like(output)
        block = triton.next_power_of_2(dim)
        kernels.rms_norm[(x.numel() // dim,)](
            x, residual, weight, output, total, x.stride(0), eps,
            INNER=x.shape[1] if x.dim() > 2 else 1, DIM=dim, BLOCK=block, HAS_RESIDUAL=residual is not None,
            num_warps=_num_warps(block),
        )  # fmt: skip
        return output, total

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """By a kernel that rotates whole heads; with fewer dimensions, on a slice."""
        if not (rotary_dim := 2 * cos.shape[1]):
            return x
        if rotary_dim < x.shape[-1]:
            return torch.cat((self.rope(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)
        x = x if x.stride(-1) == 1 else x.contiguous()
        output = x.new_empty(x.shape)
        num_tokens, num_heads, dim = x.shape
        kernels.rope[(num_tokens,)](
            x, cos, sin, output, *x.stride()[:2],
            NUM_HEADS=num_heads, HALF=dim // 2,
            BLOCK_H=triton.next_power_of_2(num_heads), BLOCK=triton.next_power_of_2(dim // 2),
        )  # fmt: skip
        return output

    def norm_rope_store(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        rope: tuple[Tensor, Tensor],
        caches: tuple[Tensor, Tensor],
        slots: Tensor,
        kv_format: KvFormat = PLAIN,
    ) -> Tensor:
        kv_heads, width = caches[0].shape[2:]
        dim = kv_format.head_dim(width)
        # The kernel writes scales apart, and Triton's interpreter does not round to fp8 as GPUs do.
        is_in_rows = not isinstance(kv_format, PlainFormat) and not kv_format.scales_apart
        if 2 * rope[0].shape[1] < dim or is_in_rows or (is_interpreted() and isinstance(kv_format, Fp8Format)):
            return super().norm_rope_store(qkv, norms, rope, caches, slots, kv_format)
        num_heads = qkv.shape[1] // dim - 2 * kv_heads
        query = qkv.new_empty((len(qkv), num_heads, dim))
        query_norm, key_norm, eps = (norms.query, norms.key, norms.eps) if norms else (None, None, 0.0)
        kernels.norm_rope_store[len(qkv), triton.cdiv(num_heads + 2 * kv_heads, HEADS)](
            qkv, query_norm, key_norm, *rope, query, *caches, slots, eps,
            NUM_HEADS=num_heads, NUM_KV_HEADS=kv_heads, HALF=dim // 2, BLOCK=triton.next_power_of_2(dim // 2),
            BLOCK_H=HEADS, HAS_NORMS=norms is not None, WIDTH=width, BLOCK_SIZE=caches[0].shape[1],
            FORMAT=FORMAT_CODES[type(kv_format)], LARGEST=kv_format.limit,
            **early_start(len(qkv) == 1 and starts_early(qkv.device)), num_warps=HEADS_WARPS,
        )  # fmt: skip
        return query

    def _gated(self, gate_up: Tensor, gate: str) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, inner = len(gate_up), gate_up.shape[1] // 2
        output = gate_up.new_empty((rows, inner))
        block = min(GATED_BLOCK, triton.next_power_of_2(inner))
        kernels.gated[rows, triton.cdiv(inner, block)](gate_up, output, inner, GATE=gate, BLOCK=block)
        return output

    def route(self, scores: Tensor, num_chosen: int, normalise: bool) -> tuple[Tensor, Tensor]:
        return route(scores, num_chosen, normalise)

    def mixture_of_experts(self, experts: Sequence[Expert]) -> MixtureOfExperts:
        """By kernels, if they can read the weights of all experts."""
        weights = [pair for expert in experts if (pair := expert.weights) and all(w.format in FORMATS for w in pair)]
        return TritonMixtureOfExperts(weights) if len(weights) == len(experts) else SequentialExperts(experts)

    def round_to_fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, dim = whole_rows(x), x.shape[1]
        output = torch.empty(x.shape, dtype=FP8, device=x.device)
        scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
        block = min(FP8_BLOCK, triton.next_power_of_2(dim))
        kernels.round_to_fp8[(len(x),)](
            x, output, scales, x.stride(0), dim, LARGEST=LARGEST_FP8, SMALLEST=SMALLEST_FP8_SCALE, BLOCK=block,
            num_warps=_num_warps(block),
        )  # fmt: skip
        return output, scales

    def norm_round_to_fp8(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By one kernel."""
        x, dim = whole_rows(x), x.shape[1]
        output = torch.empty(x.shape, dtype=FP8, device=x.device)
        scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
        total = x if residual is None else x.new_empty(x.shape)
        block = triton.next_power_of_2(dim)
        kernels.norm_round_to_fp8[(len(x),)](
            x, None if residual is None else residual.contiguous(), weight, output, scales, total, x.stride(0), eps,
            DIM=dim, BLOCK=block, HAS_RESIDUAL=residual is not None, LARGEST=LARGEST_FP8, SMALLEST=SMALLEST_FP8_SCALE,
            num_warps=_num_warps(block),
        )  # fmt: skip
        return output, scales, total

    def gate_round_to_fp8(self, x: Tensor, gate: str) -> tuple[Tensor, Tensor]:
        """By one kernel."""
        x, inner = whole_rows(x), x.shape[1] // 2
        output = torch.empty((len(x), inner), dtype=FP8, device=x.device)
        scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
        block = min(FP8_BLOCK, triton.next_power_of_2(inner))
        kernels.gate_round_to_fp8[(len(x),)](
            x, output, scales, x.stride(0), inner, GATE=gate, LARGEST=LARGEST_FP8, SMALLEST=SMALLEST_FP8_SCALE,
            BLOCK=block, num_warps=_num_warps(block),
        )  # fmt: skip
        return output, scales

    def draw(self, logits: Tensor, random: RandomRows) -> Tensor:
        """By one kernel, which does not wait for the device, with or without filters."""
        filters, count = random.filters, len(random.rows)
        of_filters = (filters.top_k, filters.top_p, filters.min_p) if filters else (None,) * 3
        of_rows = (random.rows, random.temperature, random.uniform, *of_filters, *(None,) * 9)
        candidates = _candidates(logits, count) if filters else (None, None)
        return _sample_rows(logits, of_rows, candidates, count, HAS_ROWS=True, CHANGES=False)

    def sample_rows(self, logits: Tensor, rows: StepRows, *, has_changes: bool) -> Tensor:
        """By one kernel, which does not wait for the device."""
        of_changes = (
            rows.input_ids, rows.flags, rows.marks, rows.biases, rows.mask_rows, rows.masks,
            rows.presence, rows.frequency, rows.repetition,
        ) if has_changes else (None,) * 9  # fmt: skip
        of_rows = (None, rows.temperature, rows.uniform, rows.top_k, rows.top_p, rows.min_p, *of_changes)
        candidates = _candidates(logits, len(logits))
        return _sample_rows(logits, of_rows, candidates, len(logits), HAS_ROWS=False, CHANGES=has_changes)

    def score_rows(self, logits: Tensor, rows: StepRows, token_ids: Tensor, num_top: int) -> LogprobTensors:
        """By one kernel. The results of rows without SCORED are not written."""
        count, vocab_size = logits.shape
        own, ranks = logits.new_empty(count), token_ids.new_empty(count)
        top_ids, top = token_ids.new_empty((count, num_top)), logits.new_empty((count, num_top))
        kernels_of_sampling.score_rows[(count,)](
            logits.contiguous(), rows.flags, token_ids, *_candidates(logits, count), own, ranks, top_ids, top,
            vocab_size, num_top, BLOCK=_logits_block(vocab_size), num_warps=LOGITS_WARPS,
        )  # fmt: skip
        return LogprobTensors(own, ranks, top_ids, top)

    def store_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        key, value = whole_rows(key), whole_rows(value)
        width = key.shape[1] * key.shape[2]
        kernels.store_kv[(len(key),)](
            key, value, key_cache, value_cache, slots, key.stride(0), value.stride(0),
            WIDTH=width, BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip


def _candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Memory for the logits and tokens that a sampling kernel collects."""
    shape = (count, kernels_of_sampling.CANDIDATES.value)
    return logits.new_empty(shape), torch.empty(shape, dtype=torch.int32, device=logits.device)


def _logits_block(vocab_size: int) -> int:
    # Triton's interpreter computes the places behind the row's end, too.
    return min(LOGITS_BLOCK, triton.next_power_of_2(vocab_size)) if is_interpreted() else LOGITS_BLOCK


def _sample_rows(
    logits: Tensor,
    of_rows: Sequence[Tensor | None],
    candidates: tuple[Tensor | None, Tensor | None],
    count: int,
    **constants: bool,
) -> Tensor:
    chosen = torch.empty(count, dtype=torch.int64, device=logits.device)
    vocab_size = logits.shape[1]
    kernels_of_sampling.sample_rows[(count,)](
        logits.contiguous(), *of_rows, *candidates, chosen, vocab_size, -(-vocab_size // 32), **constants,
        HAS_FILTERS=candidates[0] is not None, BIASES=MAX_BIASES + 1, BLOCK=_logits_block(vocab_size),
        num_warps=LOGITS_WARPS, **exact_rounding(),
    )  # fmt: skip
    return chosen


def _is_row(x: Tensor, weight: Tensor) -> bool:
    """Whether a layer is computed by `linear_row`."""
    return len(x) == 1 and x.shape[1] % MULTIPLE == 0 and weight.is_contiguous() and x.dtype == weight.dtype


def _linear_row(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    gate: str | None,
) -> tuple[Tensor, Tensor]:
    """A layer of a single row, with the norm before it and the gate after it. Also returns x + residual."""
    x, ins = x.contiguous(), x.shape[1]
    outs = len(weight) // 2 if gate else len(weight)
    output = x.new_empty((1, outs))
    total = x if residual is None else torch.empty_like(x)
    width = triton.next_power_of_2(ins)
    linear_row[(triton.cdiv(outs, ROW_OUTPUTS),)](
        x, residual if residual is None else residual.contiguous(), norm_weight, weight, bias, output, total, eps,
        OUTS=outs, INS=ins, BLOCK_N=ROW_OUTPUTS, BLOCK_K=min(ROW_INPUTS, width), BLOCK_D=width,
        HAS_NORM=norm_weight is not None, HAS_RESIDUAL=residual is not None, HAS_BIAS=bias is not None,
        GATE=gate or "", **early_start(starts_early(x.device)), num_warps=ROW_WARPS,
    )  # fmt: skip
    return output, total


def _product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, tuple[int, int], int]:
    """Returns the input with contiguous rows, an empty output, the grid and the number of rows per program."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows = max(MIN_ROWS, triton.next_power_of_2(len(x)))
    output = x.new_empty((len(x), len(weight)))
    return x, output, (triton.cdiv(len(weight), BLOCK_OUTS), triton.cdiv(len(x), rows)), rows


def _num_warps(block: int) -> int:
    return min(8, max(1, block // 512))
