"""Operations by the native CPU kernels (backend/native), in float32 and bfloat16.

In float32, the kernels compute every linear layer for any number of rows. So the result of a row is bitwise the same in
every batch. In bfloat16, the kernels multiply by weights that were packed when they were loaded. In two cases, torch
computes linear layers with many rows: on newer ARM CPUs, which have instructions for bfloat16, and with AVX-512 if a
weight's shape cannot be packed.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.huge_pages import HugePages
from backend.kv_cache.base import KvFormat
from backend.kv_cache.plain import PLAIN
from backend.native import library
from backend.native.library import DTYPES, KV_FORMATS, Caller, Library
from backend.ops.base import INT4_GROUP, HeadNorms, PackedBlocks, T, whole_rows
from backend.ops.experts import Expert, MixtureOfExperts, SequentialExperts
from backend.ops.int4 import SCALE_ENDS
from backend.ops.kernel_ops import KernelOps
from backend.ops.native_experts import BLOCK_SIZES, FORMATS, GATES, NativeMixtureOfExperts
from backend.ops.sampling import NO_RANDOM_ROWS, LogitBias, LogprobTensors, Penalties, RandomRows, RowPenalties

TILE = 16  # rows of an AMX tile: outputs, or words of inputs
# Half of the outputs in a panel of a packed weight. The outputs of a panel are summed together.
LANES = {"base": 4, "avx2": 8, "avx512": 16, "amx": TILE}
MAX_ROWS = 8  # rows by an unpacked bfloat16 weight; with more rows, torch is faster if it has the instructions
MAX_GROUPED_ROWS = 32  # rows by an unpacked four-bit weight; with more rows, the weight is expanded to bfloat16 first
MIN_SHARED_ITEMS = 1 << 14  # an operation on fewer items runs in one thread, because waking others costs more
IS_ARM = platform.machine().lower() in ("aarch64", "arm64")


def torch_has_products() -> bool:
    """Whether torch uses this CPU's bfloat16 instructions for matrix multiplications."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class NativeOps(KernelOps):
    """Operations by the native CPU kernels. Not thread-safe."""

    reads_mxfp4 = True

    def __init__(
        self, native: Library | None = None, level_name: str | None = None, num_threads: int | None = None
    ) -> None:
        """Loads the native kernels. Raises RuntimeError if they cannot be compiled.

        `num_threads` is the number of compute threads. None means as many as torch uses now.
        """
        native = native or library.load()
        if native is None:
            raise RuntimeError("the native kernels cannot be compiled on this machine")
        self._call = native.caller(num_threads or torch.get_num_threads(), level_name)
        level = self._call.level_name
        self._lanes = LANES[level]
        torch_is_faster = IS_ARM and torch_has_products()
        self._packs = not torch_is_faster
        self._max_rows = MAX_ROWS if torch_is_faster or level == "avx512" else 1 << 30
        self._pages = HugePages()  # for packed weights
        self._ends = torch.tensor(SCALE_ENDS, dtype=torch.float32)

    @property
    def call(self) -> Caller:
        """The caller that runs the native kernels."""
        return self._call

    def pack(self, weight: Tensor, dtype: torch.dtype, gate: str | None = None) -> Tensor:
        return self._pages.copy(self._panels(weight, dtype, gate))

    def to_int4(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        weight = weight.contiguous()
        outs, ins = weight.shape
        codes = weight.new_empty((outs, ins // 2), dtype=torch.uint8)
        scales = weight.new_empty((outs, ins // INT4_GROUP), dtype=torch.bfloat16)
        pointers = map(_pointer, (weight, self._ends, codes, scales))
        self._call(library.TO_INT4, *pointers, outs, ins, len(self._ends), DTYPES[weight.dtype])
        return codes, scales

    def pack_int4(self, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return self._pages.copy(self._int4_panels(weight, scales, dtype))

    def _panels(self, weight: Tensor, dtype: torch.dtype, gate: str | None) -> Tensor:
        """Returns a weight in the panel layout of packed_products.h. Returns the weight itself if it cannot be packed.

        The first dimension is the panels of outputs. With a gate, one half of a panel is gates and the other half is
        the outputs that they multiply. Without a gate, the two halves are neighbouring outputs. The layouts are:
        AMX: [panels, steps, 2, 16, 16, words]. AVX-512: [panels, in / words, 2, lanes, words]. On other CPUs, bfloat16:
        [panels, in, lanes, 2], and int8: [panels, in, 2, lanes].
        """
        if dtype is not torch.bfloat16 or weight.dtype not in (torch.bfloat16, torch.int8) or not self._packs:
            return weight
        outs, ins = weight.shape
        words = 2 if weight.dtype is torch.bfloat16 else 4
        unit = {"amx": words * TILE, "avx512": words}.get(self._call.level_name, 1)
        if outs % (2 * self._lanes) or ins % unit:
            return weight
        num_panels = outs // (2 * self._lanes)
        if gate is None:
            panels = weight.view(num_panels, 2, self._lanes, ins)
        else:
            panels = weight.view(2, num_panels, self._lanes, ins).transpose(0, 1)
        if self._call.level_name == "amx":
            return panels.view(*panels.shape[:3], -1, TILE, words).permute(0, 3, 1, 4, 2, 5)
        if self._call.level_name == "avx512":
            return panels.view(*panels.shape[:3], -1, words).permute(0, 3, 1, 2, 4)
        return panels.permute((0, 3, 2, 1) if words == 2 else (0, 3, 1, 2))

    def _int4_panels(self, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a four-bit weight in the panel layout of packed_products.h: [panels, in / 32, 9, lanes, 4] bytes.

        Returns the weight itself with AMX, which expands int4 to bfloat16 instead, and if it cannot be packed.
        """
        outs = len(weight)
        if dtype is not torch.bfloat16 or not self._packs or self._call.level_name == "amx" or outs % (2 * self._lanes):
            return weight
        halves = (outs // (2 * self._lanes), 2, self._lanes, scales.shape[1])  # of panels, [panels, 2, lanes, groups]
        groups = weight.view(*halves, INT4_GROUP // 2)
        codes = torch.cat((groups & 15, groups >> 4), dim=-1).view(*halves, INT4_GROUP // 4, 4)
        words = (codes[:, 0] | codes[:, 1] << 4).permute(0, 2, 3, 1, 4)  # [panels, groups, 8, lanes, 4]
        both_scales = (
            scales.view(halves).permute(0, 3, 2, 1).contiguous().view(torch.uint8)
        )  # [panels, groups, lanes, 4]
        return torch.cat((words, both_scales.unsqueeze(2)), dim=2)

    def _outs(self, weight: Tensor) -> int:
        """Returns the number of outputs of a weight, packed or not."""
        return weight.shape[0] * 2 * self._lanes if weight.dim() > 2 else len(weight)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Looks rows up in the packed weight, so that a tied embedding is in memory only once."""
        if weight.dim() == 2:
            return self.gather(weight, ids)
        out = weight.new_empty((len(ids), weight.numel() // self._outs(weight)))
        self._call(library.EMBED, weight.data_ptr(), ids.data_ptr(), out.data_ptr(), *out.shape, FORMATS["plain"])
        return out

    def packs_blocks(self, kind: str, outs: int, dtype: torch.dtype) -> bool:
        return dtype is torch.bfloat16 and outs % (2 * self._lanes) == 0

    def pack_blocks(self, blocks: Sequence[Tensor], kind: str, ins: int, gate: str | None = None) -> PackedBlocks:
        """Interleaves the blocks in panels (blocks.h): [panels, units, bytes of a unit]."""
        outs, panel = sum(map(len, blocks)), 2 * self._lanes
        unit, bytes_per_output = BLOCK_SIZES[kind]
        panels = self._pages.zeros((outs // panel, ins // unit, bytes_per_output * panel), torch.uint8)
        # With a gate, a panel has outputs of both halves; without one, a panel is packed from one tensor. Tensors that
        # end elsewhere are joined, which copies them.
        ends_fit = all(len(part) == outs // 2 if gate else len(part) % panel == 0 for part in blocks)
        is_one = len(blocks) == 1
        parts = [part.contiguous() for part in (blocks if ends_fit or is_one else [torch.cat(tuple(blocks))])]
        if gate:
            first, second = parts if len(parts) == 2 else parts[0].chunk(2)
            self._pack_panels(first, second, panels, outs, ins, kind)
            return PackedBlocks(kind, panels, outs, ins)
        packed = 0
        for part in parts:
            self._pack_panels(part, None, panels[packed // panel :], len(part), ins, kind)
            packed += len(part)
        return PackedBlocks(kind, panels, outs, ins)

    def _pack_panels(
        self, blocks: Tensor, gated: Tensor | None, panels: Tensor, outs: int, ins: int, kind: str
    ) -> None:
        pointers = (blocks.data_ptr(), _pointer(gated), panels.data_ptr())
        self._call(library.PACK_BLOCKS, *pointers, outs, ins, FORMATS[kind])

    def linear_blocks(
        self, x: Tensor, parts: Sequence[PackedBlocks], bias: Tensor | None, gate: str | None = None
    ) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        rows, outs = len(x), sum(part.outs for part in parts)
        out = x.new_empty((rows, outs // 2 if gate else outs))
        first = 0
        for part in parts:
            self._call(
                library.LINEAR,
                x.data_ptr(), part.values.data_ptr(), 0, _pointer(bias, first), _pointer(out, first),
                rows, part.outs, part.ins, x.stride(0), DTYPES[x.dtype], FORMATS[part.kind], True, GATES[gate],
                out.shape[1], threaded=rows * part.outs * part.ins >= MIN_SHARED_ITEMS * 4,
            )  # fmt: skip
            first += part.outs
        return out

    def embedding_blocks(self, ids: Tensor, weight: PackedBlocks) -> Tensor:
        out = ids.new_empty((len(ids), weight.ins), dtype=torch.bfloat16)
        pointers = map(_pointer, (weight.values, ids.contiguous(), out))
        self._call(library.EMBED, *pointers, *out.shape, FORMATS[weight.kind])
        return out

    def gather(self, table: Tensor, ids: Tensor) -> Tensor:
        """As in `Ops`. The ids are not checked."""
        assert table.is_contiguous()
        ids = ids.contiguous()
        out = table.new_empty((len(ids), table.shape[1]))
        self._call(
            library.GATHER,
            table.data_ptr(), ids.data_ptr(), out.data_ptr(), len(ids), table.shape[1] * table.element_size(),
            threaded=out.numel() >= MIN_SHARED_ITEMS,
        )  # fmt: skip
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape)
        fields = (x.data_ptr(), out.data_ptr(), *x.shape, DTYPES[x.dtype], factor)
        self._call(library.SCALE, *fields, threaded=out.numel() >= MIN_SHARED_ITEMS)
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.contiguous(), y.contiguous()
        out = torch.empty_like(x)
        pointers = map(_pointer, (x, y, out))
        self._call(library.ADD, *pointers, *x.shape, DTYPES[x.dtype], threaded=out.numel() >= MIN_SHARED_ITEMS)
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: str | None = None) -> Tensor:
        """By the kernels if the weight is packed, for few rows and in float32; otherwise by torch."""
        if weight.dim() > 2:
            return self._product(x, weight, None, bias, self._outs(weight), "plain", gate)
        if len(x) > self._max_rows and x.dtype is torch.bfloat16:
            return self.gated(F.linear(x, weight, bias), gate)
        return self.gated(self._product(x, weight, None, bias, len(weight), "plain"), gate)

    def linear_int8(
        self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, gate: str | None = None
    ) -> Tensor:
        if weight.dim() > 2:
            return self._product(x, weight, scales, bias, self._outs(weight), "int8", gate)
        if len(x) > self._max_rows and x.dtype is torch.bfloat16:
            return self.gated(F.linear(x, self._expanded(weight, scales, x, "int8"), bias), gate)
        return self.gated(self._product(x, weight, scales, bias, len(weight), "int8"), gate)

    def linear_int4(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        return self._grouped(x, weight, scales, bias, "int4")

    def linear_mxfp4(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        return self._grouped(x, weight, scales, bias, "mxfp4")

    def _grouped(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, format: str) -> Tensor:
        if weight.dim() > 2:
            return self._product(x, weight, None, bias, self._outs(weight), format)
        if len(x) > min(self._max_rows, MAX_GROUPED_ROWS) and x.dtype is torch.bfloat16:
            return self.linear(x, self._expanded(weight, scales, x, format), bias)
        return self._product(x, weight, scales, bias, len(weight), format)

    def _product(
        self,
        x: Tensor,
        weight: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        outs: int,
        format: str,
        gate: str | None = None,
    ) -> Tensor:
        """Computes a linear layer by the kernels. The kernels apply a gate only with packed weights."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        rows, ins = x.shape
        out = x.new_empty((rows, outs // 2 if gate else outs))
        self._call(
            library.LINEAR,
            x.data_ptr(), weight.data_ptr(), _pointer(scales), _pointer(bias), out.data_ptr(),
            rows, outs, ins, x.stride(0), DTYPES[x.dtype], FORMATS[format], weight.dim() > 2, GATES[gate], 0,
            threaded=rows * outs * ins >= MIN_SHARED_ITEMS * 4,
        )  # fmt: skip
        return out

    def _expanded(self, weight: Tensor, scales: Tensor, x: Tensor, format: str) -> Tensor:
        """Returns a quantised weight expanded to x's dtype, [out, in]."""
        out = x.new_empty((len(weight), x.shape[-1]))
        fields = (weight.data_ptr(), scales.data_ptr(), out.data_ptr(), *out.shape, DTYPES[x.dtype], FORMATS[format])
        self._call(library.EXPAND, *fields)
        return out

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
        *_, inner, dim = (1, *x.shape)[-3:] if x.dim() > 2 else (1, 1, x.shape[-1])
        x = whole_rows(x)
        out = x.new_empty(x.shape)
        if residual is not None:
            residual = residual.contiguous()
        total = None if residual is None else torch.empty_like(out)
        self._call(
            library.RMS_NORM,
            x.data_ptr(), _pointer(residual), weight.data_ptr(), out.data_ptr(), _pointer(total),
            x.shape[0], x.stride(0), inner, dim, DTYPES[x.dtype], DTYPES[weight.dtype], eps,
            threaded=out.numel() >= MIN_SHARED_ITEMS,
        )  # fmt: skip
        return out, total

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = whole_rows(x)
        out = x.new_empty(x.shape)
        self._call(
            library.ROPE,
            x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
            len(x), x.stride(0), *x.shape[1:], 2 * cos.shape[1], DTYPES[x.dtype],
            threaded=out.numel() >= MIN_SHARED_ITEMS,
        )  # fmt: skip
        return out

    def _gated(self, gate_up: Tensor, gate: str) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, inner = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, inner))
        fields = (gate_up.data_ptr(), out.data_ptr(), rows, inner, DTYPES[out.dtype], GATES[gate])
        self._call(library.GATED, *fields, threaded=out.numel() >= MIN_SHARED_ITEMS)
        return out

    def to_packed_order(self, values: T, weight: Tensor, gate: str | None) -> T:
        if values is None or gate is None or weight.dim() == 2:
            return values
        return values.view(2, -1, self._lanes).transpose(0, 1).flatten()

    def from_packed_order(self, product: Tensor, weight: Tensor, gate: str | None) -> Tensor:
        if gate is None or weight.dim() == 2:
            return product
        return product.view(len(product), -1, 2, self._lanes).transpose(1, 2).flatten(1)

    def norm_rope_store(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        rope: tuple[Tensor, Tensor],
        caches: tuple[Tensor, Tensor],
        slots: Tensor,
        kv_format: KvFormat = PLAIN,
    ) -> Tensor:
        if kv_format.scales_apart:  # as Triton's attention reads it, which the kernel does not write
            return super().norm_rope_store(qkv, norms, rope, caches, slots, kv_format)
        kv_heads, dim = caches[0].shape[2], kv_format.head_dim(caches[0].shape[3])
        heads = qkv.shape[1] // dim - 2 * kv_heads
        query = qkv.new_empty((qkv.shape[0], heads, dim))
        weights = (norms.query.data_ptr(), norms.key.data_ptr()) if norms else (0, 0)
        self._call(
            library.NORM_ROPE_STORE,
            qkv.data_ptr(), *weights, rope[0].data_ptr(), rope[1].data_ptr(), query.data_ptr(),
            caches[0].data_ptr(), caches[1].data_ptr(), slots.data_ptr(),
            qkv.shape[0], qkv.stride(0), heads, kv_heads, dim, 2 * rope[0].shape[1],
            DTYPES[qkv.dtype], DTYPES[norms.query.dtype] if norms else 0, KV_FORMATS[kv_format.name],
            norms.eps if norms else 0.0,
            threaded=qkv.numel() >= MIN_SHARED_ITEMS,
        )  # fmt: skip
        return query

    def route(self, scores: Tensor, num_chosen: int, normalise: bool) -> tuple[Tensor, Tensor]:
        scores = scores.contiguous()
        weights = scores.new_empty((len(scores), num_chosen), dtype=torch.float32)
        chosen = scores.new_empty((len(scores), num_chosen), dtype=torch.int64)
        pointers = map(_pointer, (scores, weights, chosen))
        self._call(library.ROUTE, *pointers, *scores.shape, num_chosen, DTYPES[scores.dtype], normalise)
        return weights, chosen

    def mixture_of_experts(self, experts: Sequence[Expert]) -> MixtureOfExperts:
        """One native operation, if the kernels can read the weights of all experts."""
        weights = [pair for expert in experts if (pair := expert.weights) and all(w.format in FORMATS for w in pair)]
        if not self._packs or len(weights) < len(experts):
            return SequentialExperts(experts)
        first, second = weights[0]
        return NativeMixtureOfExperts(self._call, weights, self._outs(second.values), self._outs(first.values) // 2)

    def store_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        key, value = whole_rows(key), whole_rows(value)
        size = key.element_size()
        self._call(
            library.STORE_KV,
            key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), slots.data_ptr(),
            len(key), key.stride(0) * size, value.stride(0) * size, key.shape[1] * key.shape[2] * size,
            threaded=key.numel() >= MIN_SHARED_ITEMS,
        )  # fmt: skip

    def logits(self, x: Tensor, factor: float, softcap: float | None) -> Tensor:
        if x.dtype is torch.float32 and factor == 1.0 and softcap is None:
            return x
        x = x.contiguous()
        out = x.new_empty(x.shape, dtype=torch.float32)
        fields = (x.data_ptr(), out.data_ptr(), *x.shape, DTYPES[x.dtype], factor, softcap or 0.0)
        self._call(library.LOGITS, *fields, threaded=out.numel() >= MIN_SHARED_ITEMS)
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        logits = logits.contiguous()
        chosen = logits.new_empty(len(logits), dtype=torch.int64)
        self._call(library.ARGMAX, logits.data_ptr(), chosen.data_ptr(), *logits.shape, DTYPES[logits.dtype])
        return chosen

    def penalise(self, logits: Tensor, penalties: Penalties) -> Tensor:
        logits, entries = logits.contiguous(), penalties.entries
        columns = (penalties.output_counts, penalties.presence, penalties.frequency, penalties.repetition)
        pointers = map(_pointer, (logits, entries.rows, entries.token_ids, *columns))
        size = len(entries.rows)
        self._call(library.PENALISE, *pointers, size, logits.shape[1], threaded=size >= MIN_SHARED_ITEMS)
        return logits

    def add_bias(self, logits: Tensor, bias: LogitBias) -> Tensor:
        logits = logits.contiguous()
        pointers = map(_pointer, (logits, bias.entries.rows, bias.entries.token_ids, bias.values))
        self._call(library.ADD_BIAS, *pointers, len(bias.values), logits.shape[1], threaded=False)
        return logits

    def forbid(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> Tensor:
        logits = logits.contiguous()
        pointers = map(_pointer, (logits, rows, allowed))
        self._call(library.FORBID, *pointers, len(rows), logits.shape[1], allowed.shape[1])
        return logits

    def choose(self, scores: Tensor, random: RandomRows | None, penalties: RowPenalties | None) -> Tensor:
        """One operation, which reads the scores in their own dtype and does not change them."""
        if random is None and penalties is None:
            return self.argmax(scores)
        if random is None or len(random.rows) < len(scores):
            random = (random or NO_RANDOM_ROWS).among(*scores.shape)
        return self._draw(scores, random, penalties)

    def draw(self, logits: Tensor, random: RandomRows) -> Tensor:
        return self._draw(logits, random, None)

    def _draw(self, logits: Tensor, random: RandomRows, penalties: RowPenalties | None) -> Tensor:
        """The kernel also takes a temperature of 0. Penalties: of all rows, which must be random ones then."""
        logits, filters = logits.contiguous(), random.filters
        chosen = logits.new_empty(len(random.rows), dtype=torch.int64)
        limits = (filters.top_k, filters.top_p, filters.min_p) if filters else (None, None, None)
        pointers = map(_pointer, (logits, random.rows, random.temperature, random.uniform, *limits, chosen))
        occurred, factors = 0, 0
        if penalties:
            table = penalties.table()
            occurred, factors = table.ctypes.data, penalties.factors.ctypes.data
        self._call(library.DRAW, *pointers, len(chosen), logits.shape[1], DTYPES[logits.dtype], occurred, factors)
        return chosen

    def logprobs(self, logits: Tensor, rows: Tensor | None, token_ids: Tensor, num_top: int) -> LogprobTensors:
        logits, size = logits.contiguous(), (len(token_ids), min(num_top, logits.shape[1]))
        own, ranks = logits.new_empty(size[0]), token_ids.new_empty(size[0])
        top_ids, top = token_ids.new_empty(size), logits.new_empty(size)
        pointers = map(_pointer, (logits, rows, token_ids.contiguous(), own, ranks, top_ids, top))
        self._call(library.LOGPROBS, *pointers, size[0], logits.shape[1], size[1])
        return LogprobTensors(own, ranks, top_ids, top)


def _pointer(tensor: Tensor | None, first: int = 0) -> int:
    """The address of a tensor's element number `first`."""
    return 0 if tensor is None else tensor.data_ptr() + first * tensor.element_size()
