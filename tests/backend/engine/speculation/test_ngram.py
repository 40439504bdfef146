from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.engine.speculation import ngram
from backend.engine.speculation.base import DraftRequest
from backend.engine.speculation.ngram import NgramDrafter


@pytest.fixture
def drafter() -> NgramDrafter:
    return NgramDrafter(cast(Any, Path()))


def draft(drafter: NgramDrafter, token_ids: list[int], count: int = 4) -> tuple[int, ...]:
    (found,) = drafter.draft([DraftRequest(Request("r", token_ids, SamplingParams(max_tokens=9)), count)])
    return found


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], (4, 5, 6, 7)),
        ([1, 2, 3], ()),
        ([1, 2], ()),
        ([1, 2, 3, 4, 9, 2, 3], ()),  # two tokens match, which is too few
        ([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3], (5, 0, 1, 2)),  # the later of two equal matches
        ([9, 1, 2, 3, 4, 0, 1, 2, 3, 5, 9, 1, 2, 3], (4, 0, 1, 2)),  # the longer match
        ([7, 7, 7, 7], (7, 7, 7, 7)),  # the match overlaps the draft
        ([1, 2, 3, 1, 2, 3], (1, 2, 3, 1)),
    ],
)
def test_the_tokens_after_the_longest_match_are_drafted(
    drafter: NgramDrafter, token_ids: list[int], expected: tuple[int, ...]
) -> None:
    assert draft(drafter, token_ids) == expected


def test_an_index_grows_with_its_request(drafter: NgramDrafter) -> None:
    request = Request("r", [1, 2, 3, 4, 5], SamplingParams(max_tokens=99))
    for token_id, expected in ((1, ()), (2, ()), (3, (4, 5)), (9, ()), (2, ()), (3, ()), (9, (2, 3))):
        request.append(token_id)
        assert drafter.draft([DraftRequest(request, 2)]) == [expected]


def test_search_and_indexing_are_bounded(drafter: NgramDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the latest few positions are compared, and a long prompt is indexed in pieces."""
    best = [8, 1, 2, 3, 5]
    others = [9, 1, 2, 3, 6] * ngram.MAX_CANDIDATES
    assert draft(drafter, [*best, *others[5:], 8, 1, 2, 3], 1) == (5,)
    assert draft(drafter, [*best, *others, 8, 1, 2, 3], 1) == (6,)
    monkeypatch.setattr(ngram, "MAX_INDEXED", 4)
    request = Request("r", [0, 0, 0, *range(1, 12), 8, 9, 10], SamplingParams(max_tokens=9))
    found = [drafter.draft([DraftRequest(request, 1)])[0] for _ in range(5)]
    assert found == [(), (), (11,), (11,), (11,)]


def test_the_index_of_a_request_is_deleted_with_it(drafter: NgramDrafter) -> None:
    request = Request("r", [1, 2, 3, 1, 2, 3], SamplingParams(max_tokens=9))
    drafter.draft([DraftRequest(request, 1)])
    assert len(drafter._indexes) == 1
    del request
    assert len(drafter._indexes) == 0
