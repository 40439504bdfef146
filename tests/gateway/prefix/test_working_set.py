from __future__ import annotations

from dataclasses import dataclass

from gateway.prefix.estimate import Estimate
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.working_set import IDLE_SECONDS, WorkingSet


@dataclass(frozen=True)
class Turn:
    """A prompt of so many blocks, of the conversation with this number."""

    number: int
    blocks: int
    may_be_held: bool = True
    session: str | None = None

    @property
    def fingerprint(self) -> tuple[int, ...]:
        return tuple(range(self.number * 1000, self.number * 1000 + self.blocks))

    @property
    def prompt_tokens_estimate(self) -> int:
        return self.blocks * BLOCK_TOKENS


class Rig:
    """Servers with caches of 100 blocks."""

    def __init__(self, servers: int = 1) -> None:
        self.homes = [Estimate(100 * BLOCK_TOKENS, 1000) for _ in range(servers)]
        self.set = WorkingSet()

    def asks(self, turn: Turn, now: float) -> bool:
        """Whether it may go; if so it is answered at once, at the home that has claimed it or the first one."""
        if not self.set.admit(turn, self.homes, now):
            return False
        known = self.set.find(turn, self.homes)
        home = known.home if known is not None else self.homes[0]
        conversation = self.set.begin(turn, home, now, home.cache.predict(turn.fingerprint).remembered)
        home.end(home.begin(turn.fingerprint, turn.prompt_tokens_estimate, now), now)
        if conversation is not None:
            self.set.end(conversation, now)
        return True

    def converses(self, turn: Turn, now: float) -> None:
        """Two turns: from then on it is known to come back."""
        assert self.asks(Turn(turn.number, turn.blocks - 1, turn.may_be_held), now)
        assert self.asks(turn, now)


def test_who_does_not_fit_beside_others_waits_until_they_have_gone() -> None:
    rig = Rig()
    rig.converses(Turn(1, 60), now=0.0)
    assert not rig.asks(Turn(2, 60), now=1.0)
    assert rig.asks(Turn(1, 61), now=2.0), "who has its room goes on"
    assert not rig.asks(Turn(2, 60), now=2.0 + IDLE_SECONDS / 2)
    assert rig.asks(Turn(2, 60), now=3.0 + IDLE_SECONDS)


def test_when_a_cache_is_full_the_younger_one_is_held_and_the_older_one_goes_on() -> None:
    rig = Rig()
    rig.converses(Turn(1, 40), now=0.0)
    rig.converses(Turn(2, 30), now=1.0)
    assert not rig.asks(Turn(2, 60), now=2.0)
    assert rig.asks(Turn(1, 80), now=3.0)


def test_what_no_cache_can_hold_need_not_wait_for_one() -> None:
    rig = Rig()
    rig.converses(Turn(1, 90), now=0.0)
    assert rig.asks(Turn(2, 400), now=1.0)


def test_it_takes_the_server_that_has_room() -> None:
    rig = Rig(servers=2)
    rig.converses(Turn(1, 60), now=0.0)
    assert rig.asks(Turn(2, 60), now=1.0)
    known = [rig.set.find(Turn(number, 61), rig.homes) for number in (1, 2)]
    assert {one.home for one in known if one is not None} == set(rig.homes)


def test_real_time_never_waits_and_batch_makes_room_for_it() -> None:
    rig = Rig()
    rig.converses(Turn(1, 70), now=0.0)
    rig.converses(Turn(2, 60, may_be_held=False), now=1.0)
    assert rig.asks(Turn(2, 90, may_be_held=False), now=3.0)
    assert rig.asks(Turn(1, 71), now=4.0), "one batch conversation always goes on"
    assert not rig.asks(Turn(4, 10), now=5.0)


def test_single_questions_come_not_to_count() -> None:
    """As many calls as there may be that nobody continues: they do not stand in each other's way for long."""
    rig = Rig()
    held = [not rig.asks(Turn(number, 20), now=float(number)) for number in range(2000)]
    assert not any(held[1000:])


def test_a_conversation_is_known_although_its_end_was_edited() -> None:
    rig = Rig()
    rig.converses(Turn(1, 60), now=0.0)
    edited = Turn(1, 60).fingerprint[:56] + tuple(range(-9, 0))
    assert rig.set.find(Turn(1, 61), rig.homes) is not None

    class Edited(Turn):
        @property
        def fingerprint(self) -> tuple[int, ...]:
            return edited

    assert rig.set.find(Edited(1, 65), rig.homes) is rig.set.find(Turn(1, 61), rig.homes)
    assert rig.set.find(Turn(2, 60), rig.homes) is None


def test_the_name_that_a_client_gives_says_where_it_was() -> None:
    rig = Rig(servers=2)
    named = Turn(1, 20, session="s")
    assert rig.set.home_of("s") is None
    rig.set.begin(named, rig.homes[1], 0.0, 0)
    assert rig.set.home_of("s") is rig.homes[1]


def test_nobody_is_followed_while_there_is_nobody_who_may_be_held() -> None:
    rig, urgent = Rig(), Turn(2, 60, may_be_held=False)
    home = rig.homes[0]
    assert rig.set.begin(urgent, home, 0.0, 0) is None
    assert rig.asks(Turn(1, 10), now=1.0)
    assert rig.set.begin(urgent, home, 2.0, 0) is not None
    assert rig.set.begin(Turn(3, 20, may_be_held=False), home, 1.0 + IDLE_SECONDS, 0) is None
