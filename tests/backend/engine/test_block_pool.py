from __future__ import annotations

import pytest

from backend.engine.block_pool import BlockPool
from backend.engine.cached_block import ROOT_HASH, CachedBlock, hash_block
from backend.engine.errors import IntegrityError


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def stored(self, block: CachedBlock) -> None:
        self.events.append(("stored", block))

    def removed(self, block_hash: bytes) -> None:
        self.events.append(("removed", block_hash))

    def cleared(self) -> None:
        self.events.append(("cleared", None))

    def end_step(self) -> None:
        raise NotImplementedError  # a pool ends no step


def chain(*blocks: tuple[int, ...], salt: str = "") -> list[CachedBlock]:
    contents: list[CachedBlock] = []
    parent = ROOT_HASH
    for tokens in blocks:
        own_salt = "" if contents else salt
        contents.append(CachedBlock(hash_block(parent, tokens, own_salt), parent, tokens, own_salt))
        parent = contents[-1].block_hash
    return contents


def fill(pool: BlockPool, contents: list[CachedBlock]) -> list[int]:
    table = pool.allocate(len(contents))
    assert table is not None
    for block, content in zip(table, contents, strict=True):
        pool.cache_block(block, content)
    return table


def hashes(contents: list[CachedBlock]) -> list[bytes]:
    return [content.block_hash for content in contents]


def test_the_hash_is_a_documented_function_of_parent_tokens_and_salt() -> None:
    # Routers index blocks by these digests, so they may not change from one release to the next.
    first = hash_block(ROOT_HASH, [1, 2])
    assert first.hex() == "e7ca17d6581d126af7e0c8574cdd8987ed93319969b54a5e2a272d585a38f3ea"
    assert (
        len({first, hash_block(first, [1, 2]), hash_block(ROOT_HASH, [1, 2], "salt"), hash_block(ROOT_HASH, [2, 1])})
        == 4
    )


def test_cached_blocks_are_found_up_to_the_first_difference() -> None:
    pool = BlockPool(8, 2)
    contents = chain((1, 2), (3, 4), (5, 6))
    table = fill(pool, contents)
    assert pool.find_cached_prefix(hashes(contents)) == table
    assert pool.find_cached_prefix(hashes(chain((1, 2), (3, 4), (9, 9)))) == table[:2]
    assert pool.find_cached_prefix(hashes(chain((1, 2), (3, 4), salt="tenant"))) == []


def test_freed_blocks_stay_cached_and_are_shared_again() -> None:
    pool = BlockPool(4, 2)
    contents = chain((1, 2), (3, 4))
    table = fill(pool, contents)
    pool.free(table)
    assert pool.num_free == 4
    assert pool.allocate(2, pool.find_cached_prefix(hashes(contents))) == [*table, 2, 3]
    assert pool.num_free == 0
    pool.check_integrity()


def test_a_prefix_is_evicted_from_its_end_and_uncached_blocks_are_used_first() -> None:
    pool = BlockPool(4, 2)
    contents = chain((1, 2), (3, 4), (5, 6))
    table = fill(pool, contents)
    uncached = pool.allocate(1)
    assert uncached is not None
    pool.free(table)
    pool.free(uncached)  # freed last, but reused first, because nothing is lost with it
    assert [pool.allocate(1), pool.allocate(1)] == [uncached, table[2:]]
    assert pool.find_cached_prefix(hashes(contents)) == table[:2]


def test_new_blocks_are_in_the_order_of_memory() -> None:
    pool = BlockPool(8, 2)
    table = pool.allocate(5)
    assert table == [0, 1, 2, 3, 4]
    pool.free([3, 0, 4, 1, 2])
    assert pool.allocate(6) == [1, 2, 4, 5, 6, 7]  # those that were never used, and those that were freed first


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(4, 2)
    old, new = chain((1, 2), (3, 4)), chain((5, 6), (7, 8))
    old_table, new_table = fill(pool, old), fill(pool, new)
    pool.free(old_table)
    pool.free(new_table)
    revived = pool.allocate(0, pool.find_cached_prefix(hashes(old)))
    assert revived == old_table
    pool.free(revived)  # now `new` is the older one
    pool.allocate(2)
    assert pool.find_cached_prefix(hashes(old)) == old_table
    assert pool.find_cached_prefix(hashes(new)) == []


def test_allocation_is_all_or_nothing_and_counts_revived_blocks() -> None:
    pool = BlockPool(3, 2)
    contents = chain((1, 2), (3, 4))
    pool.free(fill(pool, contents))
    cached = pool.find_cached_prefix(hashes(contents))
    assert pool.allocate(2, cached) is None
    assert (pool.num_free, pool.find_cached_prefix(hashes(contents))) == (3, cached)
    assert pool.allocate(1, cached) is not None
    assert pool.allocate(0) == []
    pool.check_integrity()


def test_an_equal_block_computed_twice_is_cached_once() -> None:
    pool = BlockPool(4, 2)
    contents = chain((1, 2))
    first, second = fill(pool, contents), fill(pool, contents)
    assert pool.find_cached_prefix(hashes(contents)) == first
    pool.free(first)
    pool.free(second)
    pool.check_integrity()
    assert pool.num_cached == 1


def test_the_listener_is_notified_of_every_change_once() -> None:
    recorder = Recorder()
    pool = BlockPool(2, 2, recorder)
    contents = chain((1, 2), (3, 4))
    table = fill(pool, contents)
    pool.cache_block(table[0], contents[0])
    pool.free(table)
    pool.allocate(1)
    pool.clear()
    assert recorder.events == [
        ("stored", contents[0]),
        ("stored", contents[1]),
        ("removed", contents[1].block_hash),
        ("cleared", None),
    ]


def test_blocks_used_by_background_work_only_are_evicted_first() -> None:
    pool = BlockPool(4, 1)
    contents = {name: chain((token,)) for token, name in enumerate("abcd")}
    tables: dict[str, list[int]] = {}
    for name, content in contents.items():
        tables[name] = pool.allocate(1, background=name in "bcd") or []
        pool.cache_block(tables[name][0], content[0])
    for name in "abcd":
        pool.free(tables[name])
    # A foreground hit on c makes it foreground, and a background hit on a does not make it background.
    for name, background in (("c", False), ("a", True)):
        pool.free(pool.allocate(0, pool.find_cached_prefix(hashes(contents[name])), background=background) or [])
        pool.check_integrity()
    evicted = []
    for _ in contents:
        assert pool.allocate(1)
        evicted += [
            name for name in contents if name not in evicted and not pool.find_cached_prefix(hashes(contents[name]))
        ]
    assert evicted == ["b", "d", "c", "a"]


def test_a_cleared_pool_has_uncached_blocks_only() -> None:
    pool = BlockPool(2, 1)
    for background, content in ((True, chain((1,))), (False, chain((2,)))):
        table = pool.allocate(1, background=background) or []
        pool.cache_block(table[0], content[0])
        pool.free(table)
    pool.clear()
    pool.check_integrity()
    assert pool.num_free == 2
    assert len(set(pool.allocate(2) or ())) == 2


def test_clearing_leaves_blocks_in_use_alone() -> None:
    pool = BlockPool(3, 2)
    contents = chain((1, 2))
    table = fill(pool, contents)
    pool.clear()
    assert pool.find_cached_prefix(hashes(contents)) == []
    pool.check_integrity()
    pool.free(table)
    assert pool.num_free == 3


@pytest.mark.parametrize(
    ("corrupt", "fault"),
    [
        (lambda pool: pool._uncached.popitem(), "do not add up to 4"),
        (lambda pool: pool._cached.update([pool._uncached.popitem()]), "wrong free list"),
        (lambda pool: pool._ref_counts.__setitem__(3, 1), "a block in a free list is in use"),
        (lambda pool: pool._ref_counts.__setitem__(3, -1), "negative"),
        (lambda pool: pool._hashes.__setitem__(0, None), "in the index, 0 with a hash"),
        (lambda pool: pool._hashes.__setitem__(0, b"other"), "with other content"),
    ],
)
def test_integrity_check_names_the_fault(corrupt, fault) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(4, 2)
    pool.free(fill(pool, chain((1, 2))))
    pool.check_integrity()
    corrupt(pool)
    with pytest.raises(IntegrityError, match=fault):
        pool.check_integrity()


def test_dropped_blocks_are_evicted_at_once_unless_they_are_in_use() -> None:
    listener = Recorder()
    pool = BlockPool(6, 2, listener)
    contents = chain((1, 2), (3, 4), (5, 6), (7, 8))
    table = fill(pool, contents)
    pool.drop(hashes(contents))
    assert pool.num_cached == 4, "all of them are in use"
    pool.free(table[1:])
    listener.events.clear()
    pool.drop([*hashes(contents), b"unknown"])
    assert listener.events == [("removed", content.block_hash) for content in reversed(contents[1:])]
    assert pool.find_cached_prefix(hashes(contents)) == table[:1]
    assert pool.num_free == 5
    pool.check_integrity()
    other = fill(pool, chain((9, 9), (8, 8)))
    assert pool.num_cached == 3, "nothing else was evicted"
    pool.free([*table[:1], *other])
    pool.check_integrity()
