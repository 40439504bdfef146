from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from backend.engine.occurrence_counts import OccurrenceCounts

TOKENS = st.lists(st.integers(0, 9))


@given(TOKENS, TOKENS, TOKENS)
def test_every_token_once_with_how_often_it_has_come(met: list[int], come: list[int], later: list[int]) -> None:
    counts = OccurrenceCounts(met)
    for token_id in come:
        counts.add(token_id)
    copied = counts.copy()
    for token_id in later:
        copied.add(token_id)
    for found, added in ((counts, come), (copied, come + later)):
        assert len(found) == len(found.token_ids) == len(found.counts) == len({*met, *added})
        assert dict(zip(found.token_ids, found.counts, strict=True)) == dict.fromkeys(met, 0) | Counter(added)
