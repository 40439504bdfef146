"""Two processes and more compute the same tokens as one, over real groups and small random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from tests.backend.checkpoints import CHECKPOINTS, build_model, save
from tests.backend.engine.test_invariance_of_families import outputs, requests
from tests.backend.gguf_writer import as_type, write_gguf
from tests.backend.parallel.conftest import LoadEngine

pytestmark = pytest.mark.usefixtures("forked_followers")

CheckpointDir = Callable[[str], Path]

CRAMPED: dict[str, Any] = {"num_blocks": 52, "block_size": 4, "max_num_batched_tokens": 9, "speculation": "ngram"}


def requests_for(name: str) -> list[Request]:
    """Only one checkpoint gets sampled tokens.

    Rounding changes a sampled token if its random number is next to a bound between two tokens. That is rare, but not
    among thousands of them on every CPU. The checkpoints exclude it for the tokens with the largest logits only.
    """
    return [request for request in requests() if name == "llama" or request.sampling.temperature == 0.0]


FAMILIES = [pytest.param(name, marks=[] if name == "llama" else [pytest.mark.slow]) for name in CHECKPOINTS]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_compute_the_tokens_of_one_process(
    name: str, checkpoint_dir: CheckpointDir, load: LoadEngine
) -> None:
    """Penalties and logprobs, and for one family seeded sampling, in steps with prompts, chunks and decodes."""
    directory = checkpoint_dir(name)
    expected = outputs(load(directory), requests_for(name))
    assert any(len(set(tokens)) > 8 for tokens in expected), "a model that repeats itself proves little"
    assert outputs(load(directory, tensor_parallel_size=2), requests_for(name)) == expected


def test_with_chunks_hits_preemptions_and_drafts(checkpoint_dir: CheckpointDir, load: LoadEngine) -> None:
    directory = checkpoint_dir("llama")
    expected = outputs(load(directory), requests())
    cramped = load(directory, tensor_parallel_size=2, **CRAMPED)
    for _ in range(2):
        assert outputs(cramped, requests()) == expected
    stats = cramped.stats()
    assert stats.preemptions_total > 0
    assert stats.prefix_cache_hits_total > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "phi3", "olmo2"])
def test_more_ranks_than_key_value_heads(name: str, checkpoint_dir: CheckpointDir, load: LoadEngine) -> None:
    directory = checkpoint_dir(name)
    expected = outputs(load(directory), requests_for(name))
    assert outputs(load(directory, tensor_parallel_size=4), requests_for(name)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_cannot_be_divided_evenly(tied: bool, tmp_path: Path, load: LoadEngine) -> None:
    save(build_model("llama", vocab_size=255, tie_word_embeddings=tied), tmp_path)

    def within(prompt: list[int]) -> list[int]:
        return [min(token, 254) for token in prompt]

    def some() -> list[Request]:
        return [Request(r.request_id, within(r.token_ids), r.sampling) for r in requests_for("llama-255")]

    assert outputs(load(tmp_path, tensor_parallel_size=2), some()) == outputs(load(tmp_path), some())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"ops": "reference", "attention": "sdpa"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_other_implementations(options: dict[str, Any], checkpoint_dir: CheckpointDir, load: LoadEngine) -> None:
    directory = checkpoint_dir("qwen3")
    expected = outputs(load(directory, **options), requests_for("qwen3"))
    assert outputs(load(directory, tensor_parallel_size=2, **options), requests_for("qwen3")) == expected


def logprobs(engine: Engine) -> list[float]:
    """The log-probabilities of a prompt's tokens and of those that follow."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1, prompt_logprobs=1)
    engine.add(Request("r", [(7 * i * i + 3 * i) % 256 for i in range(40)], sampling))
    found = []
    while engine.has_unfinished:
        for output in engine.step():
            found += [each.logprob for each in (*(output.prompt_logprobs or ()), *output.logprobs) if each is not None]
    return found


def test_logprobs_of_prompts_and_tokens(checkpoint_dir: CheckpointDir, load: LoadEngine) -> None:
    directory = checkpoint_dir("llama")
    expected = logprobs(load(directory))
    assert len(expected) > 40
    assert logprobs(load(directory, tensor_parallel_size=2)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_bfloat16_is_as_close_as_rounding_allows(checkpoint_dir: CheckpointDir, load: LoadEngine) -> None:
    """Tokens may differ in bfloat16, so only the prompt's log-probabilities are compared."""
    directory = checkpoint_dir("qwen3")
    expected = logprobs(load(directory, dtype="bfloat16"))[:39]
    divided = logprobs(load(directory, dtype="bfloat16", tensor_parallel_size=2))[:39]
    assert divided == pytest.approx(expected, abs=0.5)
    assert sum(abs(a - b) for a, b in zip(divided, expected, strict=True)) / len(expected) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_quantized_weights(quantization: str, tmp_path: Path, load: LoadEngine) -> None:
    """A division cuts no group of int4, so its tokens are the same. The others round inputs by row, thus by rank."""
    save(build_model("llama", intermediate_size=128), tmp_path)
    one, two = (load(tmp_path, quantization=quantization, tensor_parallel_size=size) for size in (1, 2))
    if quantization == "int4":
        assert outputs(two, requests_for("int4")) == outputs(one, requests_for("int4"))
        return
    exact = logprobs(load(tmp_path))[:39]
    errors = [sum(abs(a - b) for a, b in zip(logprobs(engine)[:39], exact, strict=True)) for engine in (one, two)]
    assert errors[1] < 1.25 * errors[0]


@pytest.mark.slow
def test_drafts_of_a_model(checkpoint_dir: CheckpointDir, load: LoadEngine) -> None:
    """The draft model is on rank 0. It is the model itself here, so all greedy drafts are accepted."""
    directory = checkpoint_dir("qwen3")
    options = {"speculation": "draft_model", "draft_model_dir": directory}
    expected = outputs(load(directory), requests_for("qwen3"))
    engine = load(directory, tensor_parallel_size=2, **options)
    assert outputs(engine, requests_for("qwen3")) == expected
    stats = engine.stats()
    assert stats.draft_tokens_total
    assert sum(stats.accepted_tokens_total) > 0.9 * stats.draft_tokens_total


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0])
def test_a_gguf_file(kind: Kind, checkpoint_dir: CheckpointDir, tmp_path: Path, load: LoadEngine) -> None:
    """Its weights are divided after they were dequantized."""
    path = write_gguf(checkpoint_dir("llama"), tmp_path / "model.gguf", as_type(kind))
    expected = logprobs(load(path))
    assert logprobs(load(path, tensor_parallel_size=2)) == pytest.approx(expected, abs=1e-4)
