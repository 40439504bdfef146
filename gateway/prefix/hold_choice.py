"""Whether holding conversations serves more of their turns, for classes with `hold: auto`.

Conversations that together are longer than the caches evict each other, so that each turn computes its whole prompt
again. If only as many run as fit, turns are short, but the deployments may idle while the running ones pause. With

    n        conversations, and k of them that fit into the caches
    pause    seconds between a turn's end and the conversation's next turn
    answer   seconds of an answer, from its first chunk on
    new      tokens that a turn adds, and `length` tokens of a whole prompt
    rate     tokens per second that all deployments compute

the turns per second are estimated as

    held        min(k / (pause + answer + new / rate_of_one),    rate / new)
    not held    min(n / (pause + answer + length / rate_of_one), rate / length)

`rate_of_one` is a single deployment's rate. A conversation that has been idle for a while may have ended, so it counts
by the probability that it continues, with pauses that are distributed exponentially.
"""

from __future__ import annotations

import math
from typing import NamedTuple

WEIGHT = 0.02  # of the newest turn, in the learned means
TURNS_MIN = 8  # that teach the means before anything is held
NEW_TOKENS_MIN = 64.0  # of a turn
OVERDUE_PAUSES = 4.0  # mean pauses after which a conversation counts as ended
BETTER_FACTOR = 1.1  # times as many turns, for holding to begin; it ends when there are not more


class Crowd(NamedTuple):
    """The conversations at some deployments, and the deployments."""

    conversations: float  # those that may have ended count less
    tokens: int  # of all these conversations
    claimable_tokens: float  # of the caches
    tokens_per_second: float  # of all deployments
    deployments: int
    answer_seconds: float


class HoldChoice:
    """What was learned of turns, and the choice. Owned by the event loop."""

    def __init__(self) -> None:
        self.is_holding = False
        self._pause_seconds = 0.0
        self._new_tokens = 0.0
        self._turns = 0
        self._continue_share = 1.0  # of turns, after which the conversation continues

    @property
    def overdue_seconds(self) -> float:
        """How long a conversation pauses before it counts as ended."""
        return OVERDUE_PAUSES * self._pause_seconds if self._turns >= TURNS_MIN else math.inf

    def note_turn(self, pause_seconds: float, new_tokens: float) -> None:
        """A conversation's next call arrived."""
        self._turns += 1
        self._note_continued(1.0)
        weight = max(WEIGHT, 1 / self._turns)
        self._pause_seconds += weight * (max(0.0, pause_seconds) - self._pause_seconds)
        self._new_tokens += weight * (max(NEW_TOKENS_MIN, new_tokens) - self._new_tokens)

    def note_overdue(self) -> None:
        """A conversation's next call has not come in `overdue_seconds`."""
        self._note_continued(0.0)

    def _note_continued(self, observed: float) -> None:
        self._continue_share += WEIGHT * (observed - self._continue_share)

    def alive_share(self, idle_seconds: float) -> float:
        """The probability that a conversation that has been idle for so long continues."""
        if self._pause_seconds <= 0:
            return 1.0
        pausing = self._continue_share * math.exp(-idle_seconds / self._pause_seconds)
        return pausing / (pausing + 1 - self._continue_share) if self._continue_share < 1 else 1.0

    def choose(self, crowd: Crowd) -> bool:
        """Whether to hold conversations now."""
        if self._turns < TURNS_MIN or not crowd.tokens or crowd.tokens <= crowd.claimable_tokens:
            self.is_holding = False
            return False
        length = crowd.tokens / crowd.conversations
        fitting = max(crowd.deployments, crowd.claimable_tokens / length)  # each deployment runs at least one
        held = self._turns_per_second(fitting, self._new_tokens, crowd)
        free = self._turns_per_second(crowd.conversations, length, crowd)
        self.is_holding = held > (1.0 if self.is_holding else BETTER_FACTOR) * free
        return self.is_holding

    def _turns_per_second(self, conversations: float, computed_tokens: float, crowd: Crowd) -> float:
        """The turns per second of so many running conversations. Each turn computes so many tokens."""
        rate = crowd.tokens_per_second
        computing_seconds = computed_tokens * crowd.deployments / rate
        turn_seconds = self._pause_seconds + crowd.answer_seconds + computing_seconds
        return min(conversations / turn_seconds, rate / computed_tokens)
