"""Background work together with urgent requests in a whole engine: scheduling, cache eviction, and equal tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.outputs import FinishReason
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from tests.backend.checkpoints import VOCAB_SIZE

BLOCK_SIZE, NUM_BLOCKS = 4, 60


@pytest.fixture
def load(checkpoint_dir: Callable[[str], Path]) -> Callable[..., Engine]:
    def load(**options: Any) -> Engine:
        defaults: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_num_seqs": 4}
        config = EngineConfig(model_dir=checkpoint_dir("llama"), num_threads=1, **(defaults | options))
        return Engine.load(config)

    return load


def make_request(name: str, seed: int, length: int, max_tokens: int, priority: int) -> Request:
    prompt = [(seed * 31 + i * i * 7 + i) % VOCAB_SIZE for i in range(length)]
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), priority=priority)


def outputs_of(engine: Engine, requests: list[Request]) -> list[list[int]]:
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    engine.check_integrity()
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


def test_background_work_does_not_evict_a_foreground_prefix(load: Callable[..., Engine]) -> None:
    engine = load()
    outputs_of(engine, [make_request("first", 1, 41, 2, priority=0)])
    # Six times the size of the cache goes through it, in pieces that fit beside that prefix.
    flood = [make_request(f"batch {i}", 100 + i, 61, 8, priority=10) for i in range(20)]
    for request in flood:
        outputs_of(engine, [request])
    again = make_request("again", 1, 41, 2, priority=0)
    outputs_of(engine, [again])
    assert again.num_cached_tokens == 40
    # With the same priority, the prefix is the least recently used after the same flood, and evicted.
    engine = load()
    outputs_of(engine, [make_request("first", 1, 41, 2, priority=10)])
    for i in range(20):
        outputs_of(engine, [make_request(f"batch {i}", 100 + i, 61, 8, priority=10)])
    again = make_request("again", 1, 41, 2, priority=10)
    outputs_of(engine, [again])
    assert again.num_cached_tokens == 0


def test_an_urgent_request_is_as_fast_as_alone_and_background_outputs_stay_the_same(
    load: Callable[..., Engine],
) -> None:
    def background() -> list[Request]:
        return [make_request(f"batch {i}", 10 + i, 30, 20, priority=10) for i in range(4)]

    def urgent() -> Request:
        return make_request("urgent", 5, 50, 6, priority=0)

    alone = [outputs_of(load(), [request])[0] for request in background()]
    engine = load(max_num_batched_tokens=16)
    reference = load(max_num_batched_tokens=16)
    reference.add(urgent())
    steps_alone = 0
    while reference.has_unfinished:
        reference.step()
        steps_alone += 1

    batch = background()
    for request in batch:
        engine.add(request)
    for _ in range(9):
        engine.step()
    assert engine.stats().num_running == 4
    late = urgent()
    engine.add(late)
    for _ in range(steps_alone):
        assert late.finish_reason is None
        engine.step()
    assert late.finish_reason is FinishReason.LENGTH
    while engine.has_unfinished:
        engine.step()
    assert engine.stats().preemptions_total >= 1
    assert [request.token_ids[request.num_prompt_tokens :] for request in batch] == alone
