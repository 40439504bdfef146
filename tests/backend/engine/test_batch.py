"""Steps as tensors: which final hidden states are output rows, and that they equal those of a full forward pass."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.engine.batch import Batch, make_batch
from backend.engine.config import EngineConfig
from backend.engine.paged_model import PagedModel
from backend.engine.plan import ScheduledRequest
from backend.engine.pooling import Pooling
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.layers.norm import RmsNorm
from backend.native import library
from tests.backend.checkpoints import CHECKPOINTS, VOCAB_SIZE

BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS = 4, 96, 24
CPU = torch.device("cpu")


def request(number: int, length: int, **options: Any) -> Request:
    scored = options.pop("scored", None)
    sampling = SamplingParams(max_tokens=0 if options.get("pooling") else 1, prompt_logprobs=scored)
    made = Request(f"r{number}", [(7 * number + i * i) % VOCAB_SIZE for i in range(length)], sampling, **options)
    made.block_table = list(range(8 * number, 8 * number + -(-MAX_TOKENS // BLOCK_SIZE)))
    return made


def batch_of(*plan: ScheduledRequest) -> Batch:
    return make_batch(plan, BLOCK_SIZE, CPU)


def output_rows_of(batch: Batch) -> list[int]:
    return batch.output_rows.rows.tolist() if batch.output_rows else [*range(len(batch.input_ids))]


def test_a_prompt_has_one_output_row_and_a_chunk_has_none() -> None:
    batch = batch_of(
        ScheduledRequest(request(0, 9), 0, 9),
        ScheduledRequest(request(1, 20), 4, 8),
        ScheduledRequest(request(2, 5), 4, 1),
    )
    assert output_rows_of(batch) == [8, 17]
    assert batch.output_lens == (1, 0, 1)
    assert batch.sampled == (0, 2)
    assert batch.sampled_rows.tolist() == [0, 1]
    assert batch.output_rows
    assert batch.output_rows.attention.query_lens == (1, 1)
    assert batch.output_rows.attention.seq_lens == (9, 5)
    assert batch.output_rows.attention.cu_seqlens_q.tolist() == [0, 1, 2]
    assert [table[0] for table in batch.output_rows.attention.block_tables.tolist()] == [0, 16]


def test_a_step_without_output_rows_gets_one_that_is_not_sampled() -> None:
    batch = batch_of(ScheduledRequest(request(0, 20), 0, 6), ScheduledRequest(request(1, 20), 0, 4))
    assert output_rows_of(batch) == [9]
    assert batch.sampled == ()
    assert not len(batch.sampled_rows)


def test_a_request_that_needs_all_hidden_states_gets_all_output_rows() -> None:
    batch = batch_of(
        ScheduledRequest(request(0, 20), 0, 3),
        ScheduledRequest(request(1, 20, pooling=Pooling.MEAN), 0, 4),
        ScheduledRequest(request(2, 3, scored=1), 0, 3),
        ScheduledRequest(request(3, 6), 2, 4),
    )
    assert output_rows_of(batch) == [3, 4, 5, 6, 7, 8, 9, 13]
    assert batch.output_lens == (0, 4, 3, 1)
    assert batch.sampled_rows.tolist() == [6, 7]


def test_drafts_are_output_rows_with_the_token_before_them() -> None:
    batch = batch_of(
        ScheduledRequest(request(0, 6), 2, 6, drafts=(1, 2)), ScheduledRequest(request(1, 6), 5, 3, drafts=(3, 4))
    )
    assert output_rows_of(batch) == [3, 4, 5, 6, 7, 8]
    assert batch.sampled == (0, 0, 0, 1, 1, 1)
    assert batch.sampled_rows.tolist() == [0, 1, 2, 3, 4, 5]


def test_all_tokens_of_decodes_are_output_rows() -> None:
    assert batch_of(ScheduledRequest(request(0, 6), 5, 1), ScheduledRequest(request(1, 9), 3, 1)).output_rows is None
    assert (
        batch_of(ScheduledRequest(request(0, 6), 5, 2, drafts=(1,)), ScheduledRequest(request(1, 9), 8, 1)).output_rows
        is None
    )


def some_plan(rng: random.Random) -> list[ScheduledRequest]:
    """Prompts, chunks and decodes in any order; some need all hidden states."""
    plan = []
    for number in range(rng.randrange(1, 6)):
        length = rng.randrange(1, MAX_TOKENS + 1)
        start = rng.choice([0, rng.randrange(length), length - 1])
        num_tokens = rng.choice([length - start, rng.randrange(1, length - start + 1)])
        kind: dict[str, Any] = rng.choice([{}, {}, {}, {"pooling": True}, {"scored": 0}])
        plan.append(ScheduledRequest(request(number, length, **kind), start, num_tokens))
    return plan


class CountingMlp:
    """Records the number of rows that a layer's MLP gets."""

    def __init__(self, mlp: Callable[[Tensor], Tensor]) -> None:
        self._mlp = mlp
        self.rows: list[int] = []

    def __call__(self, hidden: Tensor, adapters: None = None) -> Tensor:
        self.rows.append(len(hidden))
        return self._mlp(hidden)

    def after_norm(self, norm: RmsNorm, delta: Tensor, residual: Tensor, adapters: None) -> tuple[Tensor, Tensor]:
        normed, residual = norm.add(delta, residual)
        return self(normed), residual


@torch.inference_mode()
@pytest.mark.parametrize("ops", ["native", "reference"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_architecture_computes_the_output_rows_only_in_its_last_layer(
    checkpoint_dir: Callable[[str], Path], name: str, ops: str
) -> None:
    """In float32, the kernels give bitwise the same. Torch sums in another order for another number of rows."""
    if ops == "native" and library.load() is None:
        pytest.skip("there is no compiler here")
    config = EngineConfig(
        model_dir=checkpoint_dir(name), device="cpu", num_threads=1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE,
        max_model_len=32, enforce_eager=True, ops=ops, attention="auto" if ops == "native" else "sdpa",
    )  # fmt: skip
    model = PagedModel(config.resolve())
    layers: list[Any] = model._model._layers
    first, last = layers[0]._mlp, layers[-1]._mlp = CountingMlp(layers[0]._mlp), CountingMlp(layers[-1]._mlp)
    for block in range(NUM_BLOCKS):
        model.kv.block(block).normal_()
    rng = random.Random(name)
    for _ in range(20):
        batch = batch_of(*some_plan(rng))
        found = model.forward(batch)
        whole = model.forward(replace(batch, output_rows=None))
        torch.testing.assert_close(found, whole[output_rows_of(batch)], rtol=0, atol=0 if ops == "native" else 2e-5)
        assert first.rows[-2:] == [len(batch.input_ids)] * 2
        assert last.rows[-2:] == [len(found), len(whole)]
