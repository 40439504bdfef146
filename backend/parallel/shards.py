"""What each rank holds of a model: the sizes of its part, and its part of each tensor of the checkpoint.

Matrices that make heads or inner values are divided by their outputs, and those that read these by their inputs:

    by outputs   query, key and value projections (whole heads), gate and up projections, attention sinks
    by inputs    output projection of attention, down projection; their biases are added by rank 0 only
    by tokens    embedding and output head: consecutive rows, the last rank's padded with zeros
    whole        everything else: norms, but not those over all heads; routers of experts; projections to the latent of
                 DeepSeek's attention

The classes of layers ask for tensors in the sizes of the part, so a tensor with another shape than expected is an error
as without tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backend.engine.errors import ConfigError
from backend.model_files.quantized_tensor import StoredTensor, dequantized
from backend.models.config import ExpertsConfig, LayerConfig, ModelConfig

PARAM = "tensor_parallel_size"
NORMS_OF_ALL_HEADS = frozenset({"Olmo2ForCausalLM"})  # whose norms of queries and keys have a weight for each head

Ranges = Callable[[int], list[range]]  # from a dimension's size to this rank's parts of it


def check_divisible(model: ModelConfig, size: int) -> None:
    """Raises `ConfigError` if `size` ranks cannot share a model."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"{PARAM} {size} does not fit this model: {why}", param=PARAM)

    if model.encoder is not None:
        raise refuse("encoders are computed by one process")
    if model.classifier and model.classifier.token_ids:
        raise refuse("its score is made of logits of tokens")
    if model.num_heads % size:
        raise refuse(f"{model.num_heads} attention heads are not a multiple of it")
    if model.num_kv_heads % size and size % model.num_kv_heads:
        raise refuse(f"{model.num_kv_heads} key/value heads are neither a multiple nor a divisor of it")
    for what, width in _widths(model):
        if width % size:
            raise refuse(f"the {what} of {width} is not a multiple of it")


def _widths(model: ModelConfig) -> set[tuple[str, int]]:
    widths = set()
    for layer in model.layers:
        if layer.experts is None:
            widths.add(("intermediate size", model.intermediate_size))
        else:
            widths.add(("experts' intermediate size", layer.experts.intermediate_size))
            widths.add(("shared experts' intermediate size", layer.experts.shared_size))
    return widths


def config_of_part(model: ModelConfig, size: int) -> ModelConfig:
    """The configuration of one rank's part. All parts have the same sizes."""

    def experts(whole: ExpertsConfig | None) -> ExpertsConfig | None:
        if whole is None:
            return None
        inner, shared = whole.intermediate_size // size, whole.shared_size // size
        return replace(whole, intermediate_size=inner, shared_size=shared)

    def layer(whole: LayerConfig) -> LayerConfig:
        return replace(whole, experts=experts(whole.experts))

    return replace(
        model,
        vocab_size=-(-model.vocab_size // size),
        intermediate_size=model.intermediate_size // size,
        num_heads=model.num_heads // size,
        num_kv_heads=max(1, model.num_kv_heads // size),
        layers=tuple(map(layer, model.layers)),
    )


@dataclass(frozen=True, slots=True)
class _Rule:
    """Along which dimension a tensor is divided."""

    dim: int
    ranges: Ranges


class Shards:
    """One rank's parts of the tensors of a model, which `check_divisible` accepts."""

    def __init__(self, model: ModelConfig, rank: int, size: int) -> None:
        self._model, self._rank, self._size = model, rank, size
        self.vocab_size = model.vocab_size
        rows = -(-model.vocab_size // size)
        self.vocab_rows = range(rank * rows, (rank + 1) * rows)  # may end behind the last token
        self._rules = self._make_rules()

    def part(self, name: str, tensor: StoredTensor) -> StoredTensor:
        """This rank's part of a tensor with the checkpoint's name."""
        key = _key(name)
        if key in ("embed_tokens.weight", "lm_head.weight"):
            return self._vocab_part(dequantized(tensor))
        if key in OF_RANK_0:
            return tensor if self._rank == 0 else torch.zeros_like(dequantized(tensor))
        rule = self._rules.get(key)
        if rule is None:
            return tensor
        whole = dequantized(tensor)
        parts = [whole.narrow(rule.dim, r.start, len(r)) for r in rule.ranges(whole.shape[rule.dim])]
        # A copy, so that only this part of a mapped file is read, and stays in memory.
        return torch.cat(parts, dim=rule.dim)

    def _vocab_part(self, whole: Tensor) -> Tensor:
        """The rows of this rank's tokens, and zeros behind the last one."""
        known = whole[self.vocab_rows.start : self.vocab_rows.stop]
        if len(known) == len(self.vocab_rows):
            return known.clone()
        part = whole.new_zeros((len(self.vocab_rows), *whole.shape[1:]))
        part[: len(known)] = known
        return part

    def _make_rules(self) -> Mapping[str, _Rule]:
        by_outputs = dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"), self._even)
        by_outputs |= {"w1": self._even, "w3": self._even, "gate_up_proj": self._halves}
        by_outputs |= {"k_proj": self._kv_heads, "v_proj": self._kv_heads, "qkv_proj": self._heads}
        rules = {f"{name}.{kind}": _Rule(0, way) for name, way in by_outputs.items() for kind in ("weight", "bias")}
        rules |= {f"{name}.weight": _Rule(1, self._even) for name in ("o_proj", "down_proj", "w2")}
        rules["sinks"] = _Rule(0, self._even)
        if self._model.architecture in NORMS_OF_ALL_HEADS:
            rules |= {"q_norm.weight": _Rule(0, self._even), "k_norm.weight": _Rule(0, self._kv_heads)}
        # gpt-oss stores all experts of a layer as one tensor, in which outputs of gate and up alternate.
        rules |= {"gate_up_proj": _Rule(2, self._even), "down_proj": _Rule(1, self._even)}
        rules |= {f"gate_up_proj_{kind}": _Rule(1, self._even) for kind in ("bias", "blocks", "scales")}
        rules |= {f"down_proj_{kind}": _Rule(2, self._even) for kind in ("blocks", "scales")}
        return rules

    def _even(self, length: int) -> list[range]:
        return [range(self._rank * length // self._size, (self._rank + 1) * length // self._size)]

    def _halves(self, length: int) -> list[range]:
        (part,) = self._even(length // 2)
        return [part, range(length // 2 + part.start, length // 2 + part.stop)]

    def _kv_heads(self, length: int) -> list[range]:
        """Whole heads; with more ranks than heads, neighbouring ranks have the same one."""
        heads = self._model.num_kv_heads
        head_dim = length // heads
        first, count = self._rank * heads // self._size, max(1, heads // self._size)
        return [range(first * head_dim, (first + count) * head_dim)]

    def _heads(self, length: int) -> list[range]:
        """The ranges in a tensor with all query heads, then all key heads, then all value heads."""
        of_queries = self._model.num_heads * self._model.head_dim
        of_keys = (length - of_queries) // 2
        (query,), (key,) = self._even(of_queries), self._kv_heads(of_keys)
        first = of_queries + key.start
        return [query, range(first, first + len(key)), range(first + of_keys, first + of_keys + len(key))]


# Biases of what the ranks' results are summed to.
OF_RANK_0 = frozenset({"o_proj.bias", "down_proj.bias", "w2.bias", "down_proj_bias"})


def _key(name: str) -> str:
    """What a tensor's name ends with: `o_proj.weight`, but `sinks` for a tensor that is no module's."""
    *_, module, last = ("", *name.split("."))
    return f"{module}.{last}" if last in ("weight", "bias") else last
