from __future__ import annotations

import pytest

from gateway.core.errors import BadRequest
from gateway.core.numbers import whole_number


@pytest.mark.parametrize("text", ["0", "11", "-1", "+1", "1e999", "1e1", "1.0", "", " 1", "²", "\u0661", "9" * 5000])
def test_other_texts_and_numbers_out_of_range_are_refused_by_name(text: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        whole_number(text, "limit", minimum=1, maximum=10)
    assert (refusal.value.param, refusal.value.message) == ("limit", "limit: must be a whole number from 1 to 10")


def test_a_number() -> None:
    assert whole_number("010", "limit", minimum=1, maximum=10) == 10
