"""Conversations under way, and whether the caches have room for one more.

A conversation comes back with all it has said before. When those under way are longer together than a server's cache,
every turn drives out what another one is about to need, and all of them compute everything anew. Then it is faster to
let fewer of them run. So a call whose class may be held waits at its turn, between an answer and the next question,
until its conversation fits; the oldest conversations go on, so that they come to an end and make room. Real-time calls
never wait: what they hold counts first, and a share of each cache is left to those that may come.

A conversation is known by its last prompt being the beginning of the next one, or most of it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gateway.prefix.estimate import Estimate

IDLE_SECONDS = 330.0  # without a call, after which a conversation counts as over
SECOND_TURN_SECONDS = 30.0  # without one, after which a first turn counts as a single question
FIRST_TURN_MIN_SHARE = 1 / 128  # of a cache, below which a first turn claims nothing
CHECKPOINT_BLOCKS = 8
FILL_SHARE = 0.9  # of a cache that conversations may claim: they grow between two turns
RESUME_SHARE = 0.85  # of the room for batch, up to which one that has no place yet may take one
RESERVE_SHARE = 0.1  # of each cache, for real-time conversations that may come, where there have been any
SECOND_TURN_WEIGHT = 0.05  # of the newest conversation in the learned share of those that have a second turn
HELD_MAX_SECONDS = 86_400.0  # after which one that waits is not known any more
MAX_CONVERSATIONS = 65_536


class RoutedPrompt(Protocol):
    """What has to be known of a call."""

    @property
    def fingerprint(self) -> Sequence[int]: ...
    @property
    def prompt_tokens_estimate(self) -> int: ...
    @property
    def session(self) -> str | None: ...
    @property
    def may_be_held(self) -> bool: ...


class Conversation:
    """`tokens` is its length so far, all of which its next turn will want to find at `home`."""

    __slots__ = (
        "checkpoint",
        "held",
        "home",
        "key",
        "running",
        "single",
        "started",
        "tokens",
        "turns",
        "urgent",
        "used",
    )

    def __init__(self, key: int, home: Estimate, started: float, *, urgent: bool) -> None:
        self.key = key
        self.checkpoint: int | None = None  # its chain, seven eighths down: agents edit what they said last
        self.home = home
        self.started = started
        self.used = started
        self.tokens = 0
        self.turns = 0
        self.running = 0  # calls
        self.held = False  # its next call waits: it claims no room meanwhile
        self.single = False  # a question that nobody came back to
        self.urgent = urgent


class _Occupancy(NamedTuple):
    """What the conversations at one server come to, kept until one of them changes: who is held asks often."""

    capacity_tokens: int  # of the cache, by which it was reckoned
    claimed_tokens: int
    runs_batch: bool  # some conversation there may be held, and is not


class WorkingSet:
    """All conversations at the servers of one fleet."""

    def __init__(self) -> None:
        self._homes: dict[str, Estimate] = {}  # by the names that clients give, the latest last
        self._by_checkpoint: dict[int, Conversation] = {}
        self._by_key: OrderedDict[int, Conversation] = OrderedDict()  # by their last use
        self._first_turns: dict[Conversation, float] = {}  # that are over, and until when a second one is expected
        self._at: dict[Estimate, dict[Conversation, None]] = {}
        self._occupancies: dict[Estimate, _Occupancy] = {}
        self.has_peers = False  # other gateways that send calls to the same servers
        self._second_turn_share = 0.5
        self._urgent_seen_until = 0.0
        self._followed_until = -math.inf  # then nobody who may be held will have come for long, and none is followed

    def of(self, prompt: RoutedPrompt, homes: Sequence[Estimate]) -> Conversation | None:
        """The conversation that a prompt continues, as far as that can be told."""
        chain = prompt.fingerprint
        if not chain:
            return None
        if (same := self._by_key.get(chain[-1])) is not None:
            return same
        return self._find_continued(chain, max(home.cache.known_blocks(chain) for home in homes))

    def _find_continued(self, chain: Sequence[int], depth: int) -> Conversation | None:
        """The one that a chain continues, of which servers remember the first `depth` blocks."""
        if depth and (longer := self._by_key.get(chain[depth - 1])) is not None:
            return longer
        for checkpoint in range(depth - depth % CHECKPOINT_BLOCKS, depth * 3 // 4, -CHECKPOINT_BLOCKS):
            if (edited := self._by_checkpoint.get(chain[checkpoint - 1])) is not None:
                return edited
        return None

    def home_of(self, session: str) -> Estimate | None:
        """Where a call was last that its client gave this name. Several conversations may have one name, so it says
        where to look, and not whose room a call may have."""
        return self._homes.get(session)

    def admit(self, prompt: RoutedPrompt, homes: Sequence[Estimate], now: float, *, running_only: bool = False) -> bool:
        """Whether the call may go now. If so its conversation has its room, which is lost again by idling. `goes_on`:
        only one that has its room already is to be considered."""
        if not prompt.may_be_held or not prompt.fingerprint or not any(_can_hold(home, prompt) for home in homes):
            return True
        self._followed_until = now + IDLE_SECONDS
        self._expire(now)
        known, tokens = self.of(prompt, homes), prompt.prompt_tokens_estimate
        if known is not None and not known.held:
            if self._fits_beside_older(known, tokens):
                return True
            known.held = True
            self._occupancies.pop(known.home, None)
            return False
        if running_only:
            return False
        fitting = [home for home in homes if self._has_room(home, tokens)]
        if not fitting:
            return False
        home = max(fitting, key=lambda home: (home.cache.match(prompt.fingerprint), -self.claimed_tokens(home)))
        self._assign_home(prompt, known, home, now)
        return True

    def begin(self, prompt: RoutedPrompt, home: Estimate, now: float, remembered: int) -> Conversation | None:
        """A call is sent to a server, whose cache model remembers so many of its blocks. None where it is too short to
        be anybody's conversation, or too long for the cache to hold; and while there is nobody who may be held."""
        if prompt.session is not None:
            self._homes.pop(prompt.session, None)
            self._homes[prompt.session] = home
            if len(self._homes) > MAX_CONVERSATIONS:
                del self._homes[next(iter(self._homes))]
        if prompt.may_be_held:
            self._followed_until = now + IDLE_SECONDS
        elif now >= self._followed_until:
            return None
        if not prompt.fingerprint or not _can_hold(home, prompt):
            return None
        self._expire(now)
        known = self._by_key.get(prompt.fingerprint[-1]) or self._find_continued(prompt.fingerprint, remembered)
        conversation = self._assign_home(prompt, known, home, now)
        conversation.turns += 1
        conversation.running += 1
        if conversation.turns == 2:
            self._first_turns.pop(conversation, None)
            conversation.single = False
            self._learn_second_turn_share(1.0)
        self._occupancies.pop(home, None)
        return conversation

    def end(self, conversation: Conversation, now: float) -> None:
        """Its call is over."""
        conversation.running -= 1
        conversation.used = now
        self._occupancies.pop(conversation.home, None)
        if conversation.turns == 1:
            self._first_turns[conversation] = now + SECOND_TURN_SECONDS
        if conversation.key in self._by_key:
            self._by_key.move_to_end(conversation.key)

    def claimed_tokens(self, home: Estimate) -> int:
        """Tokens that the conversations at a server will want to find there."""
        return self._occupancy_of(home).claimed_tokens

    def _occupancy_of(self, home: Estimate) -> _Occupancy:
        room = self._occupancies.get(home)
        if room is None or room.capacity_tokens != home.cache.capacity_tokens:
            here = self._at.get(home, {})
            runs_batch = any(not one.urgent and not one.held for one in here)
            room = _Occupancy(home.cache.capacity_tokens, sum(map(self._claim, here)), runs_batch)
            self._occupancies[home] = room
        return room

    def _learn_second_turn_share(self, observed: float) -> None:
        self._second_turn_share += SECOND_TURN_WEIGHT * (observed - self._second_turn_share)
        self._occupancies.clear()

    def _claim(self, one: Conversation) -> int:
        if one.held or one.single:
            return 0
        if one.turns != 1:
            return one.tokens
        if one.tokens < FIRST_TURN_MIN_SHARE * one.home.cache.capacity_tokens:
            return 0
        return one.tokens if one.running else int(one.tokens * self._second_turn_share)

    def _fits_beside_older(self, one: Conversation, tokens: int) -> bool:
        here = self._at[one.home]
        older = [other for other in here if not other.urgent and other.started < one.started and not other.held]
        urgent = [other for other in here if other.urgent]
        return not older or sum(map(self._claim, older + urgent)) + tokens <= self._limit(one.home)

    def _has_room(self, home: Estimate, tokens: int) -> bool:
        room = self._occupancy_of(home)
        if self.has_peers:
            tokens *= 2  # another gateway may give the same room away before it is heard of
        return not room.runs_batch or room.claimed_tokens + tokens <= RESUME_SHARE * self._limit(home)

    def _limit(self, home: Estimate) -> float:
        return home.cache.capacity_tokens * (FILL_SHARE - RESERVE_SHARE if self._urgent_seen_until else FILL_SHARE)

    def _assign_home(
        self, prompt: RoutedPrompt, known: Conversation | None, home: Estimate, now: float
    ) -> Conversation:
        """Note the prompt as its conversation's newest turn, at this server."""
        key = prompt.fingerprint[-1]
        urgent = not prompt.may_be_held
        if known is None:
            known = Conversation(key, home, now, urgent=urgent)
        else:
            self._forget(known)
            known.key, known.home = key, home
        if (other := self._by_key.get(key)) is not None:
            self._forget(other)
        known.tokens, known.used, known.held = prompt.prompt_tokens_estimate, now, False
        known.checkpoint = None
        depth = len(prompt.fingerprint) * 7 // 8
        if depth >= CHECKPOINT_BLOCKS:
            known.checkpoint = prompt.fingerprint[depth - depth % CHECKPOINT_BLOCKS - 1]
            self._by_checkpoint[known.checkpoint] = known
        self._by_key[key] = known
        self._at.setdefault(home, {})[known] = None
        self._occupancies.pop(home, None)
        if urgent:
            self._urgent_seen_until = now + IDLE_SECONDS
        return known

    def _expire(self, now: float) -> None:
        if self._urgent_seen_until < now:
            self._urgent_seen_until = 0.0
        while self._first_turns and self._first_turns[first := next(iter(self._first_turns))] <= now:
            del self._first_turns[first]
            first.single = not first.running
            self._learn_second_turn_share(0.0)
        while self._by_key:
            oldest = next(iter(self._by_key.values()))
            if len(self._by_key) <= MAX_CONVERSATIONS:
                if now - oldest.used < IDLE_SECONDS:
                    return
                if oldest.running or (oldest.held and now - oldest.started < HELD_MAX_SECONDS):
                    oldest.used = now
                    self._by_key.move_to_end(oldest.key)
                    continue
            self._forget(oldest)

    def _forget(self, one: Conversation) -> None:
        if self._by_key.get(one.key) is one:
            del self._by_key[one.key]
        if one.checkpoint is not None and self._by_checkpoint.get(one.checkpoint) is one:
            del self._by_checkpoint[one.checkpoint]
        self._at.get(one.home, {}).pop(one, None)
        self._occupancies.pop(one.home, None)


def _can_hold(home: Estimate, prompt: RoutedPrompt) -> bool:
    return len(prompt.fingerprint) <= home.cache.capacity
