"""What a model's files say that it is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.engine.errors import ConfigError, UnsupportedModel
from backend.engine.pooling import Pooling
from backend.model_files import open_model_files
from backend.model_files.pooling import Classifier, PoolingConfig, decoder_config, read_pooling

POOLING, NORMALIZE, DENSE = (f"sentence_transformers.models.{name}" for name in ("Pooling", "Normalize", "Dense"))


def read(
    directory: Path, config: dict[str, Any], modules: dict[str, Any] | None = None, **overrides: Any
) -> PoolingConfig:
    """`modules`: the type and the settings of each."""
    (directory / "config.json").write_text(json.dumps(config))
    if modules is not None:
        listed = [{"idx": i, "path": f"{i}_M", "type": kind} for i, kind in enumerate(modules)]
        (directory / "modules.json").write_text(json.dumps(listed))
        for i, settings in enumerate(modules.values()):
            (directory / f"{i}_M").mkdir(exist_ok=True)
            (directory / f"{i}_M" / "config.json").write_text(json.dumps(settings))
    return read_pooling(open_model_files(directory), overrides)


QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({"pooling_mode": "lasttoken"}, Pooling.LAST),
        ({"pooling_mode": ["mean"]}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, Pooling.CLS),
        ({"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": False}, Pooling.LAST),
    ],
)
def test_poolings(settings: dict[str, Any], pooling: Pooling, tmp_path: Path) -> None:
    found = read(tmp_path, QWEN3, {POOLING: settings, NORMALIZE: {}})
    assert found == PoolingConfig(pooling, normalise=True, embeds=True, generates=False)
    assert not read(tmp_path, QWEN3, {POOLING: settings}).normalise


def test_models_whose_files_say_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN3) == PoolingConfig(Pooling.MEAN)
    headless = read(tmp_path, {"architectures": ["Qwen3Model"]})
    assert headless == PoolingConfig(Pooling.LAST, embeds=True, generates=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling_mode": "max"}, "pooling max is not one of"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "mean_tokens and pooling_mode_cls"),
        ({}, r"\(none\)"),
    ],
)
def test_unknown_poolings_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(tmp_path, QWEN3, {POOLING: settings})


def test_unknown_modules_and_activations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="the module Dense is not supported"):
        read(tmp_path, QWEN3, {POOLING: {"pooling_mode": "mean"}, DENSE: {}})
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a list of modules"):
        read(tmp_path, QWEN3)
    (tmp_path / "modules.json").unlink()
    with pytest.raises(UnsupportedModel, match="ReLU of scores"):
        read(tmp_path, QWEN3, sentence_transformers={"activation_fn": "torch.nn.modules.activation.ReLU"})


def test_heads(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForSequenceClassification"]}
    assert read(tmp_path, config).classifier == Classifier(2)
    assert read(tmp_path, {**config, "id2label": {"0": "LABEL_0"}}).classifier == Classifier(1)
    found = read(
        tmp_path, config, num_labels=1, sbert_ce_default_activation_function="torch.nn.modules.linear.Identity"
    )
    assert (found.classifier, found.activation, found.generates) == (Classifier(1), "identity", False)
    assert decoder_config(config)["architectures"] == ["LlamaForCausalLM"]
    assert decoder_config({"architectures": ["Gemma3TextModel"]})["architectures"] == ["Gemma3ForCausalLM"]


@pytest.mark.parametrize(
    "overrides",
    [
        {"classifier_from_token": [1, 2]},  # one token, unless the method compares two
        {"classifier_from_token": [1], "is_original_qwen3_reranker": True},
        {"classifier_from_token": "yes"},
        {"classifier_from_token": [1], "method": "from_3_way_softmax"},
    ],
)
def test_overrides_that_fit_no_method(overrides: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hf_overrides"):
        (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
        read(tmp_path, QWEN3, **overrides)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"architectures": 5}, "architectures"),
        ({"architectures": ["Qwen3ForSequenceClassification"], "num_labels": "two"}, "num_labels"),
        ({"matryoshka_dimensions": [32, "64"]}, r"matryoshka_dimensions\[1\]"),
        ({"sentence_transformers": {"activation_fn": 1}}, "activation_fn"),
    ],
)
def test_fields_of_a_wrong_type_are_named(overrides: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, QWEN3, **overrides)


def test_settings_of_a_module_of_a_wrong_type_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"module Pooling: .*pooling_mode"):
        read(tmp_path, QWEN3, {POOLING: {"pooling_mode": 3}})


def test_lengths_to_which_embeddings_may_be_shortened(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN3).matryoshka is None
    assert read(tmp_path, QWEN3, is_matryoshka=True).matryoshka == frozenset()
    assert read(tmp_path, QWEN3, matryoshka_dimensions=[32, 64]).matryoshka == frozenset((32, 64))
