"""Blocks that the cache gives up come back from host memory: in whole engines, and what is kept by which order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend.engine import kv_memory
from backend.engine.block_pool import BlockPool, CachedBlock
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import ConfigError, IntegrityError
from backend.engine.host_tier import HostTier
from backend.engine.kv_memory import HostSlots
from backend.engine.request import Request, SamplingParams
from backend.kv_cache import KV_FORMATS
from tests.backend.checkpoints import VOCAB_SIZE

BLOCK_SIZE, NUM_BLOCKS = 4, 12
PROMPT = [(5 * i * i + i) % VOCAB_SIZE for i in range(33)]  # eight full blocks, and one token more
OTHERS = [[(seed + 11 * i) % VOCAB_SIZE for i in range(40)] for seed in (1, 2, 3)]


@pytest.fixture
def load(checkpoint_dir: Callable[[str], Path]) -> Callable[..., Engine]:
    def load(**options: Any) -> Engine:
        defaults: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_threads": 1}
        return Engine.load(EngineConfig(model_dir=checkpoint_dir("llama"), **(defaults | options)))

    return load


def ask(engine: Engine, prompt: list[int], **options: Any) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were cached."""
    request = Request("r", prompt, SamplingParams(max_tokens=6, temperature=0.0), **options)
    engine.add(request)
    while engine.has_unfinished:
        engine.step()
    engine.check_integrity()
    return request.token_ids[len(prompt) :], request.num_cached_tokens


@pytest.mark.parametrize("form", KV_FORMATS)
@pytest.mark.parametrize("in_a_file", [False, True])
def test_what_others_pushed_out_comes_back(
    load: Callable[..., Engine], form: str, in_a_file: bool, tmp_path: Path
) -> None:
    folder = tmp_path if in_a_file else None
    engine = load(kv_cache_dtype=form, kv_host_bytes=1 << 20, kv_host_dir=folder)
    first, cached = ask(engine, PROMPT)
    assert cached == 0
    for other in OTHERS:
        ask(engine, other)
    assert all(engine.scheduler.pool.find_cached_prefix([h]) == [] for h in hashes_of(engine, PROMPT)), (
        "it never left the cache"
    )
    assert ask(engine, PROMPT) == (first, 32)
    stats = engine.stats()
    assert stats.host_blocks_restored_total == 8
    assert 0 < stats.num_host_blocks_used == stats.host_blocks_saved_total <= stats.num_host_blocks
    assert stats.prefix_cache_hits_total == 32
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_ram_is_taken_in_parts(load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "PART_BYTES", 10_000)  # two slots and a bit
    engine = load(kv_host_bytes=1 << 20)
    first, _ = ask(engine, PROMPT)
    for other in OTHERS:
        ask(engine, other)
    assert ask(engine, PROMPT) == (first, 32)
    tier = engine.scheduler.pool.tier
    assert tier is not None and isinstance(tier._store, HostSlots)
    places = {tier._store.slot(slot).data_ptr() for slot in range(tier.num_slots)}
    assert len(places) == tier.num_slots
    parts = [part.nbytes for part in tier._store._parts]
    assert len(parts) > 3 and max(parts) <= 10_000
    assert sum(parts) == tier.num_slots * tier._store.slot(0).nbytes


def hashes_of(engine: Engine, prompt: list[int]) -> list[bytes]:
    request = Request("h", prompt, SamplingParams(max_tokens=1))
    return engine.scheduler._full_hashes(request)


def test_without_it_nothing_comes_back(load: Callable[..., Engine]) -> None:
    engine = load()
    ask(engine, PROMPT)
    for other in OTHERS:
        ask(engine, other)
    assert ask(engine, PROMPT)[1] == 0
    assert engine.stats().num_host_blocks == 0


def test_what_was_preempted_goes_on_from_it(load: Callable[..., Engine]) -> None:
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


def test_a_salt_keeps_tenants_apart_there_too(load: Callable[..., Engine]) -> None:
    engine = load(kv_host_bytes=1 << 20)
    ask(engine, PROMPT, cache_salt="a")
    for other in OTHERS:
        ask(engine, other)
    assert ask(engine, PROMPT, cache_salt="b")[1] == 0
    for other in OTHERS:
        ask(engine, other)
    assert ask(engine, PROMPT, cache_salt="a")[1] == 32


def test_what_is_no_longer_what_was_saved_is_computed(load: Callable[..., Engine]) -> None:
    engine = load(kv_host_bytes=1 << 20)
    first, _ = ask(engine, PROMPT)
    for other in OTHERS:
        ask(engine, other)
    tier = engine.scheduler.pool.tier
    assert tier is not None and isinstance(tier._store, HostSlots)
    third = tier._others[hashes_of(engine, PROMPT)[2]].slot
    tier._store.slot(third).view(-1)[7] += 1
    assert ask(engine, PROMPT) == (first, 8)
    assert engine.stats().host_blocks_corrupted_total == 1


def test_clearing_the_cache_clears_it(load: Callable[..., Engine]) -> None:
    engine = load(kv_host_bytes=1 << 20)
    ask(engine, PROMPT)
    for other in OTHERS:
        ask(engine, other)
    engine.scheduler.pool.clear()
    assert engine.stats().num_host_blocks_used == 0
    assert ask(engine, PROMPT)[1] == 0


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
def test_what_cannot_work_is_refused_by_name(load: Callable[..., Engine], options: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**options)
    assert caught.value.param == param


class Noted:
    """A store that keeps nothing but what it was told."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.saved: list[tuple[int, int]] = []

    def save(self, block: int, slot: int) -> int:
        self.saved.append((block, slot))
        return 0

    def load(self, slot: int, block: int, checksum: int) -> bool:
        return True


def keep(tier: HostTier, names: str, *, background: bool = False) -> list[bool]:
    return [tier.keep(name.encode(), i, background=background) for i, name in enumerate(names)]


def kept(tier: HostTier) -> str:
    return b"".join([*tier._background, *tier._others]).decode()


def test_the_least_recently_used_go_first() -> None:
    lost: list[bytes] = []
    tier = HostTier(Noted(3), lost.append)
    assert keep(tier, "abc") == [True] * 3
    tier.touch([b"a"], background=False)
    keep(tier, "d")
    assert (kept(tier), lost) == ("cad", [b"b"])
    tier.touch([b"c", b"a", b"x", b"d"], background=False)  # a chain, broken at x
    assert kept(tier) == "dac", "its head is to stay the longest"


def test_what_is_kept_already_is_not_copied_again() -> None:
    store = Noted(2)
    tier = HostTier(store)
    keep(tier, "ab")
    keep(tier, "a")
    assert len(store.saved) == 2
    assert kept(tier) == "ba"


def test_background_work_costs_nobody_else_a_place() -> None:
    tier = HostTier(Noted(2))
    assert keep(tier, "a", background=True) == [True]
    assert keep(tier, "b") == [True]
    assert keep(tier, "c") == [True]
    assert kept(tier) == "bc"
    assert keep(tier, "d", background=True) == [False]
    assert kept(tier) == "bc"


def test_what_others_use_is_no_longer_background_works() -> None:
    tier = HostTier(Noted(2))
    keep(tier, "ab", background=True)
    tier.touch([b"a"], background=False)
    assert keep(tier, "cd", background=True) == [True, True]
    assert kept(tier) == "da"


def test_books_that_do_not_balance_are_found() -> None:
    pool = BlockPool(2, 1, tier=(tier := HostTier(Noted(2))))
    keep(tier, "a")
    pool.check_integrity()
    tier._free.append(0)
    with pytest.raises(IntegrityError, match="host tier"):
        pool.check_integrity()


class Heard:
    """A listener."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def stored(self, block: CachedBlock) -> None:
        self.events.append(f"+{block.block_hash.decode()}")

    def removed(self, block_hash: bytes) -> None:
        self.events.append(f"-{block_hash.decode()}")

    def cleared(self) -> None: ...

    def end_step(self) -> None: ...


def test_a_block_is_gone_when_it_is_in_neither_tier() -> None:
    heard = Heard()
    pool = BlockPool(1, 1, heard, HostTier(Noted(1)))
    for name in ("a", "b", "c"):
        blocks = pool.allocate(1)
        assert blocks is not None
        pool.cache_block(blocks[0], CachedBlock(name.encode(), b"", (1,)))
        pool.free(blocks)
    assert heard.events == ["+a", "+b", "-a", "+c"]
    blocks = pool.allocate(1)  # c takes the place of b
    assert blocks is not None
    assert pool.restore(blocks, [b"b"]) == 0
    assert pool.restore(blocks, [b"c"]) == 1
    assert heard.events == ["+a", "+b", "-a", "+c", "-b"]
    pool.check_integrity()
