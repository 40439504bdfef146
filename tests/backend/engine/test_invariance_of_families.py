"""Every model family gives the same tokens alone and with every feature at once.

This covers what families differ in: sliding windows, sinks, experts and rotary embeddings, with chunks and blocks
smaller than the windows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from tests.backend.checkpoints import CHECKPOINTS, VOCAB_SIZE

SHARED = [(5 * i * i + i) % VOCAB_SIZE for i in range(90)]  # longer than every window
PROMPTS = [SHARED[:3], SHARED, [*SHARED, 9, 8, 7], [*SHARED[:50], 1, 2], [11, 12, 13] * 20]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logprobs": 2},
]


def requests() -> list[Request]:
    chosen = zip(PROMPTS, SAMPLINGS, strict=True)
    return [Request(f"r{i}", prompt, SamplingParams(max_tokens=24, **s)) for i, (prompt, s) in enumerate(chosen)]


def outputs(engine: Engine, submitted: list[Request]) -> list[list[int]]:
    for request in submitted:
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    engine.check_integrity()
    return [request.token_ids[request.num_prompt_tokens :] for request in submitted]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_alone_and_with_every_feature_at_once(name: str, checkpoint_dir: Callable[[str], Path]) -> None:
    def load(**options: Any) -> Engine:
        config = EngineConfig(model_dir=checkpoint_dir(name), dtype="float32", num_threads=1, max_num_seqs=8, **options)
        return Engine.load(config)

    whole = load(num_blocks=64, enable_prefix_caching=False)
    alone = [outputs(whole, [request])[0] for request in requests()]
    assert any(len(set(tokens)) > 8 for tokens in alone), "a model that repeats itself proves little"
    cramped = load(num_blocks=52, block_size=4, max_num_batched_tokens=9, speculation="ngram", kv_host_bytes=1 << 18)
    for _ in range(2):
        assert outputs(cramped, requests()) == alone
    stats = cramped.stats()
    assert stats.preemptions_total > 0
    assert stats.prefix_cache_hits_total > 0
    assert stats.host_blocks_restored_total > 0
