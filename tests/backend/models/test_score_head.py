"""Models that score or embed, compared with transformers in fp64: heads on decoders, and answers of one token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import RequestRefused, UnsupportedModel
from backend.engine.pooling import Pooling
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from tests.backend.checkpoints import CHECKPOINTS, SHAPE, build_model, save
from tests.backend.models.test_parity import PROMPTS, TOLERANCE, oracle

TRUE, FALSE = 17, 40
LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
OVERRIDES = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": [FALSE, TRUE],  # vLLM's order
    "is_original_qwen3_reranker": True,
}


def vectors(directory: Path, pooling: Pooling = Pooling.LAST, **options: Any) -> dict[str, list[float]]:
    """The vectors of all prompts, computed together. With a budget of 64, the longest prompt is chunked."""
    config = EngineConfig(model_dir=directory, num_blocks=64, num_threads=1, max_num_batched_tokens=64, **options)
    engine = Engine.load(config)
    for name, prompt in PROMPTS.items():
        engine.add(Request(name, prompt, SamplingParams(max_tokens=1), pooling=pooling))
    found: dict[str, list[float]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.pooled is not None
            found[output.request_id] = list(output.pooled)
    with pytest.raises(RequestRefused, match="no output head"):
        engine.add(Request("chat", [1, 2], SamplingParams(max_tokens=1)))
    return found


def classification_model(name: str, directory: Path, num_labels: int) -> torch.nn.Module:
    torch.manual_seed(3)
    fields = SHAPE | CHECKPOINTS[name] | {"num_labels": num_labels}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**fields)).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    model.save_pretrained(directory)
    saved: torch.nn.Module = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float64)
    return saved


@pytest.mark.parametrize(
    ("name", "num_labels"), [("qwen2", 1), ("qwen3", 1), ("llama", 1), ("gemma3", 1), ("mistral-sliding", 3)]
)
def test_logits_of_labels_equal_transformers(name: str, num_labels: int, tmp_path: Path) -> None:
    model = classification_model(name, tmp_path, num_labels)
    found = vectors(tmp_path)
    for prompt_name, prompt in PROMPTS.items():
        with torch.inference_mode():
            (expected,) = model(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt))).logits.tolist()
        assert len(expected) == num_labels
        assert found[prompt_name] == pytest.approx(expected, rel=0, abs=TOLERANCE)


def declare(directory: Path, modules: list[tuple[str, str, Mapping[str, Any]]]) -> None:
    """Writes sentence-transformers' files."""
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind, _) in enumerate(modules)]
    (directory / "modules.json").write_text(json.dumps(listed))
    for path, _, settings in modules:
        if path:
            (directory / path).mkdir()
            (directory / path / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("declared", ["two tokens", "one token", "overrides"])
def test_scores_are_logits_of_tokens(tied: bool, declared: str, tmp_path: Path) -> None:
    save(build_model("qwen3", tie_word_embeddings=tied), tmp_path)
    if declared != "overrides":
        tokens = {"true_token_id": TRUE, "false_token_id": FALSE if declared == "two tokens" else None}
        declare(tmp_path, [("", "a.Transformer", {}), ("1_LogitScore", LOGIT_SCORE, tokens)])
    found = vectors(tmp_path, hf_overrides=OVERRIDES if declared == "overrides" else {})
    model = oracle(tmp_path)
    for name, prompt in PROMPTS.items():
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, -1].tolist()
        expected = logits[TRUE] - (0 if declared == "one token" else logits[FALSE])
        assert found[name] == pytest.approx([expected], rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("pooling", Pooling)
def test_a_decoder_without_its_outer_module(pooling: Pooling, tmp_path: Path) -> None:
    """As sentence-transformers stores it: without an output head, and with short names of tensors."""
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    save(build_model("qwen3"), whole)
    AutoModel.from_pretrained(whole).save_pretrained(bare)
    assert not any(name.startswith("model.") for name in load_file(bare / "model.safetensors"))
    found = vectors(bare, pooling)
    model = AutoModel.from_pretrained(bare, dtype=torch.float64)
    for name, prompt in PROMPTS.items():
        with torch.inference_mode():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0]
        expected = {Pooling.LAST: hidden[-1], Pooling.CLS: hidden[0], Pooling.MEAN: hidden.mean(0)}[pooling]
        assert found[name] == pytest.approx(expected.tolist(), rel=0, abs=TOLERANCE)


def test_a_softcap_and_a_score_from_tokens(tmp_path: Path) -> None:
    """The difference of two capped logits is no linear layer."""
    save(build_model("gemma2"), tmp_path)
    with pytest.raises(UnsupportedModel, match="final_logit_softcapping"):
        vectors(tmp_path, hf_overrides={"classifier_from_token": [TRUE]})


def test_a_bias_of_the_head(tmp_path: Path) -> None:
    """transformers' heads have none, but some published rerankers do."""
    classification_model("qwen3", tmp_path, 1)
    before = vectors(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"score.bias": torch.tensor([0.75])}, tmp_path / "model.safetensors", {"format": "pt"})
    for name, (logit,) in vectors(tmp_path).items():
        assert logit == pytest.approx(before[name][0] + 0.75, abs=1e-5)
