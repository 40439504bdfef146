from __future__ import annotations

from gateway.providers.media_fetch.cache import ENTRY_BYTES, FetchedMedium, MediaCache

MEDIUM = FetchedMedium("image/png", "A" * 1_000)
SIZE = 1_000 + ENTRY_BYTES + len("url0")


def test_the_media_that_were_used_last_are_kept() -> None:
    cache = MediaCache()
    for number in range(3):
        cache.put("t", f"url{number}", MEDIUM, 100.0, 3 * SIZE)
    assert cache.get("t", "url0", 0.0) == MEDIUM
    cache.put("t", "url3", MEDIUM, 100.0, 3 * SIZE)
    assert cache.size_bytes == 3 * SIZE
    assert [cache.get("t", f"url{number}", 0.0) is not None for number in range(4)] == [True, False, True, True]


def test_a_medium_that_is_too_large_is_not_kept() -> None:
    cache = MediaCache()
    cache.put("t", "url0", MEDIUM, 100.0, SIZE - 1)
    assert (cache.get("t", "url0", 0.0), cache.size_bytes) == (None, 0)


def test_a_medium_expires_and_is_replaced() -> None:
    cache = MediaCache()
    cache.put("t", "url0", MEDIUM, 10.0, SIZE)
    cache.put("t", "url0", MEDIUM, 20.0, SIZE)
    assert cache.get("t", "url0", 19.9) == MEDIUM
    assert (cache.get("t", "url0", 20.0), cache.size_bytes) == (None, 0)


def test_tenants_do_not_see_what_others_fetched() -> None:
    cache = MediaCache()
    cache.put("t", "url0", MEDIUM, 100.0, SIZE)
    assert cache.get("u", "url0", 0.0) is None
