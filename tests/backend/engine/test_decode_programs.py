"""Recorded decode steps: bitwise the same as unrecorded ones, whatever happens between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.engine.batch import Batch, make_batch
from backend.engine.config import EngineConfig
from backend.engine.decode_programs import MAX_ROWS
from backend.engine.engine import Engine
from backend.engine.interruption import Interruption
from backend.engine.outputs import TokenLogprob
from backend.engine.paged_model import MAX_GREEDY_ROWS, PagedModel
from backend.engine.plan import ScheduledRequest
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.kv_cache import KV_FORMATS
from backend.native import library
from backend.native.recording import StepInterrupted
from tests.backend.checkpoints import CHECKPOINTS, VOCAB_SIZE

if library.load() is None:
    pytest.skip("there is no compiler here", allow_module_level=True)

BLOCK_SIZE, CONTEXT = 4, 32
RECORDED = [name for name in CHECKPOINTS if not name.startswith(("deepseek", "moonlight"))]  # without torch in a step
NUM_TABLES = MAX_GREEDY_ROWS + 4  # of the sequences in one step
NUM_BLOCKS = NUM_TABLES * CONTEXT // BLOCK_SIZE


def decode(rng: random.Random, rows: int, tables: list[list[int]]) -> Batch:
    """A decode step of random sequences of any length."""
    plan = []
    for i, table in enumerate(rng.sample(tables, rows)):
        length = rng.randrange(1, CONTEXT + 1)
        request = Request(f"r{i}", [rng.randrange(VOCAB_SIZE) for _ in range(length)], SamplingParams(max_tokens=1))
        request.block_table = table[: -(-length // BLOCK_SIZE)]
        plan.append(ScheduledRequest(request, length - 1, 1))
    return make_batch(plan, BLOCK_SIZE, torch.device("cpu"))


def model_pair(directory: Path, **options: Any) -> tuple[PagedModel, PagedModel]:
    """A model with programs and one without, with the same random content in their caches."""
    defaults: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "num_threads": 1,
        "max_model_len": CONTEXT,
    }
    ours, theirs = (
        PagedModel(
            EngineConfig(model_dir=directory, device="cpu", enforce_eager=eager, **(defaults | options)).resolve()
        )
        for eager in (False, True)
    )
    for block in range(NUM_BLOCKS):
        rows, kv_format = ours.kv.block(block), ours.kv.format
        rows.copy_(kv_format.encode(torch.randn(*rows.shape[:-1], kv_format.head_dim(rows.shape[-1]))))
        theirs.kv.block(block).copy_(rows)
    return ours, theirs


def assert_the_same_when_recorded(ours: PagedModel, theirs: PagedModel, rng: random.Random) -> None:
    """Hidden states and caches are bitwise equal, and there is a program for each number of sequences."""
    tables = [[8 * i + j for j in range(CONTEXT // BLOCK_SIZE)] for i in range(NUM_TABLES)]
    for _ in range(40):
        batch = decode(rng, rng.randrange(1, 6), tables)
        assert torch.equal(ours.forward(batch), theirs.forward(batch))
        assert all(map(torch.equal, map(ours.kv.block, range(NUM_BLOCKS)), map(theirs.kv.block, range(NUM_BLOCKS))))
    assert theirs.programs is None
    assert ours.programs
    assert ours.programs.recorded == {1, 2, 3, 4, 5}


@torch.inference_mode()
@pytest.mark.parametrize("name", RECORDED)
def test_every_architecture(checkpoint_dir: Callable[[str], Path], name: str) -> None:
    ours, theirs = model_pair(checkpoint_dir(name))
    assert_the_same_when_recorded(ours, theirs, random.Random(name))


@torch.inference_mode()
@pytest.mark.parametrize("name", RECORDED)
def test_tokens_of_every_architecture(checkpoint_dir: Callable[[str], Path], name: str) -> None:
    ours, theirs = model_pair(checkpoint_dir(name))
    rng = random.Random(name)
    tables = [[8 * i + j for j in range(CONTEXT // BLOCK_SIZE)] for i in range(NUM_TABLES)]
    for i in range(3 * NUM_TABLES):
        batch = decode(rng, 1 + i % NUM_TABLES, tables)
        assert torch.equal(ours.next_tokens(batch), theirs.greedy_tokens(theirs.forward(batch)))
        assert all(map(torch.equal, map(ours.kv.block, range(NUM_BLOCKS)), map(theirs.kv.block, range(NUM_BLOCKS))))
    recorded = ours.greedy_programs.recorded if ours.greedy_programs else frozenset()
    assert recorded == set(range(1, MAX_GREEDY_ROWS + 1))


@torch.inference_mode()
@pytest.mark.parametrize("kv_cache_dtype", KV_FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kv_cache_format(checkpoint_dir: Callable[[str], Path], kv_cache_dtype: str, dtype: str) -> None:
    ours, theirs = model_pair(checkpoint_dir("qwen3"), kv_cache_dtype=kv_cache_dtype, dtype=dtype)
    assert_the_same_when_recorded(ours, theirs, random.Random(kv_cache_dtype))


@torch.inference_mode()
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_quantization(checkpoint_dir: Callable[[str], Path], quantization: str, dtype: str) -> None:
    ours, theirs = model_pair(checkpoint_dir("llama-biased"), quantization=quantization, dtype=dtype)
    rng = random.Random(1)
    tables = [[8 * i + j for j in range(CONTEXT // BLOCK_SIZE)] for i in range(NUM_TABLES)]
    for _ in range(30):
        batch = decode(rng, rng.randrange(1, 13), tables)
        assert torch.equal(ours.forward(batch), theirs.forward(batch))
    assert ours.programs
    assert {1, 2} <= ours.programs.recorded


@torch.inference_mode()
def test_steps_of_many_sequences_are_not_recorded(checkpoint_dir: Callable[[str], Path]) -> None:
    ours, theirs = model_pair(checkpoint_dir("llama"), max_num_seqs=MAX_ROWS + 8)
    rng = random.Random(2)
    for rows in (MAX_ROWS, MAX_ROWS + 1, MAX_ROWS + 8, MAX_ROWS):
        batch = decode(rng, rows, [[i] * (CONTEXT // BLOCK_SIZE) for i in range(MAX_ROWS + 8)])
        assert torch.equal(ours.forward(batch), theirs.forward(batch))
    assert ours.programs
    assert ours.programs.recorded == {MAX_ROWS}


@torch.inference_mode()
def test_a_step_interrupted_while_it_is_recorded_is_recorded_later(checkpoint_dir: Callable[[str], Path]) -> None:
    ours, theirs = model_pair(checkpoint_dir("llama"))
    batch = decode(random.Random(3), 3, [[8 * i + j for j in range(8)] for i in range(12)])
    for num_layers in range(2):  # computed before the interruption
        answers = iter([False] * (1 + num_layers) + [True])
        with pytest.raises(StepInterrupted):
            ours.forward(batch, lambda answers=answers: next(answers))  # type: ignore[misc]
        assert not [*answers]
    assert ours.programs
    assert not ours.programs.recorded
    for _ in range(2):
        assert torch.equal(ours.forward(batch, lambda: False), theirs.forward(batch))
    with pytest.raises(StepInterrupted):
        ours.forward(batch, lambda: True)
    assert ours.programs.recorded == {3}


class RegularInterruption(Interruption):
    """Interrupts one step in seven."""

    num_checks = 0

    def _is_due(self) -> bool:
        self.num_checks += 1
        self.num_interrupted += self.num_checks % 7 == 0
        return self.num_checks % 7 == 0


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
]


def history(engine: Engine, seed: int) -> dict[str, list[TokenLogprob]]:
    """Requests arrive, end, are aborted and preempted at any time; prompts are chunked and cached."""
    rng = random.Random(seed)
    outputs: dict[str, list[TokenLogprob]] = {}

    def step() -> None:
        for output in engine.step():
            outputs[output.request_id] += output.logprobs

    for number in range(rng.randrange(6, 18)):
        shared = [(5 * i * i + i) % VOCAB_SIZE for i in range(rng.choice([0, 8, 21]))]
        prompt = [*shared, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 12)))]
        sampling = SamplingParams(max_tokens=rng.randrange(5, 30), logprobs=2, **rng.choice(SAMPLINGS))
        engine.add(Request(f"r{number}", prompt, sampling, priority=rng.choice([0, 0, 1])))
        outputs[f"r{number}"] = []
        for _ in range(rng.choice([0, 1, 4, 12])):
            if engine.has_unfinished:
                step()
        if rng.random() < 0.2:
            engine.abort(f"r{rng.randrange(number + 1)}")
    while engine.has_unfinished:
        step()
    engine.check_integrity()
    return outputs


@pytest.mark.parametrize("seed", range(12))
def test_random_histories(checkpoint_dir: Callable[[str], Path], seed: int) -> None:
    """Bitwise equal log-probabilities."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 16])
    options: dict[str, Any] = {
        "block_size": block_size,
        "num_blocks": rng.choice([70, 100, 300]) // block_size + 1,
        "max_model_len": 64,
        "max_num_seqs": rng.choice([3, 8]),
        "max_num_batched_tokens": rng.choice([8, 64]),
        "enable_prefix_caching": rng.random() < 0.7,
        "dtype": rng.choice(["float32", "bfloat16"]),
    }
    if seed % 6 == 5:
        options |= {"speculation": "draft_model", "draft_model_dir": checkpoint_dir("llama"), "dtype": "float32"}
    names = ["llama", "gemma3", "qwen2-sliding"]
    directory = checkpoint_dir(names[seed % 3] if "speculation" not in options else "llama")
    engines = [
        Engine.load(EngineConfig(model_dir=directory, device="cpu", num_threads=1, enforce_eager=eager, **options))
        for eager in (False, True)
    ]
    if seed % 3 == 0:
        for engine in engines:
            engine.interruption = RegularInterruption()
    ours, theirs = (history(engine, seed) for engine in engines)
    assert ours == theirs
    assert any(len(logprobs) > 4 for logprobs in ours.values())
    if "speculation" not in options:  # the number of drafts depends on the duration of steps
        assert engines[0].stats() == engines[1].stats()
