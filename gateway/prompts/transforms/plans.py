"""Which transforms a conversation gets: those that it began with, whatever a release or a reload has changed since.

A conversation that is canonicalised in another way than the turn before is cold from its first byte, so a change must
not reach those that are under way. The rule: for `WARM_SECONDS` after a plan has changed (no cache keeps a prefix
much longer), a request that has an answer in it already, and is not known to have begun under the new plan, goes on
under the old one. What has begun since is known by its first user message, for all replicas through the storage. The
plans themselves are kept there too, so that a gateway that is started again with another version, or another policy,
knows what it did before; with storage in memory it does not. Unless a plan has changed within that time, nothing is
remembered of any conversation, and this costs a look-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import xxhash

from gateway.core.cache_breakpoints import part_text, without_breakpoint
from gateway.prompts.transforms.base import TransformPlan
from gateway.prompts.transforms.shared_decisions import SharedDecisions
from gateway.types import PromptMessage

WARM_SECONDS = 86400.0
MAX_SCOPES = 10_000  # tenants times models

_encode = msgspec.json.encode
Stored = TypeVar("Stored")


class _Change(msgspec.Struct):
    """The plan of one tenant's calls for one model, and the one before it."""

    plan: TransformPlan
    previous: TransformPlan | None = None
    changed: float = 0.0  # seconds since the epoch


_change = msgspec.json.Decoder(_Change)
_plan = msgspec.json.Decoder(TransformPlan)


class TransformPlans:
    """`known` tells a plan that this release can still carry out."""

    def __init__(
        self, memory: SharedDecisions, known: Callable[[TransformPlan], bool], clock: Callable[[], float] = time.time
    ) -> None:
        self._memory = memory
        self._known = known
        self._clock = clock
        self._changes: dict[tuple[str, str], _Change] = {}

    def plan_for(
        self, wanted: TransformPlan, tenant: str, model: str, messages: Sequence[PromptMessage]
    ) -> TransformPlan:
        """What the policy wants of new conversations is `wanted`. Raises `NotInMemory`."""
        change = self._changes.get((tenant, model))
        if change is None or (change.plan is not wanted and change.plan != wanted):
            change = self._note(wanted, tenant, model, change)
        if change.previous is None:
            return change.plan
        if self._clock() > change.changed + WARM_SECONDS:
            change.previous = None
            return change.plan
        return self._plan_of_conversation(change, change.previous, tenant, model, messages)

    def _note(self, wanted: TransformPlan, tenant: str, model: str, change: _Change | None) -> _Change:
        key = f"canonical:plan:{tenant}/{model}"
        if change is None and (stored := self._memory.find(key)) is not None:
            change = _decoded(_change, stored)
        if change is None:
            change = _Change(wanted)
        elif change.plan != wanted:
            change = _Change(wanted, change.plan, self._clock())
        if change.previous is not None and not self._known(change.previous):
            change.previous = None
        self._memory.keep(key, _encode(change), first_wins=False)
        if len(self._changes) >= MAX_SCOPES:
            self._changes.clear()
        self._changes[tenant, model] = change
        return change

    def _plan_of_conversation(
        self, change: _Change, previous: TransformPlan, tenant: str, model: str, messages: Sequence[PromptMessage]
    ) -> TransformPlan:
        key = _key_of(tenant, model, messages)
        if key is None:
            return change.plan
        if not any(message.role in ("assistant", "tool") for message in messages):
            self._memory.keep(key, _encode(change.plan), first_wins=False)
            return change.plan
        stored = self._memory.find(key)
        begun = None if stored is None else _decoded(_plan, stored)
        return change.plan if begun == change.plan else previous


def _key_of(tenant: str, model: str, messages: Sequence[PromptMessage]) -> str | None:
    """By the first user message alone: the system prompt may be what changes from turn to turn."""
    for message in messages:
        if message.role == "user":
            content = message.content
            return f"canonical:conversation:{tenant}/{model}:{xxhash.xxh3_128_hexdigest(_words(content))}"
    return None


def _words(content: str | Sequence[msgspec.Raw] | None) -> bytes:
    """The same with a breakpoint, which moves on, and without one."""
    if content is not None and not isinstance(content, str) and len(content) == 1:
        content = part_text(content[0]) or content
    if isinstance(content, str):
        return content.encode("utf-8", "surrogatepass")
    return b"".join([without_breakpoint(bytes(part)) for part in content or ()])


def _decoded(decoder: msgspec.json.Decoder[Stored], stored: bytes) -> Stored | None:
    try:
        return decoder.decode(stored)
    except msgspec.MsgspecError:  # of another release
        return None
