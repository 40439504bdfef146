"""When holding conversations is expected to serve more of their turns."""

from __future__ import annotations

from gateway.prefix.hold_choice import Crowd, HoldChoice


def choice_after(turns: int, pause_seconds: float, new_tokens: float) -> HoldChoice:
    choice = HoldChoice()
    for _ in range(turns):
        choice.note_turn(pause_seconds, new_tokens)
    return choice


def crowd(conversations: float, length: int) -> Crowd:
    return Crowd(conversations, int(conversations * length), 400_000, 8_000, 1, answer_seconds=2.0)


def test_quick_turns_of_long_conversations_are_worth_holding() -> None:
    assert choice_after(20, 2.0, 1_000).choose(crowd(20, 40_000))


def test_long_pauses_are_not() -> None:
    """Ten conversations have room, and their deployment would idle most of the time."""
    assert not choice_after(20, 300.0, 1_000).choose(crowd(20, 40_000))


def test_nothing_is_held_while_all_fit_or_nothing_is_known() -> None:
    assert not choice_after(20, 2.0, 1_000).choose(crowd(9, 40_000))
    assert not choice_after(2, 2.0, 1_000).choose(crowd(20, 40_000))


def test_a_choice_is_kept_until_the_other_one_is_better() -> None:
    choice = choice_after(20, 2.0, 1_000)
    assert choice.choose(crowd(20, 40_000))
    lengths = range(40_000, 400_000, 10_000)
    assert choice.overdue_seconds == 8.0
    assert all(choice.choose(crowd(20, length)) for length in lengths)
