"""What a model's authors do with its hidden states: embed, score a pair of texts, or generate.

`read_pooling` finds it in config.json, in the files of sentence-transformers (modules.json and one folder per module),
and in `overrides`, which replace fields of config.json and have vLLM's names (`--hf-overrides`):

    architectures                 a head on top of a decoder, for example Qwen3ForSequenceClassification
    classifier_from_token, method the tokens whose logits are the score, and whether the second is compared to the first
    is_original_qwen3_reranker    Qwen3-Reranker as published: "yes" compared to "no", in its own prompt
    is_matryoshka, matryoshka_dimensions   whether embeddings may be shortened, and to which lengths
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from backend.engine.errors import ConfigError, UnsupportedModel
from backend.engine.pooling import Pooling
from backend.model_files.base import ModelFiles

GENERATES, CLASSIFIES, EMBEDS = "ForCausalLM", "ForSequenceClassification", "Model"  # ends of architectures' names
DEFAULT_NUM_LABELS = 2  # transformers' default, which config.json omits
TWO_WAY, ONE_WAY = "from_2_way_softmax", "no_post_processing"  # vLLM's values of `method`

# Values of `pooling_mode` in sentence-transformers 5, and the names of the flags that older versions write.
_MODES = {"mean": Pooling.MEAN, "lasttoken": Pooling.LAST, "cls": Pooling.CLS}
_FLAGS = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_cls_token": Pooling.CLS,
}
_ACTIVATIONS = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.linear.Identity": "identity",
}


class _ScoreSettings(msgspec.Struct):
    activation_fn: str | None = None


class _Fields(msgspec.Struct):
    """The fields of config.json that say what a model is for, with their types."""

    architectures: list[str] | None = None
    num_labels: int | None = None
    id2label: dict[str, Any] | None = None
    method: str | None = None
    is_original_qwen3_reranker: bool | None = None
    is_matryoshka: bool | None = None
    matryoshka_dimensions: list[int] | None = None
    sentence_transformers: _ScoreSettings | None = None
    sbert_ce_default_activation_function: str | None = None


class _ModuleFields(msgspec.Struct):
    """Those of a module's config.json."""

    pooling_mode: str | list[str] | None = None
    true_token_id: int | None = None
    false_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Classifier:
    """The head that scores: a linear layer of the checkpoint, or one made of rows of the output head.

    `token_ids` has one token, whose logit is the score, or two: the score is the difference of the logits of the first
    and the second. It is empty if the checkpoint has the layer.
    """

    num_labels: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """What a model can be asked for, and how."""

    pooling: Pooling
    normalise: bool = True  # embeddings have length 1
    embeds: bool = False  # the model's files say that it is for embeddings
    generates: bool = True
    classifier: Classifier | None = None
    activation: str = "sigmoid"  # from a score's logit to the score: "sigmoid", "tanh" or "identity"
    matryoshka: frozenset[int] | None = None  # lengths to which an embedding may be shortened; empty: any
    is_qwen3_reranker: bool = False  # scores by the prompt of Qwen3-Reranker, unless the model has a template for pairs


def read_pooling(files: ModelFiles, overrides: Mapping[str, Any]) -> PoolingConfig:
    """Reads what a model is for. Raises `ConfigError`, or `UnsupportedModel` for a module that is not implemented."""
    config = {**files.config(), **overrides}
    _check(config, _Fields, "config.json with hf_overrides")
    modules = {name.rpartition(".")[2]: settings for name, settings in files.modules()}
    for name, settings in modules.items():
        _check(settings, _ModuleFields, f"config.json of the module {name}")
    if unknown := modules.keys() - {"Transformer", "Pooling", "Normalize", "LogitScore", "CausalScoreHead"}:
        raise UnsupportedModel(f"modules.json: the module {min(unknown)} is not supported")
    name = _architecture(config)
    classifier = _classifier(files, config, modules, name)
    pooled = None if classifier else modules.get("Pooling")
    return PoolingConfig(
        pooling=_default_pooling(name, scores=classifier is not None) if pooled is None else _pooling(pooled),
        normalise=pooled is None or "Normalize" in modules,
        embeds=classifier is None and (pooled is not None or _is_headless(name)),
        generates=classifier is None and pooled is None and not _is_headless(name),
        classifier=classifier,
        activation=_activation(config),
        matryoshka=_matryoshka(config),
        is_qwen3_reranker=bool(config.get("is_original_qwen3_reranker"))
        or (classifier is not None and len(classifier.token_ids) == 2 and name.startswith("Qwen3")),
    )


def _check(fields: Mapping[str, Any], types: type[msgspec.Struct], where: str) -> None:
    """Raises `ConfigError` if one of the fields has another type than expected."""
    try:
        msgspec.convert(fields, types)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}", param="hf_overrides") from error


def decoder_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json with the architecture that has the same decoder and generates."""
    name = _architecture(config)
    for end in (CLASSIFIES, EMBEDS):
        if name.endswith(end):
            name = name.removesuffix(end).removesuffix("Text") + GENERATES
    return {**config, "architectures": [name]}


def _default_pooling(architecture: str, *, scores: bool) -> Pooling:
    """The default as in vLLM, except that embeddings of generative models are means."""
    if architecture.startswith(("Bert", "Roberta", "XLMRoberta")):
        return Pooling.CLS
    return Pooling.MEAN if architecture.endswith(GENERATES) and not scores else Pooling.LAST


def _architecture(config: Mapping[str, Any]) -> str:
    return " and ".join(config.get("architectures") or ["(none named)"])


def _is_headless(architecture: str) -> bool:
    return architecture.endswith(EMBEDS)


def _classifier(
    files: ModelFiles, config: Mapping[str, Any], modules: Mapping[str, Mapping[str, Any]], architecture: str
) -> Classifier | None:
    tokens = config.get("classifier_from_token")
    if tokens is not None:
        return Classifier(1, _tokens_of_override(files, config, tokens))
    for name in ("LogitScore", "CausalScoreHead"):
        if (settings := modules.get(name)) is not None:
            ids = (settings.get("true_token_id"), settings.get("false_token_id"))
            return Classifier(1, tuple(token_id for token_id in ids if token_id is not None))
    if not architecture.endswith(CLASSIFIES):
        return None
    labels = config.get("num_labels") or len(config.get("id2label") or ()) or DEFAULT_NUM_LABELS
    return Classifier(labels)


def _tokens_of_override(files: ModelFiles, config: Mapping[str, Any], tokens: Any) -> tuple[int, ...]:
    """The token ids of `classifier_from_token`, which lists the token for "no" first."""
    method = config.get("method") or (TWO_WAY if config.get("is_original_qwen3_reranker") else ONE_WAY)
    num_tokens = {TWO_WAY: 2, ONE_WAY: 1}.get(method)
    if num_tokens is None:
        raise ConfigError(f"hf_overrides: method {method!r} is not {TWO_WAY!r} or {ONE_WAY!r}", param="hf_overrides")
    if not isinstance(tokens, Sequence) or isinstance(tokens, str) or len(tokens) != num_tokens:
        raise ConfigError(
            f"hf_overrides: classifier_from_token must list {num_tokens} tokens for the method {method!r}",
            param="hf_overrides",
        )
    tokenizer = files.tokenizer() if any(isinstance(token, str) for token in tokens) else None
    ids = [tokenizer.token_to_id(token) if tokenizer and isinstance(token, str) else token for token in tokens[::-1]]
    known = tuple(token_id for token_id in ids if isinstance(token_id, int))
    if len(known) != num_tokens:
        raise ConfigError("hf_overrides: classifier_from_token has an unknown token", param="hf_overrides")
    return known


def _pooling(settings: Mapping[str, Any]) -> Pooling:
    modes = settings.get("pooling_mode")
    if modes is None:
        modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    elif isinstance(modes, str):
        modes = [modes]
    known = {**_MODES, **_FLAGS}
    if len(modes) != 1 or modes[0] not in known:
        raise UnsupportedModel(f"pooling {' and '.join(modes) or '(none)'} is not one of {', '.join(_MODES)}")
    return known[modes[0]]


def _activation(config: Mapping[str, Any]) -> str:
    named = (config.get("sentence_transformers") or {}).get("activation_fn") or config.get(
        "sbert_ce_default_activation_function"
    )
    if named is None:
        return "sigmoid"
    if named not in _ACTIVATIONS:
        raise UnsupportedModel(f"the activation {named} of scores is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[named]


def _matryoshka(config: Mapping[str, Any]) -> frozenset[int] | None:
    lengths = config.get("matryoshka_dimensions")
    if lengths:
        return frozenset(lengths)
    return frozenset() if config.get("is_matryoshka") else None
