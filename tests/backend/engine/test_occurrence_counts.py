from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from backend.engine.occurrence_counts import OccurrenceCounts

TOKENS = st.lists(st.integers(0, 9))


@given(TOKENS, TOKENS, TOKENS)
def test_every_token_is_listed_once_with_its_count(listed: list[int], counted: list[int], later: list[int]) -> None:
    counts = OccurrenceCounts(listed)
    for token_id in counted:
        counts.add(token_id)
    copied = counts.copy()
    for token_id in later:
        copied.add(token_id)
    for found, added in ((counts, counted), (copied, counted + later)):
        assert len(found) == len(found.token_ids) == len(found.counts) == len({*listed, *added})
        assert dict(zip(found.token_ids, found.counts, strict=True)) == dict.fromkeys(listed, 0) | Counter(added)
