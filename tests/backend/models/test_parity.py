"""Every architecture compared with transformers in fp64.

In fp32 tokens must be equal and logits within 1e-4. In bf16 the distributions must be close.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.outputs import TokenLogprob
from backend.engine.pooling import Pooling
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from tests.backend.checkpoints import CHECKPOINTS, VOCAB_SIZE
from tests.backend.recorded_logits import record_logits

PROMPTS = {
    "short": [5, 6, 7],
    "repeating": [11, 12, 13, 14, 15] * 8,
    "long": [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(150)],
}
NUM_TOKENS = 64
TOLERANCE = 1e-4  # of logits and of log-probabilities


def greedy(engine: Engine, prompts: dict[str, list[int]], logprobs: int | None = None) -> dict[str, list[TokenLogprob]]:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=logprobs or 0)
    for name, prompt in prompts.items():
        engine.add(Request(name, prompt, sampling))
    outputs: dict[str, list[TokenLogprob]] = {name: [] for name in prompts}
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.request_id] += output.logprobs
    return outputs


def oracle(directory: Path) -> PreTrainedModel:
    """transformers in fp64, except norms and rotation angles.

    transformers in fp32 is less exact than the engine: compared with norms in fp64 too, its log-probabilities for
    gpt-oss differ by 1.4e-4, and the engine's by 0.6e-4.
    """
    # Only the eager implementation of experts supports fp64.
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager"
    )
    return model


@pytest.fixture(params=CHECKPOINTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_greedy_tokens_and_logprobs_equal_transformers(name: str, checkpoint_dir: Callable[[str], Path]) -> None:
    directory = checkpoint_dir(name)
    model = oracle(directory)
    # With a budget of 64 the longest prompt is chunked, together with decodes of the others.
    config = EngineConfig(model_dir=directory, num_blocks=64, num_threads=1, max_num_batched_tokens=64)
    outputs = greedy(Engine.load(config), PROMPTS)
    for prompt_name, prompt in PROMPTS.items():
        ours = outputs[prompt_name]
        input_ids = torch.tensor([prompt])
        with torch.inference_mode():
            (theirs,) = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),  # otherwise zeros in the prompt count as padding
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            logits = model(theirs[None]).logits[0, len(prompt) - 1 : -1]
        first, second = logits.topk(2).values.unbind(-1)
        assert (first - second).min() > 2 * TOLERANCE, "a model in which rounding decides proves nothing"
        tokens = theirs[len(prompt) :].tolist()
        assert [token.token_id for token in ours] == tokens
        assert len(set(tokens)) > NUM_TOKENS // 8, "a model that repeats itself proves little"
        expected = logits.log_softmax(-1)[range(NUM_TOKENS), tokens].tolist()
        assert [token.logprob for token in ours] == pytest.approx(expected, rel=0, abs=TOLERANCE)


def test_greedy_tokens_are_equal_without_logprobs(name: str, checkpoint_dir: Callable[[str], Path]) -> None:
    """Without log-probabilities and sampling, logits only need to be compared."""
    options: dict[str, Any] = {"num_blocks": 64, "num_threads": 1, "dtype": "bfloat16", "enable_prefix_caching": False}
    engine = Engine.load(EngineConfig(model_dir=checkpoint_dir(name), **options))
    for prompt_name, prompt in PROMPTS.items():
        expected = greedy(engine, {prompt_name: prompt})[prompt_name]
        request = Request(prompt_name, prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0))
        engine.add(request)
        while engine.has_unfinished:
            engine.step()
        assert request.token_ids[request.num_prompt_tokens :] == [token.token_id for token in expected]


def test_logits_equal_transformers(name: str, checkpoint_dir: Callable[[str], Path]) -> None:
    """Over the whole vocabulary; the test above compares the chosen tokens only."""
    directory = checkpoint_dir(name)
    model = oracle(directory)
    engine = Engine.load(EngineConfig(model_dir=directory, num_blocks=16, num_threads=1))
    seen = record_logits(engine)
    # With log-probabilities, which always need logits.
    engine.add(Request("r", PROMPTS["long"], SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)))
    engine.step()
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS["long"]])).logits[0, -1]
    assert (seen[0][0] - expected).abs().max().item() < TOLERANCE


def test_bfloat16_is_close_to_float64(name: str, checkpoint_dir: Callable[[str], Path]) -> None:
    """The distributions agree up to the first token that rounding decides.

    There, each model's choice is among the other's five most likely tokens.
    """
    directory = checkpoint_dir(name)
    exact = greedy(Engine.load(EngineConfig(model_dir=directory, num_blocks=64, num_threads=1)), PROMPTS, logprobs=5)
    config = EngineConfig(model_dir=directory, num_blocks=64, num_threads=1, dtype="bfloat16")
    rounded = greedy(Engine.load(config), PROMPTS, logprobs=5)
    num_compared = 0
    for prompt_name in PROMPTS:
        for ours, theirs in zip(rounded[prompt_name], exact[prompt_name], strict=True):
            if ours.token_id != theirs.token_id:
                assert ours.token_id in dict(theirs.top)
                assert theirs.token_id in dict(ours.top)
                break
            num_compared += 1
    assert num_compared >= 12


def test_embeddings_equal_transformers(name: str, checkpoint_dir: Callable[[str], Path]) -> None:
    """Compares directions of the mean hidden states, because clients get them normalised."""
    directory = checkpoint_dir(name)
    model = oracle(directory)
    for dtype, closeness in (("float32", 1e-6), ("bfloat16", 1e-2)):
        config = EngineConfig(
            model_dir=directory, num_blocks=64, num_threads=1, dtype=dtype, max_num_batched_tokens=64, max_num_seqs=4
        )
        engine = Engine.load(config)
        for prompt_name, prompt in PROMPTS.items():
            engine.add(Request(prompt_name, prompt, SamplingParams(max_tokens=1), pooling=Pooling.MEAN))
        embeddings: dict[str, tuple[float, ...]] = {}
        while engine.has_unfinished:
            embeddings |= {output.request_id: output.pooled or () for output in engine.step()}
        for prompt_name, prompt in PROMPTS.items():
            with torch.inference_mode():
                hidden = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1]
            ours = torch.tensor(embeddings[prompt_name])
            assert torch.cosine_similarity(ours, hidden[0].mean(0), dim=0).item() > 1 - closeness
