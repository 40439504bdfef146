"""Family: transforms that bring prompts into one canonical form. `TransformPipeline` applies them.

`VERSIONS` lists the transforms of each version, in the order in which they apply. A change to what a transform does, or
to a row of `VERSIONS`, is a new version; only a P3 transform may be added to a row, since no earlier plan names it.
Conversations that began under the old version continue under it (`plans.py`), so its row stays as long as they may be
cached. Only the conditions under which a P0 transform applies may change within a version, because the deployment sees
the same tokens either way.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import xxhash

from gateway.prompts.transforms.base import (
    Fields,
    Message,
    MessagesTransform,
    MessagesView,
    Safety,
    Transform,
    TransformContext,
    TransformPlan,
    ValueTransform,
)
from gateway.prompts.transforms.chunk_order import ChunkOrder
from gateway.prompts.transforms.json_form import JSONForm
from gateway.prompts.transforms.move_volatile import VolatileToEnd, VolatileToUser
from gateway.prompts.transforms.noise import Noise
from gateway.prompts.transforms.order_memo import OrderMemo, PropertyOrder
from gateway.prompts.transforms.plans import TransformPlans
from gateway.prompts.transforms.shared_decisions import DecisionNotLoaded, SharedDecisions
from gateway.prompts.transforms.template_date import TemplateDate
from gateway.prompts.transforms.tool_order import ToolOrder
from gateway.types import PromptMessage

VERSION = 2
VERSIONS: dict[int, tuple[Transform, ...]] = {  # level `safe` is P0 to P2; `full` adds the P3 transforms of `opt_in`
    # Version 1 has no row: it changed the order of properties, which is meaning, so no conversation continues under it.
    2: (
        JSONForm(), Noise(), OrderMemo(), PropertyOrder(), VolatileToEnd(), VolatileToUser(), ToolOrder(),
        ChunkOrder(), TemplateDate(),
    ),
}  # fmt: skip
OPT_IN = tuple(transform.name for transform in VERSIONS[VERSION] if transform.safety is Safety.P3)

_CACHED_FIELDS = ("tools", "functions", "response_format")  # usually equal in all requests of an application
_CACHED_FIELD_SET = frozenset(_CACHED_FIELDS)
_HEAD_BYTES = 64
_FIRST_MESSAGE_BYTES = 16 * 1024  # read at first to find the end of the first message
_CACHED_FORMS_MAX = 1024
_CACHED_FORMS_MAX_BYTES = 16 * 2**20
_NULL = b"null"

_messages = msgspec.json.Decoder(list[Message])
_message = msgspec.json.Decoder(Message)
_scanner = json.JSONDecoder(strict=False)
_encode = msgspec.json.encode


class CanonicalBody(msgspec.Struct, frozen=True):
    """A body that the transforms changed."""

    fields: Fields
    steps: tuple[str, ...]  # names of the transforms that changed something
    changed_messages: dict[int, bytes] | None  # messages whose text changed, by index; None: any may have changed

    def keeps_texts(self, fields: Fields) -> bool:
        """Whether no text of the prompt differs from that of `fields`, from which the body was made."""
        return self.changed_messages is not None and not self.changed_messages and "tools" not in fields


class TransformPipeline:
    """Brings bodies into their canonical form. Owned by the event loop."""

    def __init__(self, decisions: SharedDecisions) -> None:
        self.decisions = decisions
        self.plans = TransformPlans(decisions, is_supported)
        self._forms: OrderedDict[tuple[TransformPlan, str, str, int], tuple[bytes, bytes | None, tuple[str, ...]]] = (
            OrderedDict()
        )
        self._forms_bytes = 0
        self._generation = decisions.generation
        self._context = TransformContext(TransformPlan(VERSION, "off"), "", decisions)

    def canonical_body(
        self, fields: Fields, messages: Sequence[PromptMessage], plan: TransformPlan, scope: str, *, plain: bool = False
    ) -> CanonicalBody | None:
        """The body in its canonical form; None if it is canonical already. `plain`: as in `MessagesView`.

        Raises `DecisionNotLoaded`, and has then changed nothing.
        """
        if plan.level == "off":
            return None
        context = self._context
        # Consecutive calls mostly come from one application, so the last context usually fits.
        if plan is not context.plan or scope != context.scope:
            context = self._context = TransformContext(plan, scope, self.decisions, *_by_kind(plan))
        changes: Fields = {}
        steps: tuple[str, ...] = ()
        for name in () if _CACHED_FIELD_SET.isdisjoint(fields) else _CACHED_FIELDS:
            if name in fields:
                form, names = self._cached_form(name, bytes(fields[name]), context)
                if form is not None:
                    changes[name] = msgspec.Raw(form)
                    steps += names
        changed_messages: dict[int, bytes] | None = {}
        if "messages" in fields:
            raw = fields["messages"]
            values, others = _select(context, messages, plain, raw)
            if values or others:
                form, names, changed_messages = _apply_to_messages(values, others, raw, context, plain)
                if form is not None:
                    changes["messages"] = msgspec.Raw(form)
                    steps += names
        if plan.template_date is not None:
            form, names = _apply(
                _value_transforms(plan, "chat_template_kwargs"),
                bytes(fields.get("chat_template_kwargs", _NULL)),
                context,
            )
            if form is not None:
                changes["chat_template_kwargs"] = msgspec.Raw(form)
                steps += names
        if not changes:
            return None
        if len(steps) > 1:
            steps = tuple(dict.fromkeys(steps))
        return CanonicalBody({**fields, **changes}, steps, changed_messages)

    def _cached_form(self, name: str, raw: bytes, context: TransformContext) -> tuple[bytes | None, tuple[str, ...]]:
        """As `_apply`, with a cache of the results."""
        if self._generation != self.decisions.generation:
            self._forms.clear()
            self._forms_bytes, self._generation = 0, self.decisions.generation
        key = (context.plan, context.scope, name, xxhash.xxh3_64_intdigest(raw))
        cached = self._forms.get(key)
        if cached is not None and cached[0] == raw:
            self._forms.move_to_end(key)
            return cached[1:]
        form, names = _apply(_value_transforms(context.plan, name), raw, context)
        if cached is None:
            self._forms[key] = (raw, form, names)
            self._forms_bytes += len(raw) + len(form or b"")
            while len(self._forms) > _CACHED_FORMS_MAX or self._forms_bytes > _CACHED_FORMS_MAX_BYTES:
                _, (old, old_form, _) = self._forms.popitem(last=False)
                self._forms_bytes -= len(old) + len(old_form or b"")
        return form, names


def _apply(
    selected: Sequence[ValueTransform], raw: bytes, context: TransformContext
) -> tuple[bytes | None, tuple[str, ...]]:
    """The value after all transforms, and the names of those that changed it. `(None, ())` if none did.

    Also if the value has an unexpected shape: then the deployment judges it.
    """
    form: bytes = raw
    names: list[str] = []
    try:
        for transform in selected:
            changed = transform.apply(form, context)
            if changed is not None:
                form = changed
                names.append(transform.name)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None, ()
    return (form, tuple(names)) if names else (None, ())


def _apply_to_messages(
    values: Sequence[ValueTransform],
    others: Sequence[MessagesTransform],
    raw: msgspec.Raw,
    context: TransformContext,
    plain: bool,
) -> tuple[bytes | None, tuple[str, ...], dict[int, bytes] | None]:
    """As `_apply`, for messages. Also returns `CanonicalBody.changed_messages`.

    The messages are decoded and encoded once, without a copy: copying a prompt of half a megabyte costs more, for the
    memory pages, than parsing it. If only the first message may change, the others are not parsed either.
    """
    form, names = _apply(values, bytes(raw), context) if values else (None, ())
    if not others:  # the usual case, if any transform applies
        return form, names, {} if plain or form is None else None
    changed: set[int] = set()
    try:
        written = memoryview(raw if form is None else form)
        messages, rest = _decode(written, first_only=all(transform.first_only for transform in others))
        for transform in others:
            if numbers := set(transform.change(messages, context)):
                names += (transform.name,)
                changed |= numbers
        changed_messages = {i: _encode(messages[i]) for i in changed} if plain or form is None else None
        if changed:
            form = b"".join((_encode(messages)[:-1], rest))
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None, (), {}
    return form, names, changed_messages


def _by_kind(plan: TransformPlan) -> tuple[tuple[ValueTransform, ...], tuple[MessagesTransform, ...]]:
    """The plan's transforms that may change messages: those of their JSON's bytes, and those of parsed messages."""
    selected = transforms(plan, "messages")
    return (
        tuple(transform for transform in selected if isinstance(transform, ValueTransform)),
        tuple(transform for transform in selected if isinstance(transform, MessagesTransform)),
    )


def _decode(written: memoryview, *, first_only: bool) -> tuple[list[Message], memoryview]:
    """The messages, and what follows them in their JSON. `first_only`: only the first one, if that saves work."""
    end = _end_of_first(written) if first_only else None
    if end is None:
        return _messages.decode(written), memoryview(b"]")
    return [_message.decode(written[1:end])], written[end:]


def _end_of_first(written: memoryview) -> int | None:
    """Where the first object of a JSON list ends; None if that is hard to say."""
    size = _FIRST_MESSAGE_BYTES
    while True:
        text = str(written[:size], "utf-8", "ignore")  # the last character may be cut
        try:
            _, end = _scanner.raw_decode(text, text.index("{"))
            return len(text[:end].encode())
        except ValueError:  # cut within the message
            if size >= len(written):
                return None
            size *= 4


def _select(
    context: TransformContext, messages: Sequence[PromptMessage], plain: bool, raw: msgspec.Raw
) -> tuple[Sequence[ValueTransform], Sequence[MessagesTransform]]:
    """The transforms that may apply to the messages: those of their JSON's bytes, and those of parsed messages."""
    values, others = context.message_bytes, context.messages
    if not values and not others:
        return (), ()
    written = memoryview(raw)
    view = MessagesView(messages, plain, bytes(written[:_HEAD_BYTES]), len(written))
    return (
        [transform for transform in values if transform.may_apply(view)],
        [transform for transform in others if transform.may_apply(view)],
    )


@lru_cache(maxsize=1024)
def transforms(plan: TransformPlan, field: str) -> tuple[Transform, ...]:
    """The plan's transforms that may change a field of the body, in order."""
    if plan.level == "off":
        return ()
    return tuple(
        transform
        for transform in VERSIONS[plan.version]
        if field in transform.fields and (transform.safety < Safety.P3 or transform.name in plan.opt_in)
    )


@lru_cache(maxsize=1024)
def _value_transforms(plan: TransformPlan, field: str) -> tuple[ValueTransform, ...]:
    return tuple(transform for transform in transforms(plan, field) if isinstance(transform, ValueTransform))


def is_supported(plan: TransformPlan) -> bool:
    """Whether this release still has all transforms of a plan that an earlier release made."""
    names = {transform.name for transform in VERSIONS.get(plan.version, ())}
    return bool(names) and names.issuperset(plan.opt_in)


__all__ = [
    "OPT_IN",
    "VERSION",
    "VERSIONS",
    "CanonicalBody",
    "DecisionNotLoaded",
    "Fields",
    "Safety",
    "SharedDecisions",
    "Transform",
    "TransformPipeline",
    "TransformPlan",
    "transforms",
]  # fmt: skip
