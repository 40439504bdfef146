"""Which conversations the working set admits, holds, recognises and forgets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway.prefix.cache_runs import CachePrediction
from gateway.prefix.estimate import Estimate
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.working_set import IDLE_SECONDS, PARK_SECONDS, REMEMBERED_SECONDS, WorkingSet

UNKNOWN = CachePrediction(0, 0, (), 0)


@dataclass(frozen=True)
class Turn:
    """A prompt of `blocks` blocks in conversation `number`."""

    number: int
    blocks: int
    may_be_held: bool = True
    session: str | None = None
    tenant_name: str = "t"

    @property
    def fingerprint(self) -> tuple[int, ...]:
        return tuple(range(self.number * 1000, self.number * 1000 + self.blocks))

    @property
    def prompt_tokens_estimate(self) -> int:
        return self.blocks * BLOCK_TOKENS


class Rig:
    """Deployments with caches of 100 blocks."""

    def __init__(self, servers: int = 1) -> None:
        self.homes = [Estimate(100 * BLOCK_TOKENS, 1000) for _ in range(servers)]
        self.set = WorkingSet()

    def sends(self, turn: Turn, now: float, *, auto: bool = False) -> bool:
        """Whether the call is admitted. If so, it is answered at once, at its conversation's home or the first one."""
        holdable = turn.may_be_held or auto  # the scheduler does not ask for others
        if holdable and not self.set.admit(turn, self.homes, now, auto=auto):
            return False
        known = self.set.find(turn, self.homes)
        home = known.home if known is not None else self.homes[0]
        conversation = self.set.begin(turn, home, now, home.cache.predict(turn.fingerprint))
        home.end(home.begin(turn.fingerprint, turn.prompt_tokens_estimate, now), now)
        if conversation is not None:
            self.set.end(conversation, now)
        return True

    def converses(self, turn: Turn, now: float) -> None:
        """Two turns, after which the conversation is known to continue."""
        assert self.sends(replace(turn, blocks=turn.blocks - 1), now)
        assert self.sends(turn, now)


def test_a_conversation_that_does_not_fit_waits_for_others_to_end() -> None:
    rig = Rig()
    rig.converses(Turn(1, 60), now=0.0)
    assert not rig.sends(Turn(2, 60), now=1.0)
    assert rig.sends(Turn(1, 61), now=2.0), "a conversation with room continues"
    assert not rig.sends(Turn(2, 60), now=2.0 + IDLE_SECONDS / 2)
    assert rig.sends(Turn(2, 60), now=3.0 + IDLE_SECONDS)


def test_in_a_full_cache_the_younger_conversation_is_held() -> None:
    rig = Rig()
    rig.converses(Turn(1, 40), now=0.0)
    rig.converses(Turn(2, 30), now=1.0)
    assert not rig.sends(Turn(2, 60), now=2.0)
    assert rig.sends(Turn(1, 80), now=3.0)


def test_the_conversation_that_paused_longest_gives_up_its_room_to_a_running_one() -> None:
    rig = Rig()
    for number in (1, 2):
        rig.converses(Turn(number, 25), now=float(number))
    rig.converses(Turn(3, 25), now=PARK_SECONDS)
    assert rig.sends(Turn(3, 60), now=PARK_SECONDS + 1.5), "the first one is parked"
    assert not rig.sends(Turn(1, 26), now=PARK_SECONDS + 1.6), "it has no room now"
    assert not rig.sends(Turn(3, 70), now=PARK_SECONDS + 1.7), "the second one has not paused for long"
    assert rig.sends(Turn(2, 26), now=PARK_SECONDS + 1.8)


def test_nothing_is_parked_if_that_does_not_make_enough_room() -> None:
    rig = Rig()
    for number in (1, 2):
        rig.converses(Turn(number, 10 + 30 * (number - 1)), now=float(number))
    rig.sends(Turn(2, 41), now=PARK_SECONDS)
    rig.converses(Turn(3, 25), now=PARK_SECONDS)
    assert not rig.sends(Turn(3, 70), now=PARK_SECONDS + 2.0)
    assert rig.sends(Turn(1, 11), now=PARK_SECONDS + 3.0), "the first one still has its room"


def test_a_conversation_that_returns_keeps_its_age_for_some_time() -> None:
    for idle_seconds, kept in ((2 * IDLE_SECONDS, True), (REMEMBERED_SECONDS + IDLE_SECONDS, False)):
        rig = Rig()
        rig.converses(Turn(1, 30), now=0.0)
        rig.converses(Turn(2, 30), now=idle_seconds)
        known = rig.set.find(Turn(1, 31), rig.homes)
        assert (known is not None and known.started == 0.0) is kept
        assert rig.set.claimed_tokens(rig.homes[0]) == 30 * BLOCK_TOKENS, "it claims nothing"
        assert rig.sends(Turn(1, 31), now=idle_seconds + 1.0), "it has room again"
        assert rig.sends(Turn(2, 80), now=idle_seconds + 2.0) is not kept, "the older one comes first"


def test_a_prompt_that_exceeds_every_cache_is_not_held() -> None:
    rig = Rig()
    rig.converses(Turn(1, 90), now=0.0)
    assert rig.sends(Turn(2, 400), now=1.0)


def test_a_conversation_goes_to_the_deployment_with_room() -> None:
    rig = Rig(servers=2)
    rig.converses(Turn(1, 60), now=0.0)
    assert rig.sends(Turn(2, 60), now=1.0)
    known = [rig.set.find(Turn(number, 61), rig.homes) for number in (1, 2)]
    assert {one.home for one in known if one is not None} == set(rig.homes)


def test_real_time_never_waits_and_batch_makes_room_for_it() -> None:
    rig = Rig()
    rig.converses(Turn(1, 70), now=0.0)
    rig.converses(Turn(2, 60, may_be_held=False), now=1.0)
    assert rig.sends(Turn(2, 90, may_be_held=False), now=3.0)
    assert rig.sends(Turn(1, 71), now=4.0), "one batch conversation always continues"
    assert not rig.sends(Turn(4, 10), now=5.0)


def test_single_questions_stop_claiming_room() -> None:
    """Calls without a second turn claim room for a short time only."""
    rig = Rig()
    held = [not rig.sends(Turn(number, 20), now=float(number)) for number in range(2000)]
    assert not any(held[1000:])


def test_a_conversation_is_recognised_after_its_end_was_edited() -> None:
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


def test_a_session_name_leads_to_its_home() -> None:
    rig = Rig(servers=2)
    named = Turn(1, 20, session="s")
    assert rig.set.home_of("s") is None
    rig.set.begin(named, rig.homes[1], 0.0, UNKNOWN)
    assert rig.set.home_of("s") is rig.homes[1]


def test_conversations_are_not_tracked_without_calls_that_may_be_held() -> None:
    rig, urgent = Rig(), Turn(2, 60, may_be_held=False)
    home = rig.homes[0]
    assert rig.set.begin(urgent, home, 0.0, UNKNOWN) is None
    assert rig.sends(Turn(1, 10), now=1.0)
    assert rig.set.begin(urgent, home, 2.0, UNKNOWN) is not None
    assert rig.set.begin(Turn(3, 20, may_be_held=False), home, 1.0 + IDLE_SECONDS, UNKNOWN) is None


def test_a_tenant_with_many_conversations_holds_up_its_own_only() -> None:
    rig = Rig()
    rig.converses(Turn(1, 30, tenant_name="many"), now=1.0)
    rig.converses(Turn(2, 30, tenant_name="many"), now=2.0)
    assert not rig.sends(Turn(3, 30, tenant_name="many"), now=3.0)
    rig.converses(Turn(4, 30, tenant_name="one"), now=4.0)
    assert rig.sends(Turn(4, 31, tenant_name="one"), now=5.0)
    assert not rig.sends(Turn(2, 31, tenant_name="many"), now=6.0), "comes after the other tenant's first"
    assert rig.sends(Turn(1, 31, tenant_name="many"), now=7.0)


def in_turns(rig: Rig, conversations: int, *, pause_seconds: float, auto: bool) -> list[bool]:
    """Whether the calls of real-time conversations of 50 blocks were sent, which take turns on one deployment."""
    sent: list[bool] = []
    for turn in range(30):
        for number in range(conversations):
            now = (turn + number / conversations) * pause_seconds
            sent.append(rig.sends(Turn(number, 50 + turn, may_be_held=False), now, auto=auto))
    return sent


def test_real_time_calls_are_held_while_that_serves_more_of_them() -> None:
    rig = Rig()
    rig.homes[0].speed.learn(1, 6400, 6.4)
    sent = in_turns(rig, 8, pause_seconds=2.0, auto=True)
    assert all(sent[:16]) and not all(sent[-80:]), "each conversation takes 3 s to compute, and there is room for two"


def test_real_time_calls_are_not_held_while_the_caches_fit() -> None:
    assert all(in_turns(Rig(), 1, pause_seconds=2.0, auto=True))


def test_real_time_calls_are_not_held_if_deployments_would_idle_meanwhile() -> None:
    assert all(in_turns(Rig(), 3, pause_seconds=500.0 / 3, auto=True))


def test_real_time_conversations_are_tracked_while_calls_miss_what_was_evicted() -> None:
    rig, home = Rig(), Estimate(100 * BLOCK_TOKENS, 1000)
    evicted, cached = CachePrediction(1, 20, (), 0, known=20), CachePrediction(20, 20, (), 0, known=20)
    turn = Turn(1, 20, may_be_held=False)
    assert all(rig.set.begin(turn, home, float(at), cached) is None for at in range(50))
    assert any(rig.set.begin(turn, home, 50.0 + at, evicted) is not None for at in range(99))
    was_crowded = rig.set.is_crowded
    assert all(rig.set.begin(turn, home, 150.0 + at, cached) is not None for at in range(300))
    assert was_crowded and not rig.set.is_crowded
    assert rig.set.begin(turn, home, 450.0 + IDLE_SECONDS, cached) is None


def test_a_reported_capacity_is_what_conversations_share() -> None:
    """The cache model has room for more, since events tell it what is evicted."""
    home = Estimate(1000 * BLOCK_TOKENS, 1000)
    assert home.capacity_tokens == 1000 * BLOCK_TOKENS
    home.set_capacity(30 * BLOCK_TOKENS, 2.0)
    assert (home.capacity_tokens, home.cache.capacity) == (30 * BLOCK_TOKENS, 60)
    rig = Rig()
    rig.homes[0].set_capacity(30 * BLOCK_TOKENS, 2.0)
    rig.converses(Turn(1, 20), 0.0)
    rig.converses(Turn(1, 20), 1.0)
    assert not rig.sends(Turn(2, 20), 2.0), "both do not fit"
