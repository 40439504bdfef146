"""Which deployments computed the beginning of a prompt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.prefix.holders import HOLDERS_MAX, Holders


@given(st.integers(1, 400), st.integers(0, 400))
def test_the_next_turn_finds_the_holder(blocks: int, added: int) -> None:
    holders: Holders[str] = Holders()
    chain = tuple(range(1000))
    holders.note_call(chain[:blocks], "a")
    assert holders.find(chain[: blocks + added]) == ("a",)


def test_the_longest_beginning_and_the_newest_holders_count() -> None:
    holders: Holders[str] = Holders()
    for name in "abcde":
        holders.note_call((1, 2, 3, 4), name)
    holders.note_call((1, 2, 3, 4, 5, 6), "z")
    assert holders.find((1, 2, 3, 4, 9, 9))[-HOLDERS_MAX:] == ("d", "e", "z")
    assert holders.find((1, 2, 3, 4, 5, 6, 7)) == ("z",)
    assert holders.find((7, 8)) == ()
