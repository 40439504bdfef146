"""Reads the config.json of encoders: BERT, RoBERTa and XLM-RoBERTa."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.engine.errors import UnsupportedModel
from backend.model_files.base import ModelFiles

# By architecture: the checkpoint's name of the encoder, in front of its tensors' names.
ENCODERS = {
    "BertModel": "bert",
    "BertForSequenceClassification": "bert",
    "RobertaModel": "roberta",
    "RobertaForSequenceClassification": "roberta",
    "XLMRobertaModel": "roberta",
    "XLMRobertaForSequenceClassification": "roberta",
}
ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}  # torch's approximation by name


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Settings of an encoder that a decoder does not have."""

    name: str  # "bert" or "roberta"
    layer_norm_eps: float
    num_positions: int  # rows of the table of position embeddings
    first_position: int  # the row of the first token
    num_types: int  # rows of the table of segment embeddings
    separator_id: int | None  # the token that ends a segment; tokens after the first one belong to the second segment
    gelu: str  # torch's name of the approximation


def read_encoder(files: ModelFiles, raw: Mapping[str, Any]) -> EncoderConfig | None:
    """Returns the settings of an encoder, or None for a decoder. Raises `UnsupportedModel`."""
    (name, *_) = raw.get("architectures") or [""]
    if name not in ENCODERS:
        return None
    kind = ENCODERS[name]
    if (positions := raw.get("position_embedding_type", "absolute")) != "absolute":
        raise UnsupportedModel(f"position_embedding_type {positions!r} is not supported, only 'absolute'")
    if (activation := raw.get("hidden_act", "gelu")) not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    num_types = raw.get("type_vocab_size", 2)
    return EncoderConfig(
        name=kind,
        layer_norm_eps=raw.get("layer_norm_eps", 1e-12),
        num_positions=raw["max_position_embeddings"],
        first_position=0 if kind == "bert" else raw.get("pad_token_id", 1) + 1,  # fairseq's layout of the table
        num_types=num_types,
        separator_id=_separator_id(files) if num_types > 1 else None,
        gelu=ACTIVATIONS[activation],
    )


def _separator_id(files: ModelFiles) -> int | None:
    named = files.tokenizer_config().get("sep_token", "[SEP]")
    found: int | None = files.tokenizer().token_to_id(named["content"] if isinstance(named, Mapping) else named)
    return found
