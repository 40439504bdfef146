"""Captured steps with prompts: which steps have a graph, and that padding changes nothing.

Whole histories of such steps are compared in test_graphs.py and, with Triton's kernels, in tests/gpu_kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.engine.batch import make_batch
from backend.engine.captured_steps import DecodeStep
from backend.engine.config import EngineConfig
from backend.engine.graphs import GraphCapture, NoCapture
from backend.engine.paged_model import PagedModel
from backend.engine.plan import ScheduledRequest
from backend.engine.prompt_graphs import SIZES, PromptGraphs
from backend.engine.request import Request
from backend.engine.resolved_config import ResolvedConfig
from backend.engine.sampling_params import SamplingParams
from backend.engine.step_inputs import StepInputs

BLOCK_SIZE = 4


class Noting(GraphCapture):
    """Does not capture, but notes the sizes of the steps that run."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, step: DecodeStep, size: int) -> DecodeStep:
        def noted(seq_lens: Sequence[int]) -> None:
            self.sizes.append(size)
            step(seq_lens)

        return noted


@pytest.fixture
def config(checkpoint_dir: Callable[[str], Path]) -> ResolvedConfig:
    limits: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
    }
    return EngineConfig(model_dir=checkpoint_dir("llama"), device="cpu", dtype="float32", **limits).resolve()


def part(
    number: int, start: int, num_tokens: int, *, is_last: bool = True, drafts: tuple[int, ...] = ()
) -> ScheduledRequest:
    """Tokens of a request whose blocks are its own: 8 from `number * 8` on."""
    num_known = start + num_tokens - len(drafts)
    request = Request(
        f"r{number}", [(7 * i + number) % 200 for i in range(num_known + (not is_last))], SamplingParams(max_tokens=9)
    )
    request.block_table = [*range(8 * number, 8 * number + 8)]
    return ScheduledRequest(request, start, num_tokens, drafts)


PLANS = {
    "without padding": [part(0, 0, 16)],
    "one token of padding": [part(0, 0, 15)],
    "a prompt between decodes": [part(0, 3, 1), part(1, 0, 5), part(2, 9, 1)],
    "a chunk, a prompt, drafts": [
        part(0, 3, 1), part(1, 2, 9, is_last=False), part(2, 0, 20), part(3, 7, 3, drafts=(5, 6))
    ],
    "decodes": [part(i, i, 1) for i in range(6)],
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_hidden_states_and_cache_are_those_of_a_plain_step(
    config: ResolvedConfig, plan: list[ScheduledRequest]
) -> None:
    model, plain = PagedModel(config), PagedModel(config)
    with torch.inference_mode():
        graphs = PromptGraphs(config, model, NoCapture(), StepInputs(config.max_num_seqs, config.device))
        for each in (model, plain):
            each.kv._memory.normal_(generator=torch.Generator().manual_seed(0))
        batch, hidden = graphs.run(plan)
        expected_batch = make_batch(plan, BLOCK_SIZE, config.device)
        expected = plain.forward(expected_batch)
    assert len(hidden) == sum(scheduled.num_tokens for scheduled in plan)
    torch.testing.assert_close(hidden[batch.sampled_rows], expected[expected_batch.sampled_rows], atol=1e-5, rtol=1e-5)
    assert batch.sampled == expected_batch.sampled
    assert batch.next_tokens == expected_batch.next_tokens
    for block in range(model.kv.padding_block):
        torch.testing.assert_close(model.kv.block(block), plain.kv.block(block), atol=1e-5, rtol=1e-5)


def test_a_step_uses_the_next_larger_size(config: ResolvedConfig) -> None:
    capture = Noting()
    with torch.inference_mode():
        inputs = StepInputs(config.max_num_seqs, config.device)
        graphs = PromptGraphs(config, PagedModel(config), capture, inputs)
        assert graphs.max_tokens == 64
        for num_tokens in (2, 16, 17, 33):
            graphs.run([part(0, 0, num_tokens % 32), *([part(1, 0, 32)] if num_tokens > 32 else [])])
        assert graphs.steps.capture_next()
        graphs.run([part(0, 0, 1), part(1, 0, 32)])
    assert capture.sizes == [16, 16, 32, 64, 48]  # 48 is captured when it has been needed


def test_what_fits(config: ResolvedConfig) -> None:
    inputs = StepInputs(config.max_num_seqs, config.device)
    graphs = PromptGraphs(config, PagedModel(config), NoCapture(), inputs)
    assert graphs.fits([part(0, 0, 32), part(1, 0, 32)])
    assert not graphs.fits([part(0, 0, 32), part(1, 0, 32), part(2, 0, 1)])
    assert not graphs.fits([part(i, 0, 1) for i in range(7)])  # more sequences than run at once


def test_every_number_of_tokens_has_a_size_at_most_half_larger() -> None:
    assert list(SIZES) == sorted(SIZES)
    assert all(larger <= 1.5 * size or larger - size <= SIZES[0] for size, larger in pairwise(SIZES))
    assert all(size % SIZES[0] == 0 for size in SIZES)
