"""Chooses the transforms of a conversation, which keeps its first choice even after a policy reload or an upgrade.

If a conversation is canonicalised differently than before, nothing of it is cached any more. So a change must not reach
running conversations. For `WARM_SECONDS` after a plan has changed (hardly any cache keeps a prefix longer), a request
that contains an answer, and is not known to have begun under the new plan, continues under the old one.

Conversations that began since then are recorded by their first user message, in the storage for all replicas. The plans
are recorded there, too, so that a gateway that restarts with another version or policy knows its former plan; with
storage in memory it does not. If no plan has changed within that time, nothing is recorded about conversations, and
this costs one lookup.
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
MAX_SCOPES = 10_000  # pairs of a tenant and a model

_encode = msgspec.json.encode
Stored = TypeVar("Stored")


class _Change(msgspec.Struct):
    """The plan of one tenant's calls for one model, and the plan before it. Stored as JSON."""

    plan: TransformPlan
    previous: TransformPlan | None = None
    changed: float = 0.0  # seconds since the epoch


_change = msgspec.json.Decoder(_Change)
_plan = msgspec.json.Decoder(TransformPlan)


class TransformPlans:
    """The plans by tenant and model, current and previous. Owned by the event loop."""

    def __init__(
        self,
        decisions: SharedDecisions,
        is_supported: Callable[[TransformPlan], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`is_supported` says whether this release can still carry out a plan.

        `clock` returns seconds since the epoch.
        """
        self._decisions = decisions
        self._is_supported = is_supported
        self._clock = clock
        self._changes: dict[tuple[str, str], _Change] = {}

    def plan_for(
        self, wanted: TransformPlan, tenant: str, model: str, messages: Sequence[PromptMessage]
    ) -> TransformPlan:
        """The plan for a request, if the policy wants `wanted` for new conversations. Raises `DecisionNotLoaded`."""
        change = self._changes.get((tenant, model))
        if change is None or (change.plan is not wanted and change.plan != wanted):
            change = self._record_plan(wanted, tenant, model, change)
        if change.previous is None:
            return change.plan
        if self._clock() > change.changed + WARM_SECONDS:
            change.previous = None
            return change.plan
        return self._plan_of_conversation(change, change.previous, tenant, model, messages)

    def _record_plan(self, wanted: TransformPlan, tenant: str, model: str, change: _Change | None) -> _Change:
        key = f"canonical:plan:{tenant}/{model}"
        if change is None and (stored := self._decisions.find(key)) is not None:
            change = _decoded(_change, stored)
        if change is None:
            change = _Change(wanted)
        elif change.plan != wanted:
            change = _Change(wanted, change.plan, self._clock())
        if change.previous is not None and not self._is_supported(change.previous):
            change.previous = None
        self._decisions.decide(key, _encode(change), first_wins=False)
        if len(self._changes) >= MAX_SCOPES:
            self._changes.clear()
        self._changes[tenant, model] = change
        return change

    def _plan_of_conversation(
        self, change: _Change, previous: TransformPlan, tenant: str, model: str, messages: Sequence[PromptMessage]
    ) -> TransformPlan:
        key = _conversation_key(tenant, model, messages)
        if key is None:
            return change.plan
        if not any(message.role in ("assistant", "tool") for message in messages):
            self._decisions.decide(key, _encode(change.plan), first_wins=False)
            return change.plan
        stored = self._decisions.find(key)
        plan_at_start = None if stored is None else _decoded(_plan, stored)
        return change.plan if plan_at_start == change.plan else previous


def _conversation_key(tenant: str, model: str, messages: Sequence[PromptMessage]) -> str | None:
    """The conversation's key: a hash of its first user message. The system prompt may change from turn to turn."""
    for message in messages:
        if message.role == "user":
            content = message.content
            return f"canonical:conversation:{tenant}/{model}:{xxhash.xxh3_128_hexdigest(_content_bytes(content))}"
    return None


def _content_bytes(content: str | Sequence[msgspec.Raw] | None) -> bytes:
    """The content without cache breakpoints, which move on with each turn."""
    if content is not None and not isinstance(content, str) and len(content) == 1:
        content = part_text(content[0]) or content
    if isinstance(content, str):
        return content.encode("utf-8", "surrogatepass")
    return b"".join([without_breakpoint(bytes(part)) for part in content or ()])


def _decoded(decoder: msgspec.json.Decoder[Stored], stored: bytes) -> Stored | None:
    try:
        return decoder.decode(stored)
    except msgspec.MsgspecError:  # written by another release
        return None
