"""Evicted blocks are restored from host memory: in whole engines, and the order of eviction in the tier itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend.engine import kv_memory
from backend.engine.block_pool import BlockPool
from backend.engine.cached_block import CachedBlock
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import ConfigError, IntegrityError
from backend.engine.host_tier import HostTier
from backend.engine.kv_memory import HostSlots
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.kv_cache import KV_FORMATS
from tests.backend.checkpoints import VOCAB_SIZE

BLOCK_SIZE, NUM_BLOCKS = 4, 12
PROMPT = [(5 * i * i + i) % VOCAB_SIZE for i in range(33)]  # eight full blocks and one more token
OTHERS = [[(seed + 11 * i) % VOCAB_SIZE for i in range(40)] for seed in (1, 2, 3)]


@pytest.fixture
def load(checkpoint_dir: Callable[[str], Path]) -> Callable[..., Engine]:
    def load(**options: Any) -> Engine:
        defaults: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_threads": 1}
        return Engine.load(EngineConfig(model_dir=checkpoint_dir("llama"), **(defaults | options)))

    return load


def generate(engine: Engine, prompt: list[int], **options: Any) -> tuple[list[int], int]:
    """The output, and how many tokens of the prompt were cached."""
    request = Request("r", prompt, SamplingParams(max_tokens=6, temperature=0.0), **options)
    engine.add(request)
    while engine.has_unfinished:
        engine.step()
    engine.check_integrity()
    return request.token_ids[len(prompt) :], request.num_cached_tokens


@pytest.mark.parametrize("kv_cache_dtype", KV_FORMATS)
@pytest.mark.parametrize("in_a_file", [False, True])
def test_an_evicted_prefix_is_restored(
    load: Callable[..., Engine], kv_cache_dtype: str, in_a_file: bool, tmp_path: Path
) -> None:
    folder = tmp_path if in_a_file else None
    engine = load(kv_cache_dtype=kv_cache_dtype, kv_host_bytes=1 << 20, kv_host_dir=folder)
    first, cached = generate(engine, PROMPT)
    assert cached == 0
    for other in OTHERS:
        generate(engine, other)
    assert all(engine.scheduler.pool.find_cached_prefix([h]) == [] for h in hashes_of(engine, PROMPT)), (
        "it never left the cache"
    )
    assert generate(engine, PROMPT) == (first, 32)
    stats = engine.stats()
    assert stats.host_blocks_restored_total == 8
    assert 0 < stats.num_host_blocks_used == stats.host_blocks_saved_total <= stats.num_host_blocks
    assert stats.prefix_cache_hits_total == 32
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_ram_is_allocated_in_chunks(load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "CHUNK_BYTES", 10_000)  # two slots and a bit
    engine = load(kv_host_bytes=1 << 20)
    first, _ = generate(engine, PROMPT)
    for other in OTHERS:
        generate(engine, other)
    assert generate(engine, PROMPT) == (first, 32)
    tier = engine.scheduler.pool.tier
    assert tier is not None and isinstance(tier._store, HostSlots)
    addresses = {tier._store.slot(slot).data_ptr() for slot in range(tier.num_slots)}
    assert len(addresses) == tier.num_slots
    chunks = [chunk.nbytes for chunk in tier._store._chunks]
    assert len(chunks) > 3 and max(chunks) <= 10_000
    assert sum(chunks) == tier.num_slots * tier._store.slot(0).nbytes


def test_queued_copies_have_no_checksums(load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where copies are queued. Here they are not, but take the same way."""
    monkeypatch.setattr(kv_memory, "_checksum", None)
    engine = load(kv_host_bytes=1 << 20)
    tier = engine.scheduler.pool.tier
    assert tier is not None and isinstance(tier._store, HostSlots)
    tier._store._is_queued = True
    first, _ = generate(engine, PROMPT)
    for other in OTHERS:
        generate(engine, other)
    assert generate(engine, PROMPT) == (first, 32)
    assert engine.stats().host_blocks_restored_total == 8


def hashes_of(engine: Engine, prompt: list[int]) -> list[bytes]:
    request = Request("h", prompt, SamplingParams(max_tokens=1))
    return engine.scheduler.usable_hashes(request)


def test_without_the_tier_nothing_is_restored(load: Callable[..., Engine]) -> None:
    engine = load()
    generate(engine, PROMPT)
    for other in OTHERS:
        generate(engine, other)
    assert generate(engine, PROMPT)[1] == 0
    assert engine.stats().num_host_blocks == 0


def test_a_preempted_request_is_restored_from_it(load: Callable[..., Engine]) -> None:
    def run(engine: Engine) -> list[list[int]]:
        requests = [
            Request(f"r{i}", p[:20], SamplingParams(max_tokens=20, temperature=0.0)) for i, p in enumerate(OTHERS)
        ]
        for request in requests:
            engine.add(request)
        while engine.has_unfinished:
            engine.step()
        engine.check_integrity()
        return [request.token_ids for request in requests]

    engine = load(num_blocks=14, kv_host_bytes=1 << 20)
    assert run(engine) == run(load(num_blocks=64))
    assert engine.stats().preemptions_total > 0
    assert engine.stats().host_blocks_restored_total > 0


def test_the_cache_salt_isolates_tenants_in_the_tier(load: Callable[..., Engine]) -> None:
    engine = load(kv_host_bytes=1 << 20)
    generate(engine, PROMPT, cache_salt="a")
    for other in OTHERS:
        generate(engine, other)
    assert generate(engine, PROMPT, cache_salt="b")[1] == 0
    for other in OTHERS:
        generate(engine, other)
    assert generate(engine, PROMPT, cache_salt="a")[1] == 32


def test_a_corrupted_block_is_computed_again(load: Callable[..., Engine]) -> None:
    engine = load(kv_host_bytes=1 << 20)
    first, _ = generate(engine, PROMPT)
    for other in OTHERS:
        generate(engine, other)
    tier = engine.scheduler.pool.tier
    assert tier is not None and isinstance(tier._store, HostSlots)
    third = tier._foreground[hashes_of(engine, PROMPT)[2]].slot
    tier._store.slot(third).view(-1)[7] += 1
    assert generate(engine, PROMPT) == (first, 8)
    assert engine.stats().host_blocks_corrupted_total == 1


def test_clearing_the_cache_clears_the_tier(load: Callable[..., Engine]) -> None:
    engine = load(kv_host_bytes=1 << 20)
    generate(engine, PROMPT)
    for other in OTHERS:
        generate(engine, other)
    engine.scheduler.pool.clear()
    assert engine.stats().num_host_blocks_used == 0
    assert generate(engine, PROMPT)[1] == 0


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"kv_host_bytes": 0}, "kv_host_bytes"),
        ({"kv_host_bytes": 100}, "kv_host_bytes"),
        ({"kv_host_bytes": 1 << 20, "enable_prefix_caching": False}, "kv_host_bytes"),
        ({"kv_host_dir": Path("/tmp")}, "kv_host_dir"),
        ({"kv_host_bytes": 1 << 20, "kv_host_dir": Path("/nowhere")}, "kv_host_dir"),
        ({"kv_host_bytes": 1 << 60, "kv_host_dir": Path("/tmp")}, "kv_host_dir"),
    ],
)
def test_a_config_that_cannot_work_is_rejected_by_field_name(
    load: Callable[..., Engine], options: dict[str, Any], param: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**options)
    assert caught.value.param == param


class RecordingStore:
    """A store that only records the calls."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.saved: list[tuple[int, int]] = []

    def save(self, block: int, slot: int) -> int:
        self.saved.append((block, slot))
        return 0

    def load(self, slot: int, block: int, checksum: int) -> bool:
        return True


def save(tier: HostTier, names: str, *, background: bool = False) -> list[bool]:
    return [tier.save(name.encode(), i, background=background) for i, name in enumerate(names)]


def saved(tier: HostTier) -> str:
    """The names of the saved blocks in order of eviction."""
    return b"".join([*tier._background, *tier._foreground]).decode()


def test_the_least_recently_used_block_is_evicted_first() -> None:
    evicted: list[bytes] = []
    tier = HostTier(RecordingStore(3), evicted.append)
    assert save(tier, "abc") == [True] * 3
    tier.touch([b"a"], background=False)
    save(tier, "d")
    assert (saved(tier), evicted) == ("cad", [b"b"])
    tier.touch([b"c", b"a", b"x", b"d"], background=False)  # a chain, broken at x
    assert saved(tier) == "dac", "the head of the chain is evicted last"


def test_a_block_that_is_saved_already_is_not_copied_again() -> None:
    store = RecordingStore(2)
    tier = HostTier(store)
    save(tier, "ab")
    save(tier, "a")
    assert len(store.saved) == 2
    assert saved(tier) == "ba"


def test_background_work_evicts_no_foreground_block() -> None:
    tier = HostTier(RecordingStore(2))
    assert save(tier, "a", background=True) == [True]
    assert save(tier, "b") == [True]
    assert save(tier, "c") == [True]
    assert saved(tier) == "bc"
    assert save(tier, "d", background=True) == [False]
    assert saved(tier) == "bc"


def test_a_foreground_hit_makes_a_block_foreground() -> None:
    tier = HostTier(RecordingStore(2))
    save(tier, "ab", background=True)
    tier.touch([b"a"], background=False)
    assert save(tier, "cd", background=True) == [True, True]
    assert saved(tier) == "da"


def test_an_inconsistent_tier_fails_the_integrity_check() -> None:
    pool = BlockPool(2, 1, tier=(tier := HostTier(RecordingStore(2))))
    save(tier, "a")
    pool.check_integrity()
    tier._free_slots.append(0)
    with pytest.raises(IntegrityError, match="host tier"):
        pool.check_integrity()


class RecordingListener:
    def __init__(self) -> None:
        self.events: list[str] = []

    def stored(self, block: CachedBlock) -> None:
        self.events.append(f"+{block.block_hash.decode()}")

    def removed(self, block_hash: bytes) -> None:
        self.events.append(f"-{block_hash.decode()}")

    def cleared(self) -> None: ...

    def end_step(self) -> None: ...


def test_a_block_is_removed_when_it_is_in_neither_tier() -> None:
    listener = RecordingListener()
    pool = BlockPool(1, 1, listener, HostTier(RecordingStore(1)))
    for name in ("a", "b", "c"):
        blocks = pool.allocate(1)
        assert blocks is not None
        pool.cache_block(blocks[0], CachedBlock(name.encode(), b"", (1,)))
        pool.free(blocks)
    assert listener.events == ["+a", "+b", "-a", "+c"]
    blocks = pool.allocate(1)  # c evicts b from the tier
    assert blocks is not None
    assert pool.restore(blocks, [b"b"]) == 0
    assert pool.restore(blocks, [b"c"]) == 1
    assert listener.events == ["+a", "+b", "-a", "+c", "-b"]
    pool.check_integrity()
