"""The working set: which conversations may run so that all of their prefixes stay cached.

A conversation's next prompt repeats everything before it. If the running conversations together are longer than the
caches, each turn evicts what another one needs next, and all of them compute everything again. Then it is faster to run
fewer of them. So a call whose class sets `hold` waits between two turns until its conversation fits. The oldest
conversations continue, so that they end and make room. Conversations that pause for long are *parked*: they give up
their room, and keep their age, so they come before younger ones when they return. The longer a pause has lasted, the
longer it will last, and it may have no end. So if a running conversation does not fit, those that have paused longest
are parked before it is held. Real-time conversations come before those of the background,
and a share of each cache is reserved for more of them.

With `hold: auto`, calls wait only while `hold_choice.py` expects that holding serves more turns. Real-time calls have a
bound besides (`hold_max`), which the scheduler watches. Their conversations are tracked only while the caches are
crowded (`CROWDED_SHARE`), so calls of a fleet whose caches are large enough cost nothing here.

Tenants share the caches. Conversations are ordered by how many tokens the older conversations of their own tenant have.
So a tenant with many conversations holds up its own.

A conversation's *home* is the deployment of its last call. In that deployment's cache, a conversation claims its length
so far, in fingerprint tokens. `admit` decides before a call is sent; `begin` and `end` follow the calls that were sent.
A prompt continues a conversation if it begins with the conversation's last prompt, or with most of it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from gateway.prefix.cache_runs import CachePrediction
from gateway.prefix.conversation import Conversation, Occupancy
from gateway.prefix.estimate import Estimate
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.hold_choice import Crowd, HoldChoice

IDLE_SECONDS = 330.0  # without a call, after which a conversation is parked
PARK_SECONDS = 60.0  # without a call, after which it is parked if another one needs its room
REMEMBERED_SECONDS = 3_600.0  # without a call, after which a parked conversation is forgotten
SECOND_TURN_SECONDS = 30.0  # after a first turn, after which the conversation counts as a single question
FIRST_TURN_MIN_SHARE = 1 / 128  # of a cache; a shorter first turn claims nothing
CHECKPOINT_BLOCKS = 8  # checkpoints are at multiples of this
FILL_SHARE = 0.9  # of a cache that conversations may claim; they grow with each turn
ADMIT_SHARE = 0.85  # of the claimable room, up to which another conversation is admitted
RESERVE_SHARE = 0.1  # of each cache, reserved for new real-time conversations if there were any recently
SECOND_TURN_WEIGHT = 0.05  # of the newest conversation, in the learned share of those with a second turn
HELD_MAX_SECONDS = 86_400.0  # after which a held conversation is forgotten
MAX_CONVERSATIONS = 65_536
CALL_WEIGHT = 0.02  # of the newest call, in the means of blocks that are computed, and computed again
CROWDED_SHARE = 0.5  # of the computed blocks: if more were evicted before, the caches are crowded
COMPUTED_PRIOR_BLOCKS = 100.0  # of a prompt, assumed at first
CHOICE_SECONDS = 1.0  # for which a choice to hold or not is kept


class RoutedPrompt(Protocol):
    """What routing and the working set need to know of a call. `gateway.types.Call` implements it."""

    @property
    def fingerprint(self) -> Sequence[int]: ...
    @property
    def prompt_tokens_estimate(self) -> int: ...
    @property
    def session(self) -> str | None: ...
    @property
    def tenant_name(self) -> str: ...
    @property
    def may_be_held(self) -> bool: ...


class WorkingSet:
    """All conversations at the deployments of one fleet. Owned by the event loop."""

    def __init__(self) -> None:
        self._homes: dict[str, Estimate] = {}  # by session name, newest last
        self._by_checkpoint: dict[int, Conversation] = {}
        # By the hash of the last prompt's last block; least recently used first.
        self._by_key: OrderedDict[int, Conversation] = OrderedDict()
        self._parked: OrderedDict[int, Conversation] = OrderedDict()  # by the same hash; first parked first
        self._first_turns: dict[Conversation, float] = {}  # finished first turns: until when a second one is expected
        self._at: dict[Estimate, dict[Conversation, None]] = {}
        self._occupancies: dict[Estimate, Occupancy] = {}
        self.has_peers = False  # other gateways send calls to the same deployments
        self._second_turn_share = 0.5
        self._reserve_until = 0.0
        # Conversations are tracked only while background calls arrive, or while the caches are crowded.
        self.tracked_until = -math.inf
        self.is_crowded = False  # most of what deployments compute had been cached before, and was evicted
        self._computed_blocks = COMPUTED_PRIOR_BLOCKS  # of a prompt, as a mean
        self._repeated_blocks = 0.0  # of these: cached before, and evicted
        self._choices: dict[int, tuple[float, HoldChoice]] = {}  # by fleet traffic: when it was made

    def find(self, prompt: RoutedPrompt, homes: Sequence[Estimate]) -> Conversation | None:
        """The conversation that a prompt continues, if it is known."""
        chain = prompt.fingerprint
        if not chain:
            return None
        if (equal := self._ending_with(chain[-1])) is not None:
            return equal
        return self._find_continued(chain, max(home.cache.known_blocks(chain) for home in homes))

    def _ending_with(self, key: int) -> Conversation | None:
        return self._by_key.get(key) or self._parked.get(key)

    def _find_continued(self, chain: Sequence[int], depth: int) -> Conversation | None:
        """The conversation that a chain continues. Deployments know the chain's first `depth` blocks."""
        if depth and (continued := self._ending_with(chain[depth - 1])) is not None:
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

    def admit(
        self,
        prompt: RoutedPrompt,
        homes: Sequence[Estimate],
        now: float,
        *,
        running_only: bool = False,
        auto: bool = False,
    ) -> bool:
        """Whether the call may be sent now. If so, its conversation claims its room until it has been idle for a while.

        `running_only`: admit only conversations that have their room already. `auto`: hold it only if that is expected
        to serve more calls.
        """
        # Holding would be useless for a prompt without full blocks, or one that no cache can hold.
        if not prompt.fingerprint or not any(_can_hold(home, prompt) for home in homes):
            return True
        if prompt.may_be_held:
            self.tracked_until = max(self.tracked_until, now + IDLE_SECONDS)
        self._expire(now)
        known, tokens = self.find(prompt, homes), prompt.prompt_tokens_estimate
        if auto:
            if known is not None and not (known.held or known.is_parked or known.running):
                self._choice_of(homes[0])[1].note_turn(now - known.last_used, tokens - known.tokens)
            if not self._is_holding(homes, now, urgent=not prompt.may_be_held):
                return True
        if known is not None and not (known.held or known.is_parked):
            if self._fits_beside_older(known, tokens, now, parks=not auto):
                return True
            # The conversation gives up its room until it is admitted again.
            known.held = True
            self._occupancies.pop(known.home, None)
            return False
        if running_only:
            return False
        fitting = [home for home in homes if self._has_room(home, prompt, tokens)]
        if not fitting:
            return False
        # Prefer the deployment that has most of the prompt cached, then the one with the fewest claims.
        home = max(fitting, key=lambda home: (home.cache.match(prompt.fingerprint), -self.claimed_tokens(home)))
        self._assign_home(prompt, known, home, now)
        return True

    def begin(
        self, prompt: RoutedPrompt, home: Estimate, now: float, prediction: CachePrediction
    ) -> Conversation | None:
        """A call is sent to `home`, whose cache model predicts this of its prompt.

        None if the prompt has no full block or exceeds the cache, or if conversations are not tracked now.
        """
        computed = len(prompt.fingerprint) - prediction.matched + 1  # the incomplete last block, too
        self._computed_blocks += CALL_WEIGHT * (computed - self._computed_blocks)
        self._repeated_blocks += CALL_WEIGHT * (prediction.known - prediction.matched - self._repeated_blocks)
        self.is_crowded = self._repeated_blocks > CROWDED_SHARE * self._computed_blocks
        if self.is_crowded:
            self.tracked_until = max(self.tracked_until, now + IDLE_SECONDS)
        if prompt.session is not None:
            self._homes.pop(prompt.session, None)
            self._homes[prompt.session] = home
            if len(self._homes) > MAX_CONVERSATIONS:
                del self._homes[next(iter(self._homes))]
        if prompt.may_be_held:
            self.tracked_until = max(self.tracked_until, now + IDLE_SECONDS)
        elif now >= self.tracked_until:
            return None
        if not prompt.fingerprint or not _can_hold(home, prompt):
            return None
        self._expire(now)
        known = self._ending_with(prompt.fingerprint[-1]) or self._find_continued(prompt.fingerprint, prediction.known)
        conversation = self._assign_home(prompt, known, home, now)
        conversation.turns += 1
        conversation.running += 1
        if conversation.turns == 2:
            self._first_turns.pop(conversation, None)
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
        return self._occupancy_of(home).claimed_tokens(urgent_only=False)

    def _choice_of(self, home: Estimate) -> tuple[float, HoldChoice]:
        """The choice for the deployments that serve the same calls as this one, and when it was made."""
        return self._choices.setdefault(id(home.traffic), (-math.inf, HoldChoice()))

    def _is_holding(self, homes: Sequence[Estimate], now: float, *, urgent: bool) -> bool:
        """Whether holding conversations is expected to serve more calls at these deployments."""
        made_at, choice = self._choice_of(homes[0])
        if 0 <= now - made_at < CHOICE_SECONDS:
            return choice.is_holding
        self._choices[id(homes[0].traffic)] = now, choice
        conversations, tokens = 0.0, 0
        for home in homes:
            for conversation in self._at.get(home, ()):
                if not conversation.running and not conversation.held:
                    self._note_idle(conversation, now - conversation.last_used, choice)
                claim = conversation.tokens if conversation.held else self._claim(conversation)
                conversations += claim / max(1, conversation.tokens)
                tokens += claim
            self._occupancies.pop(home, None)
        rate = sum(home.speed.tokens_per_second for home in homes)
        claimable_tokens = sum(self._limit(home, urgent=urgent) for home in homes)
        answer_seconds = homes[0].decode.mean_seconds
        return choice.choose(Crowd(conversations, tokens, claimable_tokens, rate, len(homes), answer_seconds))

    @staticmethod
    def _note_idle(conversation: Conversation, idle_seconds: float, choice: HoldChoice) -> None:
        conversation.alive_share = choice.alive_share(idle_seconds)
        if idle_seconds > choice.overdue_seconds and not conversation.is_overdue:
            conversation.is_overdue = True
            choice.note_overdue()

    def _occupancy_of(self, home: Estimate) -> Occupancy:
        """The deployment's occupancy, computed again if a conversation or the cache's capacity changed."""
        occupancy = self._occupancies.get(home)
        if occupancy is None or occupancy.capacity_tokens != home.capacity_tokens:
            claimed: dict[tuple[bool, str], int] = {}
            for conversation in self._at.get(home, ()):
                if not conversation.held:
                    key = conversation.urgent, conversation.tenant
                    claimed[key] = claimed.get(key, 0) + self._claim(conversation)
            occupancy = Occupancy(home.capacity_tokens, claimed)
            self._occupancies[home] = occupancy
        return occupancy

    def _learn_second_turn_share(self, observed: float) -> None:
        """A conversation had a second turn (1.0), or none in time (0.0)."""
        self._second_turn_share += SECOND_TURN_WEIGHT * (observed - self._second_turn_share)
        self._occupancies.clear()

    def _claim(self, conversation: Conversation) -> int:
        """Tokens that a conversation claims. After a first turn: its length times the probability of a second turn."""
        if conversation.held or conversation.is_overdue:
            return 0
        if conversation.turns != 1:
            return int(conversation.tokens * conversation.alive_share)
        if conversation.tokens < FIRST_TURN_MIN_SHARE * conversation.home.capacity_tokens:
            return 0
        return conversation.tokens if conversation.running else int(conversation.tokens * self._second_turn_share)

    def _fits_beside_older(self, conversation: Conversation, tokens: int, now: float, *, parks: bool) -> bool:
        """Whether the conversation fits at its home beside those that come before it. The first one always does.

        `parks`: if it does not, but would without those that have been idle longest, these are parked.
        """
        claimed_tokens, before = self._claims_before(conversation)
        excess = claimed_tokens + tokens - self._limit(conversation.home, urgent=conversation.urgent)
        if excess <= 0 or not before:
            return True
        if not parks:
            return False
        idle = [one for one in before if not one.running and now - one.last_used >= PARK_SECONDS]
        idle.sort(key=lambda one: one.last_used)
        parked: list[Conversation] = []
        while excess > 0 and len(parked) < len(idle):
            parked.append(idle[len(parked)])
            excess -= self._claim(parked[-1])
        if excess > 0:
            return False
        for one in parked:
            self._park(one)
        return True

    def _claims_before(self, conversation: Conversation) -> tuple[int, list[Conversation]]:
        """What others claim before a conversation at its home, and those of them that are of its own kind.

        These are all real-time ones if it is of the background, and those of its own kind that have fewer older tokens
        of their tenant before them.
        """
        urgent, claimed = conversation.urgent, 0
        same: list[Conversation] = []
        for other in self._at[conversation.home]:
            if other.held:
                continue
            if other.urgent is urgent:
                same.append(other)
            elif other.urgent:
                claimed += self._claim(other)
        same.sort(key=lambda other: other.started)
        older: dict[str, int] = {}  # tokens of the tenant's older conversations
        places: list[tuple[int, float, Conversation]] = []
        own = (0, conversation.started)
        for other in same:
            ahead = older.get(other.tenant, 0)
            older[other.tenant] = ahead + self._claim(other)
            if other is conversation:
                own = ahead, other.started
            else:
                places.append((ahead, other.started, other))
        before = [other for ahead, started, other in places if (ahead, started) < own]
        return claimed + sum(map(self._claim, before)), before

    def _has_room(self, home: Estimate, prompt: RoutedPrompt, tokens: int) -> bool:
        """Whether one more conversation of `tokens` fits at a deployment.

        Always, if no conversation of its kind runs there, or if its tenant has less than its share of the room.
        """
        occupancy, urgent = self._occupancy_of(home), not prompt.may_be_held
        if not occupancy.runs(urgent=urgent):
            return True
        if self.has_peers:
            tokens *= 2  # a peer may give away the same room before its message arrives
        room = ADMIT_SHARE * self._limit(home, urgent=urgent)
        if occupancy.claimed_tokens(urgent_only=urgent) + tokens <= room:
            return True
        if not urgent:
            room -= occupancy.claimed_tokens(urgent_only=True)
        tenants = {tenant for is_urgent, tenant in occupancy.claimed if is_urgent is urgent} | {prompt.tenant_name}
        return occupancy.claimed.get((urgent, prompt.tenant_name), 0) + tokens <= room / len(tenants) < room

    def _limit(self, home: Estimate, *, urgent: bool = False) -> float:
        """How many tokens conversations may claim at a deployment."""
        if urgent:
            return home.capacity_tokens * FILL_SHARE
        return home.capacity_tokens * (FILL_SHARE - RESERVE_SHARE if self._reserve_until else FILL_SHARE)

    def _assign_home(
        self, prompt: RoutedPrompt, known: Conversation | None, home: Estimate, now: float
    ) -> Conversation:
        """Record the prompt as its conversation's newest turn, at this deployment."""
        key = prompt.fingerprint[-1]
        urgent = not prompt.may_be_held
        if known is None:
            known = Conversation(key, home, now, prompt.tenant_name, urgent=urgent)
        else:
            self._forget(known)
            known.key, known.home = key, home
        if (other := self._ending_with(key)) is not None:
            self._forget(other)
        known.tokens, known.last_used = prompt.prompt_tokens_estimate, now
        known.held = known.is_overdue = known.is_parked = False
        known.alive_share = 1.0
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
            finished.is_overdue = not finished.running
            self._learn_second_turn_share(0.0)
        while self._by_key:
            oldest = next(iter(self._by_key.values()))
            if now - oldest.last_used < IDLE_SECONDS:
                break
            if oldest.running or (oldest.held and now - oldest.started < HELD_MAX_SECONDS):
                oldest.last_used = now
                self._by_key.move_to_end(oldest.key)
            elif oldest.held:
                self._forget(oldest)
            else:
                self._park(oldest)
        while self._parked:
            first, known = next(iter(self._parked.values())), len(self._by_key) + len(self._parked)
            if now - first.last_used < REMEMBERED_SECONDS and known <= MAX_CONVERSATIONS:
                break
            self._forget(first)
        while len(self._by_key) > MAX_CONVERSATIONS:
            self._forget(next(iter(self._by_key.values())))

    def _park(self, conversation: Conversation) -> None:
        """Let a conversation give up its room. It keeps its age."""
        self._forget(conversation)
        conversation.is_parked = True
        self._parked[conversation.key] = conversation
        if conversation.checkpoint is not None:
            self._by_checkpoint[conversation.checkpoint] = conversation

    def _forget(self, conversation: Conversation) -> None:
        for by_key in (self._by_key, self._parked):
            if by_key.get(conversation.key) is conversation:
                del by_key[conversation.key]
        if conversation.checkpoint is not None and self._by_checkpoint.get(conversation.checkpoint) is conversation:
            del self._by_checkpoint[conversation.checkpoint]
        self._at.get(conversation.home, {}).pop(conversation, None)
        self._occupancies.pop(conversation.home, None)


def _can_hold(home: Estimate, prompt: RoutedPrompt) -> bool:
    """Whether the prompt fits into the deployment's cache at all."""
    return len(prompt.fingerprint) <= home.capacity_tokens // BLOCK_TOKENS
