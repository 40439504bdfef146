"""Reads the fields of config.json that only DeepSeek's models have: multi-head latent attention and the experts' gate.

Sources: DeepSeek V2 (arXiv 2405.04434, sections 2.1 and 2.2), DeepSeek V3 (arXiv 2412.19437, section 2.1), and their
implementations in transformers. Functions raise `UnsupportedModel`, or KeyError for a missing field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.engine.errors import UnsupportedModel

DEEPSEEK_V2, DEEPSEEK_V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
DEEPSEEK = frozenset({DEEPSEEK_V2, DEEPSEEK_V3})
GREEDY, GROUP_LIMITED, BIASED = "greedy", "group_limited_greedy", "noaux_tc"  # values of topk_method


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Settings of multi-head latent attention: the sizes of latents, and of the parts of a head."""

    query_rank: int | None  # size of the latent of queries; None: they are computed from the hidden state
    rank: int  # size of the latent of keys and values
    plain_dim: int  # dimensions of a query or key head that are not rotated
    rotated_dim: int
    value_dim: int
    rotates_neighbours: bool  # whether rotary pairs are neighbouring dimensions in the checkpoint

    @property
    def head_dim(self) -> int:
        """The dimensions of a query or key head."""
        return self.plain_dim + self.rotated_dim


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Settings of a gate that chooses groups of experts first, and then experts of these groups."""

    scoring: str  # function of the router's results: "softmax" or "sigmoid"
    num_groups: int
    groups_per_token: int
    best_per_group: int  # a group's score is the sum of so many of its best scores
    has_bias: bool  # whether a trained bias is added to the scores by which experts are chosen
    scale: float  # factor of the weights


def read_latent(raw: Mapping[str, Any]) -> LatentConfig | None:
    """Reads the settings of latent attention. None for an architecture without it."""
    if raw["architectures"][0] not in DEEPSEEK:
        return None
    latent = LatentConfig(
        query_rank=raw["q_lora_rank"],
        rank=raw["kv_lora_rank"],
        plain_dim=raw["qk_nope_head_dim"],
        rotated_dim=raw["qk_rope_head_dim"],
        value_dim=raw["v_head_dim"],
        rotates_neighbours=raw.get("rope_interleave", True),
    )
    if latent.value_dim > latent.head_dim:
        raise UnsupportedModel(
            f"v_head_dim {latent.value_dim} is not supported, at most {latent.head_dim}, the size of a key head"
        )
    num_heads = raw["num_attention_heads"]
    if (num_kv_heads := raw.get("num_key_value_heads") or num_heads) != num_heads:
        raise UnsupportedModel(f"num_key_value_heads {num_kv_heads} is not supported, only {num_heads}, one per head")
    if raw.get("attention_bias") and latent.query_rank is None:
        raise UnsupportedModel("attention_bias is not supported without q_lora_rank")
    if raw.get("mlp_bias"):
        raise UnsupportedModel("mlp_bias is not supported for this architecture")
    return latent


def is_sparse(raw: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts."""
    is_late = layer >= raw.get("first_k_dense_replace", 0)
    return bool(raw.get("n_routed_experts")) and is_late and layer % raw.get("moe_layer_freq", 1) == 0


def read_gate(raw: Mapping[str, Any]) -> GateConfig:
    """Reads the settings of the experts' gate."""
    is_v3 = raw["architectures"][0] == DEEPSEEK_V3
    scoring, methods = ("sigmoid", (BIASED,)) if is_v3 else ("softmax", (GREEDY, GROUP_LIMITED))
    method = _one_of(raw, "topk_method", methods)
    _one_of(raw, "scoring_func", (scoring,))
    if raw.get("norm_topk_prob") and not is_v3:
        # transformers ignores the field, DeepSeek's own code then omits routed_scaling_factor, and vLLM applies both.
        raise UnsupportedModel("norm_topk_prob is not supported for DeepSeek V2, of which no published model has it")
    num_groups, per_token = (1, 1) if method == GREEDY else (raw["n_group"], raw["topk_group"])
    gate = GateConfig(scoring, num_groups, per_token, 2 if is_v3 else 1, is_v3, float(raw["routed_scaling_factor"]))
    num_experts = raw["n_routed_experts"]
    if num_experts % num_groups or not 1 <= per_token <= num_groups:
        raise UnsupportedModel(f"n_group {num_groups} and topk_group {per_token} do not divide {num_experts} experts")
    size = num_experts // num_groups
    if (chosen := raw["num_experts_per_tok"]) > per_token * size or (num_groups > 1 and size < gate.best_per_group):
        raise UnsupportedModel(f"n_group {num_groups} leaves groups of {size} experts, too few to choose {chosen}")
    return gate


def _one_of(raw: Mapping[str, Any], field: str, supported: tuple[str, ...]) -> str:
    """Returns a field, which config.json may omit if it has the first of the supported values."""
    if (value := raw.get(field) or supported[0]) not in supported:
        raise UnsupportedModel(f"{field} {value!r} is not supported for this architecture, only {', '.join(supported)}")
    return str(value)
