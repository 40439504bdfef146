"""Encoders compared with transformers in fp64: vectors of prompts, and logits of labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import ConfigError, ContextTooLong, RequestRefused, UnsupportedModel
from backend.engine.pooling import Pooling
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.models.config import ModelConfig

VOCAB_SIZE, CLS_ID, SEP_ID, LONGEST = 256, 4, 5, 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "layer_norm_eps": 1e-12, "pad_token_id": 1,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "bert": {"max_position_embeddings": LONGEST, "type_vocab_size": 2},
    "roberta": {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1},
    "xlm-roberta": {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1},
}
WORDS = [[CLS_ID, *((11 * i + 7 * n) % 200 + 50 for i in range(n)), SEP_ID] for n in (1, 3, 30, 60, 94)]
PAIRS = [[*WORDS[i], *WORDS[j][1:]] for i, j in ((1, 2), (2, 1), (1, 3))]


def build(kind: str, auto: Any, directory: Path, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(17)
    model: PreTrainedModel = auto.from_config(AutoConfig.for_model(kind, **SHAPE | KINDS[kind] | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm.weight" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({"[CLS]": CLS_ID, "[SEP]": SEP_ID, "[UNK]": 6}, unk_token="[UNK]"))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP_ID), ("[CLS]", CLS_ID))
    tokenizer.save(str(directory / "tokenizer.json"))
    return auto.from_pretrained(directory, dtype=torch.float64)


def vectors(directory: Path, prompts: list[list[int]], pooling: Pooling, **options: Any) -> list[list[float]]:
    engine = Engine.load(EngineConfig(model_dir=directory, num_threads=1, **options))
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, SamplingParams(max_tokens=1), pooling=pooling, priority=i % 2))
    found: dict[str, list[float]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.pooled is not None
            assert not output.num_cached_tokens
            found[output.request_id] = list(output.pooled)
    engine.check_integrity()
    return [found[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", [Pooling.CLS, Pooling.MEAN])
def test_vectors_equal_transformers(kind: str, pooling: Pooling, tmp_path: Path) -> None:
    """Also of the same prompt twice: nothing of it may come from a cache. A step has room for the longest only."""
    model = build(kind, AutoModel, tmp_path)
    found = vectors(tmp_path, WORDS * 2, pooling)
    for prompt, vector in zip(WORDS * 2, found, strict=True):
        with torch.inference_mode():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0]
        expected = hidden[0] if pooling is Pooling.CLS else hidden.mean(0)
        assert vector == pytest.approx(expected.tolist(), abs=1e-5)
    small = vectors(tmp_path, WORDS * 2, pooling, max_num_batched_tokens=LONGEST)
    assert torch.allclose(torch.tensor(small), torch.tensor(found), atol=1e-5)


@pytest.mark.parametrize(("kind", "num_labels"), [("bert", 1), ("roberta", 1), ("xlm-roberta", 3)])
def test_logits_of_pairs_equal_transformers(kind: str, num_labels: int, tmp_path: Path) -> None:
    model = build(kind, AutoModelForSequenceClassification, tmp_path, num_labels=num_labels)
    for pair, logits in zip(PAIRS, vectors(tmp_path, PAIRS, Pooling.CLS), strict=True):
        second = pair.index(SEP_ID) + 1
        types = [0] * second + [1] * (len(pair) - second) if kind == "bert" else [0] * len(pair)
        with torch.inference_mode():
            (expected,) = model(torch.tensor([pair]), token_type_ids=torch.tensor([types])).logits.tolist()
        assert logits == pytest.approx(expected, abs=1e-5)


def test_names_with_the_outer_module(tmp_path: Path) -> None:
    """As some published embedding models have them, with tensors that are not used."""
    build("bert", AutoModel, tmp_path)
    before = vectors(tmp_path, WORDS, Pooling.CLS)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    renamed["bert.embeddings.position_ids"] = torch.arange(LONGEST)
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    assert vectors(tmp_path, WORDS, Pooling.CLS) == before


def test_limits(tmp_path: Path) -> None:
    """Positions end at the table's end, which RoBERTa's padding shortens; a step has room for the longest prompt."""
    build("roberta", AutoModel, tmp_path)
    assert ModelConfig.load(tmp_path).max_position_embeddings == LONGEST
    engine = Engine.load(EngineConfig(model_dir=tmp_path, num_threads=1))
    assert engine.config.max_num_batched_tokens >= LONGEST
    assert engine.runner.kv._memory.nbytes == 0
    with pytest.raises(ContextTooLong):
        engine.add(Request("long", [7] * (LONGEST + 1), SamplingParams(max_tokens=1), pooling=Pooling.CLS))
    with pytest.raises(RequestRefused, match="no output head"):
        engine.add(Request("chat", [7], SamplingParams(max_tokens=1)))
    with pytest.raises(ConfigError, match="must be at least max_model_len"):
        EngineConfig(model_dir=tmp_path, max_num_batched_tokens=64).resolve()


@pytest.mark.parametrize(("field", "value"), [("position_embedding_type", "relative_key"), ("hidden_act", "relu")])
def test_other_computations_are_refused_by_name(field: str, value: str, tmp_path: Path) -> None:
    build("bert", AutoModel, tmp_path)
    with pytest.raises(UnsupportedModel, match=field):
        ModelConfig.load(tmp_path, {field: value})


def test_bfloat16_is_close(tmp_path: Path) -> None:
    build("bert", AutoModel, tmp_path)
    exact = torch.tensor(vectors(tmp_path, WORDS, Pooling.MEAN))
    rounded = torch.tensor(vectors(tmp_path, WORDS, Pooling.MEAN, dtype="bfloat16"))
    assert (1 - torch.cosine_similarity(exact, rounded)).max() < 1e-2
