"""The working set: which conversations may run so that all of their prefixes stay cached.

A conversation's next prompt repeats everything before it. If the running conversations together are longer than the
caches, each turn evicts what another one needs next, and all of them compute everything again. Then it is faster to run
fewer of them. So a call whose class sets `hold` waits between two turns until its conversation fits. The oldest
conversations continue, so that they end and make room. Real-time calls never wait: what they hold counts first, and a
share of each cache is reserved for more of them.

A conversation's *home* is the deployment of its last call. In that deployment's cache, a conversation claims its length
so far, in fingerprint tokens. `admit` decides before a call is sent; `begin` and `end` follow the calls that were sent.
A prompt continues a conversation if it begins with the conversation's last prompt, or with most of it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gateway.prefix.estimate import Estimate

IDLE_SECONDS = 330.0  # without a call, after which a conversation counts as ended
SECOND_TURN_SECONDS = 30.0  # after a first turn, after which the conversation counts as a single question
FIRST_TURN_MIN_SHARE = 1 / 128  # of a cache; a shorter first turn claims nothing
CHECKPOINT_BLOCKS = 8  # checkpoints are at multiples of this
FILL_SHARE = 0.9  # of a cache that conversations may claim; they grow with each turn
ADMIT_SHARE = 0.85  # of the claimable room, up to which another conversation is admitted
RESERVE_SHARE = 0.1  # of each cache, reserved for new real-time conversations if there were any recently
SECOND_TURN_WEIGHT = 0.05  # of the newest conversation, in the learned share of those with a second turn
HELD_MAX_SECONDS = 86_400.0  # after which a held conversation is forgotten
MAX_CONVERSATIONS = 65_536


class RoutedPrompt(Protocol):
    """What routing and the working set need to know of a call. `gateway.types.Call` implements it."""

    @property
    def fingerprint(self) -> Sequence[int]: ...
    @property
    def prompt_tokens_estimate(self) -> int: ...
    @property
    def session(self) -> str | None: ...
    @property
    def may_be_held(self) -> bool: ...


class Conversation:
    """A conversation at its home deployment. It claims `tokens` there, its length so far, for its next turn."""

    __slots__ = (
        "checkpoint",
        "held",
        "home",
        "is_single_turn",
        "key",
        "last_used",
        "running",
        "started",
        "tokens",
        "turns",
        "urgent",
    )

    def __init__(self, key: int, home: Estimate, started: float, *, urgent: bool) -> None:
        self.key = key
        self.checkpoint: int | None = None  # a hash at 7/8 of its chain, to recognise it when its end was edited
        self.home = home
        self.started = started
        self.last_used = started
        self.tokens = 0
        self.turns = 0
        self.running = 0  # calls in flight
        self.held = False  # its next call waits, and it claims nothing until then
        self.is_single_turn = False  # its second turn is overdue, so it claims nothing
        self.urgent = urgent


class _Occupancy(NamedTuple):
    """What the conversations at one deployment claim.

    Cached until one of them changes, because held calls ask often.
    """

    capacity_tokens: int  # of the cache, when this was computed
    claimed_tokens: int
    runs_batch: bool  # at least one conversation that may be held is running


class WorkingSet:
    """All conversations at the deployments of one fleet. Owned by the event loop."""

    def __init__(self) -> None:
        self._homes: dict[str, Estimate] = {}  # by session name, newest last
        self._by_checkpoint: dict[int, Conversation] = {}
        # By the hash of the last prompt's last block; least recently used first.
        self._by_key: OrderedDict[int, Conversation] = OrderedDict()
        self._first_turns: dict[Conversation, float] = {}  # finished first turns: until when a second one is expected
        self._at: dict[Estimate, dict[Conversation, None]] = {}
        self._occupancies: dict[Estimate, _Occupancy] = {}
        self.has_peers = False  # other gateways send calls to the same deployments
        self._second_turn_share = 0.5
        self._reserve_until = 0.0
        self._tracked_until = -math.inf  # conversations are tracked only while calls that may be held arrive

    def find(self, prompt: RoutedPrompt, homes: Sequence[Estimate]) -> Conversation | None:
        """The conversation that a prompt continues, if it is known."""
        chain = prompt.fingerprint
        if not chain:
            return None
        if (equal := self._by_key.get(chain[-1])) is not None:
            return equal
        return self._find_continued(chain, max(home.cache.known_blocks(chain) for home in homes))

    def _find_continued(self, chain: Sequence[int], depth: int) -> Conversation | None:
        """The conversation that a chain continues. Deployments know the chain's first `depth` blocks."""
        if depth and (continued := self._by_key.get(chain[depth - 1])) is not None:
            return continued
        for checkpoint in range(depth - depth % CHECKPOINT_BLOCKS, depth * 3 // 4, -CHECKPOINT_BLOCKS):
            if (edited := self._by_checkpoint.get(chain[checkpoint - 1])) is not None:
                return edited
        return None

    def home_of(self, session: str) -> Estimate | None:
        """The deployment of the session's last call.

        Several conversations may share one session name. So it suggests a deployment, but grants no claim.
        """
        return self._homes.get(session)

    def admit(self, prompt: RoutedPrompt, homes: Sequence[Estimate], now: float, *, running_only: bool = False) -> bool:
        """Whether the call may be sent now. If so, its conversation claims its room until it has been idle for a while.

        `running_only`: admit only conversations that have their room already.
        """
        # Holding would be useless for a prompt without full blocks, or one that no cache can hold.
        if not prompt.may_be_held or not prompt.fingerprint or not any(_can_hold(home, prompt) for home in homes):
            return True
        self._tracked_until = now + IDLE_SECONDS
        self._expire(now)
        known, tokens = self.find(prompt, homes), prompt.prompt_tokens_estimate
        if known is not None and not known.held:
            if self._fits_beside_older(known, tokens):
                return True
            # The conversation gives up its room until it is admitted again.
            known.held = True
            self._occupancies.pop(known.home, None)
            return False
        if running_only:
            return False
        fitting = [home for home in homes if self._has_room(home, tokens)]
        if not fitting:
            return False
        # Prefer the deployment that has most of the prompt cached, then the one with the fewest claims.
        home = max(fitting, key=lambda home: (home.cache.match(prompt.fingerprint), -self.claimed_tokens(home)))
        self._assign_home(prompt, known, home, now)
        return True

    def begin(self, prompt: RoutedPrompt, home: Estimate, now: float, remembered: int) -> Conversation | None:
        """A call is sent to `home`, whose cache model knows the first `remembered` blocks of its prompt.

        None if the prompt has no full block or exceeds the cache, or if no calls that may be held have arrived
        recently.
        """
        if prompt.session is not None:
            self._homes.pop(prompt.session, None)
            self._homes[prompt.session] = home
            if len(self._homes) > MAX_CONVERSATIONS:
                del self._homes[next(iter(self._homes))]
        if prompt.may_be_held:
            self._tracked_until = now + IDLE_SECONDS
        elif now >= self._tracked_until:
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
            conversation.is_single_turn = False
            self._learn_second_turn_share(1.0)
        self._occupancies.pop(home, None)
        return conversation

    def end(self, conversation: Conversation, now: float) -> None:
        """The conversation's call ended."""
        conversation.running -= 1
        conversation.last_used = now
        self._occupancies.pop(conversation.home, None)
        if conversation.turns == 1:
            self._first_turns[conversation] = now + SECOND_TURN_SECONDS
        if conversation.key in self._by_key:
            self._by_key.move_to_end(conversation.key)

    def claimed_tokens(self, home: Estimate) -> int:
        """How many tokens the conversations at a deployment claim."""
        return self._occupancy_of(home).claimed_tokens

    def _occupancy_of(self, home: Estimate) -> _Occupancy:
        """The deployment's occupancy, computed again if a conversation or the cache's capacity changed."""
        occupancy = self._occupancies.get(home)
        if occupancy is None or occupancy.capacity_tokens != home.cache.capacity_tokens:
            at_home = self._at.get(home, {})
            runs_batch = any(not conversation.urgent and not conversation.held for conversation in at_home)
            occupancy = _Occupancy(home.cache.capacity_tokens, sum(map(self._claim, at_home)), runs_batch)
            self._occupancies[home] = occupancy
        return occupancy

    def _learn_second_turn_share(self, observed: float) -> None:
        """A conversation had a second turn (1.0), or none in time (0.0)."""
        self._second_turn_share += SECOND_TURN_WEIGHT * (observed - self._second_turn_share)
        self._occupancies.clear()

    def _claim(self, conversation: Conversation) -> int:
        """Tokens that a conversation claims. After a first turn: its length times the probability of a second turn."""
        if conversation.held or conversation.is_single_turn:
            return 0
        if conversation.turns != 1:
            return conversation.tokens
        if conversation.tokens < FIRST_TURN_MIN_SHARE * conversation.home.cache.capacity_tokens:
            return 0
        return conversation.tokens if conversation.running else int(conversation.tokens * self._second_turn_share)

    def _fits_beside_older(self, conversation: Conversation, tokens: int) -> bool:
        """Whether the conversation fits beside the older batch conversations and all real-time ones at its home."""
        at_home = self._at[conversation.home]
        older = [
            other for other in at_home if not other.urgent and other.started < conversation.started and not other.held
        ]
        urgent = [other for other in at_home if other.urgent]
        return not older or sum(map(self._claim, older + urgent)) + tokens <= self._limit(conversation.home)

    def _has_room(self, home: Estimate, tokens: int) -> bool:
        """Whether one more conversation of `tokens` fits at a deployment.

        Always, if no batch conversation runs there.
        """
        occupancy = self._occupancy_of(home)
        if self.has_peers:
            tokens *= 2  # a peer may give away the same room before its message arrives
        return not occupancy.runs_batch or occupancy.claimed_tokens + tokens <= ADMIT_SHARE * self._limit(home)

    def _limit(self, home: Estimate) -> float:
        """How many tokens conversations may claim at a deployment."""
        return home.cache.capacity_tokens * (FILL_SHARE - RESERVE_SHARE if self._reserve_until else FILL_SHARE)

    def _assign_home(
        self, prompt: RoutedPrompt, known: Conversation | None, home: Estimate, now: float
    ) -> Conversation:
        """Record the prompt as its conversation's newest turn, at this deployment."""
        key = prompt.fingerprint[-1]
        urgent = not prompt.may_be_held
        if known is None:
            known = Conversation(key, home, now, urgent=urgent)
        else:
            self._forget(known)
            known.key, known.home = key, home
        if (other := self._by_key.get(key)) is not None:
            self._forget(other)
        known.tokens, known.last_used, known.held = prompt.prompt_tokens_estimate, now, False
        known.checkpoint = None
        depth = len(prompt.fingerprint) * 7 // 8
        if depth >= CHECKPOINT_BLOCKS:
            known.checkpoint = prompt.fingerprint[depth - depth % CHECKPOINT_BLOCKS - 1]
            self._by_checkpoint[known.checkpoint] = known
        self._by_key[key] = known
        self._at.setdefault(home, {})[known] = None
        self._occupancies.pop(home, None)
        if urgent:
            self._reserve_until = now + IDLE_SECONDS
        return known

    def _expire(self, now: float) -> None:
        """Forget ended conversations, and count finished first turns that got no second one."""
        if self._reserve_until < now:
            self._reserve_until = 0.0
        # Both mappings are in order of time, so only their first entries can be due.
        while self._first_turns and self._first_turns[finished := next(iter(self._first_turns))] <= now:
            del self._first_turns[finished]
            finished.is_single_turn = not finished.running
            self._learn_second_turn_share(0.0)
        while self._by_key:
            oldest = next(iter(self._by_key.values()))
            if len(self._by_key) <= MAX_CONVERSATIONS:
                if now - oldest.last_used < IDLE_SECONDS:
                    return
                if oldest.running or (oldest.held and now - oldest.started < HELD_MAX_SECONDS):
                    oldest.last_used = now
                    self._by_key.move_to_end(oldest.key)
                    continue
            self._forget(oldest)

    def _forget(self, conversation: Conversation) -> None:
        if self._by_key.get(conversation.key) is conversation:
            del self._by_key[conversation.key]
        if conversation.checkpoint is not None and self._by_checkpoint.get(conversation.checkpoint) is conversation:
            del self._by_checkpoint[conversation.checkpoint]
        self._at.get(conversation.home, {}).pop(conversation, None)
        self._occupancies.pop(conversation.home, None)


def _can_hold(home: Estimate, prompt: RoutedPrompt) -> bool:
    """Whether the prompt fits into the deployment's cache at all."""
    return len(prompt.fingerprint) <= home.cache.capacity
