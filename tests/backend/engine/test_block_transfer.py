"""Blocks that one engine has computed are read there and written to another one, which continues as if it had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.engine.block_transfer import BlockTransfer
from backend.engine.cached_block import CachedBlock
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.kv_cache import KV_FORMATS
from tests.backend.checkpoints import VOCAB_SIZE

BLOCK_SIZE, NUM_BLOCKS = 4, 16
PROMPT = [(5 * i * i + i) % VOCAB_SIZE for i in range(35)]  # eight full blocks and three more tokens
OTHERS = [[(seed + 11 * i) % VOCAB_SIZE for i in range(48)] for seed in (1, 2)]

Load = Callable[..., Engine]


@pytest.fixture
def load(checkpoint_dir: Callable[[str], Any]) -> Load:
    def load(listener: Any = None, **options: Any) -> Engine:
        defaults: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_threads": 1}
        return Engine.load(EngineConfig(model_dir=checkpoint_dir("llama"), **(defaults | options)), listener)

    return load


class Listener:
    """Keeps what is published as KV events."""

    def __init__(self) -> None:
        self.blocks: list[CachedBlock] = []
        self.removed_hashes: list[bytes] = []
        self.num_batches = 0

    def stored(self, block: CachedBlock) -> None:
        self.blocks.append(block)

    def removed(self, block_hash: bytes) -> None:
        self.removed_hashes.append(block_hash)

    def cleared(self) -> None:
        raise NotImplementedError

    def end_step(self) -> None:
        self.num_batches += 1


def request_of(prompt: Sequence[int], **options: Any) -> Request:
    return Request("r", list(prompt), SamplingParams(max_tokens=8, temperature=0.0), **options)


def blocks_of(engine: Engine) -> BlockTransfer:
    return BlockTransfer(engine.scheduler, engine.runner.kv)


def run(engine: Engine, request: Request) -> list[int]:
    engine.add(request)
    while engine.has_unfinished:
        engine.step()
    engine.check_integrity()
    return request.token_ids[request.num_prompt_tokens :]


def move(source: Engine, target: Engine, request: Request, num_blocks: int | None = None) -> int:
    """Copies the blocks that the target lacks, as far as the source has them. Returns how many."""
    missing = blocks_of(target).find_missing(request)
    content = blocks_of(source).read(missing.hashes[:num_blocks])
    assert blocks_of(target).write(request, missing.first, content)
    for engine in (source, target):
        engine.scheduler.pool.check_integrity()
    return len(content)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", KV_FORMATS)
def test_the_answer_is_the_same_with_blocks_of_another_engine(load: Load, dtype: str, kv_cache_dtype: str) -> None:
    """It is that with blocks of its own. In float32, it is also that without any."""
    source, target = (load(dtype=dtype, kv_cache_dtype=kv_cache_dtype) for _ in range(2))
    first, expected, request = (request_of(PROMPT) for _ in range(3))
    computed = run(source, first)
    assert move(source, target, request) == 8
    output = run(target, request)
    assert output == run(source, expected)
    assert output == computed or dtype != "float32"
    assert (first.num_cached_tokens, expected.num_cached_tokens, request.num_cached_tokens) == (0, 32, 32)


def test_only_what_is_missing_is_asked_for(load: Load) -> None:
    source, target = load(), load()
    run(source, request_of(PROMPT))
    run(target, request_of(PROMPT[:14]))  # three full blocks
    request = request_of(PROMPT)
    missing = blocks_of(target).find_missing(request)
    assert (missing.first, len(missing.hashes)) == (3, 5)
    assert move(source, target, request) == 5
    assert blocks_of(target).find_missing(request_of(PROMPT)).hashes == ()


def test_a_part_of_a_prefix_is_of_use(load: Load) -> None:
    source, target, alone = load(), load(), load()
    run(source, request_of(PROMPT))
    request = request_of(PROMPT)
    assert move(source, target, request, num_blocks=3) == 3
    assert run(target, request) == run(alone, request_of(PROMPT))
    assert request.num_cached_tokens == 12


@pytest.mark.parametrize("method", ["read", "read_beside_steps"])
def test_blocks_of_another_salt_are_not_found(load: Load, method: str) -> None:
    source = load()
    run(source, request_of(PROMPT, cache_salt="a"))
    for salt, expected in (("a", 8), ("b", 0), ("", 0)):
        hashes = blocks_of(load()).find_missing(request_of(PROMPT, cache_salt=salt)).hashes
        assert len(hashes) == 8
        assert len(getattr(blocks_of(source), method)(hashes)) == expected


def test_evicted_blocks_end_what_is_read(load: Load) -> None:
    source = load()
    request = request_of(PROMPT)
    run(source, request)
    run(source, request_of(OTHERS[0][:36]))  # evicts the end of the prefix
    content = blocks_of(source).read(request.block_hashes)
    assert 0 < len(content) < 8
    assert torch.equal(blocks_of(source).read_beside_steps(request.block_hashes), content)


def test_a_prefix_that_is_read_is_evicted_last(load: Load) -> None:
    for touches in (False, True):
        engine = load(num_blocks=20)
        first, second = request_of(PROMPT), request_of(OTHERS[0][:26])
        run(engine, first)
        run(engine, second)
        if touches:
            blocks_of(engine).touch(first.block_hashes[:8])
        run(engine, request_of(OTHERS[1][:36]))
        num_left = [len(engine.scheduler.pool.find_cached_prefix(each.block_hashes)) for each in (first, second)]
        assert (num_left[0] == 8) == touches, num_left


def test_blocks_in_the_host_tier_are_restored_and_read(load: Load) -> None:
    source, target, alone = load(kv_host_bytes=1 << 20), load(), load()
    run(source, request_of(PROMPT))
    for other in OTHERS:
        run(source, request_of(other))
    assert not source.scheduler.pool.find_cached_prefix(request_of(PROMPT).block_hashes)
    assert not blocks_of(source).can_read_beside_steps
    request = request_of(PROMPT)
    assert move(source, target, request) == 8
    assert run(target, request) == run(alone, request_of(PROMPT))
    assert source.stats().host_blocks_restored_total == 8


def test_blocks_in_ones_own_host_tier_are_not_missing(load: Load) -> None:
    engine = load(kv_host_bytes=1 << 20)
    run(engine, request_of(PROMPT))
    for other in OTHERS:
        run(engine, request_of(other))
    assert blocks_of(engine).find_missing(request_of(PROMPT)).hashes == ()


def test_nothing_is_missing_or_written_without_room(load: Load) -> None:
    source, target = load(), load()
    run(source, request_of(PROMPT))
    request = request_of(PROMPT)
    missing = blocks_of(target).find_missing(request)
    content = blocks_of(source).read(missing.hashes)
    pool = target.scheduler.pool
    taken = pool.allocate(NUM_BLOCKS - 7)
    assert taken
    assert blocks_of(target).find_missing(request_of(PROMPT)).hashes == ()
    assert not blocks_of(target).write(request, 0, content)
    assert pool.num_cached == 0
    pool.free(taken)
    pool.check_integrity()


def test_a_block_that_was_computed_meanwhile_is_not_doubled(load: Load) -> None:
    source, target = load(), load()
    run(source, request_of(PROMPT))
    request = request_of(PROMPT)
    missing = blocks_of(target).find_missing(request)
    content = blocks_of(source).read(missing.hashes)
    run(target, request_of(PROMPT))
    num_cached = target.scheduler.pool.num_cached
    assert blocks_of(target).write(request, 0, content)
    assert target.scheduler.pool.num_cached == num_cached
    target.check_integrity()


def test_written_blocks_are_published_as_kv_events(load: Load) -> None:
    source, listener = load(), Listener()
    run(source, request_of(PROMPT, cache_salt="a"))
    target, request = load(listener), request_of(PROMPT, cache_salt="a")
    move(source, target, request)
    assert [token for block in listener.blocks for token in block.token_ids] == PROMPT[:32]
    assert listener.blocks[0].cache_salt == "a"
    assert listener.num_batches == 1


def test_a_block_that_is_overwritten_while_it_is_read_is_not_used(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load()
    request = request_of(PROMPT)
    run(engine, request)
    kv = engine.runner.kv
    read = type(kv).read

    def read_during_steps(self: Any, blocks: Sequence[int]) -> Tensor:
        content = read(self, blocks)
        run(engine, request_of(OTHERS[0][:36]))  # takes some of these blocks before the reader has checked them
        return content

    before = blocks_of(engine).read(request.block_hashes[:8])
    monkeypatch.setattr(type(kv), "read", read_during_steps)
    content = blocks_of(engine).read_beside_steps(request.block_hashes[:8])
    assert 0 < len(content) < 8
    assert torch.equal(content, before[: len(content)])


def test_blocks_that_are_read_while_steps_run_have_the_right_content(load: Load) -> None:
    engine = load()
    request = request_of(PROMPT)
    run(engine, request)
    hashes = request.block_hashes[:8]
    expected = blocks_of(engine).read(hashes)
    found: list[Tensor] = []
    done = False

    def read() -> None:
        while not done:
            found.append(blocks_of(engine).read_beside_steps(hashes))

    reader = Thread(target=read)
    reader.start()
    try:
        for i in range(60):
            run(engine, request_of(OTHERS[i % 2] if i % 3 else PROMPT))
    finally:
        done = True
        reader.join()
    lengths = {len(content) for content in found}
    assert len(lengths) > 1, "the reader has met both states"
    assert all(torch.equal(content, expected[: len(content)]) for content in found)


def test_dropped_blocks_are_published_as_kv_events(load: Load) -> None:
    listener = Listener()
    source, request = load(listener), request_of(PROMPT)
    run(source, request)
    batches = listener.num_batches
    blocks_of(source).drop(request.block_hashes[2:5])
    assert listener.removed_hashes == [*reversed(request.block_hashes[2:5])]
    assert listener.num_batches == batches + 1
    assert len(blocks_of(source).find_missing(request_of(PROMPT)).hashes) == 6
    source.check_integrity()


def test_dropped_blocks_stay_in_the_host_tier(load: Load) -> None:
    source, request = load(kv_host_bytes=1 << 20), request_of(PROMPT)
    expected = run(source, request)
    blocks_of(source).drop(request.block_hashes)
    assert source.scheduler.pool.num_cached == 0
    assert not blocks_of(source).find_missing(request_of(PROMPT)).hashes, "they are restored"
    assert run(source, request_of(PROMPT)) == expected
