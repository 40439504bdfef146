"""The choice of llama.cpp's slots, and what they hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.prefix.cache_slots import CacheSlots
from gateway.prefix.fingerprint import BLOCK_TOKENS

COMMON = tuple(range(10))


def make_chain(conversation: int, blocks: int) -> tuple[int, ...]:
    """All chains have a common beginning. A conversation's next prompt begins with the last one."""
    return (*COMMON, *(1000 * conversation + block for block in range(blocks)))


def sent(slots: CacheSlots, chain: tuple[int, ...]) -> int | None:
    slots.add(chain)
    slot = slots.occupy()
    if slot is not None:
        slots.release(slot)
    return slot


def three_slots() -> CacheSlots:
    return CacheSlots(3, 1000 * BLOCK_TOKENS)


def test_a_new_conversation_takes_the_least_recently_used_slot() -> None:
    slots = three_slots()
    assert [sent(slots, make_chain(number, 20)) for number in (1, 2, 3)] == [0, 1, 2]
    assert sent(slots, make_chain(1, 25)) == 0
    assert slots.match(make_chain(4, 20)) == len(COMMON), "the server finds what all begin with, in any slot"
    assert sent(slots, make_chain(4, 20)) == 1
    assert slots.match(make_chain(2, 25)) == len(COMMON), "that one is gone"
    assert slots.match(make_chain(3, 25)) == len(COMMON) + 20


def test_an_edited_conversation_keeps_its_slot() -> None:
    slots = three_slots()
    sent(slots, make_chain(1, 30))
    edited = (*make_chain(1, 26), 7, 8, 9)
    assert slots.choose_slot(edited) == 0
    assert slots.predict(edited).matched == len(COMMON) + 26


def test_busy_slots_are_not_chosen_and_failed_calls_leave_nothing() -> None:
    slots = three_slots()
    chain = make_chain(1, 20)
    slots.add(chain)
    assert slots.occupy() == 0
    assert slots.choose_slot(chain) == 1
    assert slots.predict(chain).matched == 0
    assert slots.known_blocks(chain) == len(chain)
    slots.remove(chain[:1])
    slots.release(0)
    assert slots.match(chain) == 0
    for _ in range(3):
        slots.add(chain)
        assert slots.occupy() is not None
    slots.add(chain)
    assert slots.occupy() is None
    assert slots.choose_slot(chain) is None


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30), st.booleans()), max_size=30))
def test_a_slot_takes_one_call_and_holds_its_prompt(calls: list[tuple[int, int, bool]]) -> None:
    slots, chain_held, busy = three_slots(), dict[int, tuple[int, ...]](), set[int]()
    for conversation, blocks, stays in calls:
        chain = make_chain(conversation, blocks)
        before = slots.version, slots.predict(chain).matched
        slots.add(chain)
        slot = slots.occupy()
        if slot is None:
            assert len(busy) == 3
            busy.clear()
            for each in range(3):
                slots.release(each)
            continue
        assert slot not in busy
        assert before[0] != slots.version
        known = chain_held.get(slot, ())
        assert before[1] == next((i for i, (a, b) in enumerate(zip(known, chain, strict=False)) if a != b),
                                 min(len(known), len(chain)))  # fmt: skip
        chain_held[slot] = chain
        if stays:
            busy.add(slot)
        else:
            slots.release(slot)
    assert len(slots) == sum(map(len, chain_held.values()))
