import math

import pytest

from gateway.core.deadlines import read_timeout_seconds, total_timeout_seconds
from gateway.core.errors import BadRequest


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, math.inf),
        ({b"x-stainless-read-timeout": b"600"}, 600.0),
        ({b"x-stainless-read-timeout": b"0.5"}, 0.5),
        ({b"x-stainless-timeout": b"30"}, 30.0),
        ({b"x-stainless-read-timeout": b"None"}, math.inf),
        ({b"x-stainless-read-timeout": b"0"}, math.inf),
        ({b"x-stainless-read-timeout": b"inf"}, math.inf),
        ({b"x-stainless-read-timeout": b"nan"}, math.inf),
        ({b"x-stainless-read-timeout": b"-1"}, math.inf),
    ],
)
def test_read_timeouts_that_sdks_send(headers: dict[bytes, bytes], seconds: float) -> None:
    assert read_timeout_seconds(headers) == seconds


def test_a_total_timeout() -> None:
    assert total_timeout_seconds({}) == math.inf
    assert total_timeout_seconds({b"x-warmpath-timeout": b"2.5"}) == 2.5


@pytest.mark.parametrize("value", [b"soon", b"0", b"-3", b"nan", b"inf", b""])
def test_an_invalid_total_timeout_is_rejected_by_name(value: bytes) -> None:
    with pytest.raises(BadRequest, match="x-warmpath-timeout") as refusal:
        total_timeout_seconds({b"x-warmpath-timeout": value})
    assert refusal.value.param == "x-warmpath-timeout"
