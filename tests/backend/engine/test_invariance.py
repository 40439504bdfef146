"""A request's tokens do not depend on its batch, on how it is chunked, or on where its keys come from."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.interruption import Interruption
from backend.engine.outputs import TokenLogprob
from backend.engine.pooling import Pooling
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.kv_cache import KV_FORMATS
from tests.backend.checkpoints import VOCAB_SIZE

SHARED = [(5 * i * i + i) % VOCAB_SIZE for i in range(37)]
PROMPTS = [SHARED[:3], SHARED, [*SHARED, 9, 8, 7], [*SHARED[:20], 1, 2], SHARED[::-1] * 2]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.3, "seed": 3, "min_p": 0.02, "presence_penalty": 0.4},
]
NUM_TOKENS = 24


@pytest.fixture(params=KV_FORMATS)
def load(checkpoint_dir: Callable[[str], Path], request: pytest.FixtureRequest) -> Callable[..., Engine]:
    def load(**options: Any) -> Engine:
        defaults: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "num_threads": 1, "max_num_seqs": 8}
        defaults["kv_cache_dtype"] = request.param
        return Engine.load(EngineConfig(model_dir=checkpoint_dir("llama"), **(defaults | options)))

    return load


def make_requests(**changes: Any) -> list[Request]:
    return [
        Request(f"r{i}", prompt, SamplingParams(max_tokens=NUM_TOKENS, **sampling, **changes))
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


@pytest.fixture
def alone(load: Callable[..., Engine]) -> list[list[int]]:
    """The outputs of each request in its own engine, with whole prompts and without a prefix cache."""
    return [run(load(max_num_batched_tokens=512, enable_prefix_caching=False), [r])[0] for r in make_requests()]


def test_batched(load: Callable[..., Engine], alone: list[list[int]]) -> None:
    assert run(load(enable_prefix_caching=False), make_requests()) == alone
    assert all(len(set(tokens)) > 8 for tokens in alone), "a model that repeats itself proves little"


@pytest.mark.parametrize("budget", [8, 9, 16, 31, 64])
def test_in_chunks_of_any_size(load: Callable[..., Engine], alone: list[list[int]], budget: int) -> None:
    assert run(load(max_num_batched_tokens=budget, enable_prefix_caching=False), make_requests()) == alone


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_in_blocks_of_any_size_and_from_the_prefix_cache(
    load: Callable[..., Engine], alone: list[list[int]], block_size: int
) -> None:
    engine = load(block_size=block_size, num_blocks=512 // block_size)
    assert run(engine, make_requests()) == alone
    cached = engine.stats().prefix_cache_hits_total
    assert run(engine, make_requests()) == alone
    # The second time, every prompt comes from the cache, except its last block.
    second = engine.stats().prefix_cache_hits_total - cached
    assert second == sum((len(prompt) - 1) // block_size * block_size for prompt in PROMPTS)


def test_preempted(load: Callable[..., Engine], alone: list[list[int]]) -> None:
    for caching in (True, False):
        engine = load(num_blocks=100, block_size=1, enable_prefix_caching=caching)
        assert run(engine, make_requests()) == alone
        assert engine.stats().preemptions_total >= 2


def test_while_neighbours_are_aborted(load: Callable[..., Engine], alone: list[list[int]]) -> None:
    engine = load(max_num_batched_tokens=16)
    requests = make_requests()
    for request in requests:
        engine.add(request)
    for i, steps in ((0, 2), (2, 3), (4, 5)):
        for _ in range(steps):
            engine.step()
        engine.abort(f"r{i}")
    while engine.has_unfinished:
        engine.step()
    engine.check_integrity()
    survivors = [requests[i].token_ids[len(PROMPTS[i]) :] for i in (1, 3)]
    assert survivors == [alone[1], alone[3]]
    assert engine.stats().aborted_total == 3


def test_with_interrupted_steps(load: Callable[..., Engine], alone: list[list[int]]) -> None:
    class RandomInterruption(Interruption):
        """Interrupts steps at random before and in every layer, many times each. Every step completes in the end."""

        def __init__(self) -> None:
            super().__init__()
            self.random = random.Random(0)

        def _is_due(self) -> bool:
            is_due = self.random.random() < 0.3
            self.num_interrupted += is_due
            return is_due

    for options in ({"max_num_batched_tokens": 16}, {"num_blocks": 100, "block_size": 1}):
        engine = load(**options)
        engine.interruption = RandomInterruption()
        assert run(engine, make_requests()) == alone
        assert engine.stats().steps_given_up_total > 20


@pytest.mark.parametrize("pooling", Pooling)
def test_embeddings(load: Callable[..., Engine], pooling: Pooling) -> None:
    """The same vector for a whole prompt, in chunks, after preemption, and after the same prompt was cached."""

    def embed(engine: Engine) -> list[tuple[float, ...]]:
        for i, prompt in enumerate(PROMPTS):
            engine.add(Request(f"e{i}", prompt, SamplingParams(max_tokens=1), pooling=pooling))
        embeddings: dict[str, tuple[float, ...]] = {}
        while engine.has_unfinished:
            for output in engine.step():
                assert output.pooled is not None
                num_cached[0] += output.num_cached_tokens
                embeddings[output.request_id] = output.pooled
        return [embeddings[f"e{i}"] for i in range(len(PROMPTS))]

    num_cached = [0]
    engine = load(max_num_batched_tokens=512)
    expected = embed(engine)
    assert len(expected[0]) == 64
    again = embed(engine)
    assert (num_cached[0] > 0) == (pooling is Pooling.LAST)
    for same in (again, embed(load(max_num_batched_tokens=8)), embed(load(num_blocks=20))):
        for ours, theirs in zip(same, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("load", ["auto"], indirect=True)
def test_embeddings_are_the_mean_of_the_final_hidden_states(
    load: Callable[..., Engine], checkpoint_dir: Callable[[str], Path]
) -> None:
    model = AutoModel.from_pretrained(checkpoint_dir("llama"), dtype=torch.float32)
    engine = load()
    engine.add(Request("e", PROMPTS[2], SamplingParams(max_tokens=1), pooling=Pooling.MEAN))
    (output,) = engine.step()
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[2]])).last_hidden_state[0].mean(0)
    assert output.pooled == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("load", ["auto"], indirect=True)
def test_the_logprobs_of_prompts(load: Callable[..., Engine], checkpoint_dir: Callable[[str], Path]) -> None:
    """Those of transformers; the same for a whole prompt, in chunks, in a batch, and after preemption."""

    def score(engine: Engine) -> list[tuple[TokenLogprob, ...]]:
        found: dict[str, tuple[TokenLogprob, ...]] = {}
        for i, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, prompt_logprobs=3)
            engine.add(Request(f"p{i}", prompt, sampling))
        while engine.has_unfinished:
            for output in engine.step():
                if output.prompt_logprobs is not None:
                    assert output.request_id not in found
                    assert output.num_cached_tokens == 0
                    found[output.request_id] = output.prompt_logprobs
        return [found[f"p{i}"] for i in range(len(PROMPTS))]

    model = AutoModelForCausalLM.from_pretrained(checkpoint_dir("llama"), dtype=torch.float32)
    cramped = load(num_blocks=100, block_size=1)
    scored = {name: score(engine) for name, engine in {"whole": load(), "cramped": cramped}.items()}
    scored |= {f"chunks of {budget}": score(load(max_num_batched_tokens=budget)) for budget in (8, 13)}
    assert cramped.stats().preemptions_total >= 2
    for i, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0], dim=-1)
        for logprobs in (found[i] for found in scored.values()):
            assert [logprob.token_id for logprob in logprobs] == prompt[1:]
            for position, logprob in enumerate(logprobs):
                assert logprob.logprob == pytest.approx(expected[position, logprob.token_id].item(), abs=1e-4)
                assert [value for _, value in logprob.top] == pytest.approx(
                    expected[position].topk(3).values.tolist(), abs=1e-4
                )
