"""The transforms by version and level, and how a body comes into its canonical form.

A change to what a transform does, or to a row of `VERSIONS`, is a new version: conversations that began under the old
one go on under it (see `plans.py`), so its row stays for as long as they may be warm. When a P0 transform applies may
change: servers see the same tokens either way.
"""

from __future__ import annotations

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
from gateway.prompts.transforms.json_form import JSONForm
from gateway.prompts.transforms.move_volatile import VolatileToEnd, VolatileToUser
from gateway.prompts.transforms.noise import Noise
from gateway.prompts.transforms.order_memo import OrderMemo
from gateway.prompts.transforms.plans import TransformPlans
from gateway.prompts.transforms.shared_decisions import DecisionNotLoaded, SharedDecisions
from gateway.prompts.transforms.template_date import TemplateDate
from gateway.prompts.transforms.text_parts import TextParts
from gateway.prompts.transforms.tool_order import ToolOrder
from gateway.types import PromptMessage

VERSION = 1
_NOISE, _TEXT_PARTS = Noise(), TextParts()
VERSIONS: dict[int, tuple[Transform, ...]] = {  # `safe` is P0 to P2, in this order; `full` adds what is opted in
    1: (
        JSONForm(), _NOISE, _TEXT_PARTS, OrderMemo(),
        VolatileToEnd(), VolatileToUser(), _NOISE, _TEXT_PARTS,  # what is moved may leave noise, or one part
        ToolOrder(), TemplateDate(),
    ),
}  # fmt: skip
OPT_IN = tuple(transform.name for transform in VERSIONS[VERSION] if transform.safety is Safety.P3)

_KEPT_FIELDS = ("tools", "functions", "response_format")  # equal for every request of an application
_ANY_KEPT_FIELD = frozenset(_KEPT_FIELDS)
_HEAD_BYTES = 64
_KEPT_FORMS = 1024
_KEPT_FORMS_BYTES = 16 * 2**20
_NULL = b"null"

_messages = msgspec.json.Decoder(list[Message])
_encode = msgspec.json.encode


class CanonicalBody(msgspec.Struct, frozen=True):
    """A body in another form than it came in."""

    fields: Fields
    steps: tuple[str, ...]  # names of the transforms that changed something
    reworded: dict[int, bytes] | None  # the messages that say it otherwise, by number; None: perhaps all of them


class TransformPipeline:
    """Brings bodies into their canonical form. Owned by the event loop."""

    def __init__(self, memory: SharedDecisions) -> None:
        self.memory = memory
        self.plans = TransformPlans(memory, can_do)
        self._forms: OrderedDict[tuple[TransformPlan, str, str, int], tuple[bytes, bytes | None, tuple[str, ...]]] = (
            OrderedDict()
        )
        self._forms_bytes = 0
        self._generation = memory.generation
        self._context = TransformContext(TransformPlan(VERSION, "off"), "", memory, ())

    def form(
        self, fields: Fields, messages: Sequence[PromptMessage], plan: TransformPlan, scope: str, *, plain: bool = False
    ) -> CanonicalBody | None:
        """The body in its canonical form; None where it is that already. `plain`: as in `View`. Raises `NotInMemory`,
        and has then changed nothing.
        """
        if plan.level == "off":
            return None
        context = self._context
        if plan is not context.plan or scope != context.scope:  # as is so where one application calls again and again
            context = self._context = TransformContext(plan, scope, self.memory, transforms(plan, "messages"))
        changes: Fields = {}
        steps: tuple[str, ...] = ()
        for name in () if _ANY_KEPT_FIELD.isdisjoint(fields) else _KEPT_FIELDS:
            if name in fields:
                form, names = self._kept_form(name, bytes(fields[name]), context)
                if form is not None:
                    changes[name] = msgspec.Raw(form)
                    steps += names
        reworded: dict[int, bytes] | None = {}
        if "messages" in fields:
            raw = fields["messages"]
            if wanting := _wanting(context.for_messages, messages, plain, raw):
                form, names, reworded = _with_messages(wanting, raw, context, plain)
                if form is not None:
                    changes["messages"] = msgspec.Raw(form)
                    steps += names
        if plan.template_date is not None:
            form, names = _apply(
                _of_values(plan, "chat_template_kwargs"), bytes(fields.get("chat_template_kwargs", _NULL)), context
            )
            if form is not None:
                changes["chat_template_kwargs"] = msgspec.Raw(form)
                steps += names
        return CanonicalBody({**fields, **changes}, tuple(dict.fromkeys(steps)), reworded) if changes else None

    def _kept_form(self, name: str, raw: bytes, context: TransformContext) -> tuple[bytes | None, tuple[str, ...]]:
        """As `_apply`, which is asked once for as long as the result is kept."""
        if self._generation != self.memory.generation:
            self._forms.clear()
            self._forms_bytes, self._generation = 0, self.memory.generation
        key = (context.plan, context.scope, name, xxhash.xxh3_64_intdigest(raw))
        kept = self._forms.get(key)
        if kept is not None and kept[0] == raw:
            self._forms.move_to_end(key)
            return kept[1:]
        form, names = _apply(_of_values(context.plan, name), raw, context)
        if kept is None:
            self._forms[key] = (raw, form, names)
            self._forms_bytes += len(raw) + len(form or b"")
            while len(self._forms) > _KEPT_FORMS or self._forms_bytes > _KEPT_FORMS_BYTES:
                _, (old, old_form, _) = self._forms.popitem(last=False)
                self._forms_bytes -= len(old) + len(old_form or b"")
        return form, names


def _apply(
    wanting: Sequence[ValueTransform], raw: bytes, context: TransformContext
) -> tuple[bytes | None, tuple[str, ...]]:
    """The value after all of these, and the names of those that changed it; None where none did, or where it is not
    of the shape that this field has: the server is to judge it then."""
    form: bytes = raw
    names: list[str] = []
    try:
        for transform in wanting:
            changed = transform.apply(form, context)
            if changed is not None:
                form = changed
                names.append(transform.name)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None, ()
    return (form, tuple(names)) if names else (None, ())


def _with_messages(
    wanting: Sequence[Transform], raw: msgspec.Raw, context: TransformContext, plain: bool
) -> tuple[bytes | None, tuple[str, ...], dict[int, bytes] | None]:
    """As `_apply`, for messages, and what `Form.reworded` is to be. They are taken apart and put together once, and not
    copied for it: a prompt of half a megabyte costs more to copy, by the pages that have to be had, than to read.
    """
    first, *others = wanting
    if not others and isinstance(first, ValueTransform):  # as is mostly so, where there is anything to do
        form, applied = _apply([first], bytes(raw), context)
        return form, applied, {} if plain or form is None else None
    names: list[str] = []
    form = None
    if isinstance(first, ValueTransform):
        form, applied = _apply([first], bytes(raw), context)
        names += applied
    else:
        others = [first, *others]
    rewritten = form is not None
    try:
        messages = _messages.decode(form or raw) if others else []
        reworded: set[int] = set()
        changed = False
        for transform in others:
            assert isinstance(transform, MessagesTransform), "those that go by bytes stand before the others"
            if numbers := set(transform.change(messages)):
                changed = True
                names.append(transform.name)
                if not transform.same_words:
                    reworded |= numbers
        if changed:
            form = _encode(messages)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None, (), {}
    return form, tuple(names), None if rewritten and not plain else {i: _encode(messages[i]) for i in reworded}


def _wanting(
    candidates: Sequence[Transform], messages: Sequence[PromptMessage], plain: bool, raw: msgspec.Raw
) -> list[Transform]:
    """Those that see something in the messages, and all behind one that may bring forth more than was to be seen."""
    wanting: list[Transform] = []
    stirred = False
    written = memoryview(raw)
    view = MessagesView(messages, plain, bytes(written[:_HEAD_BYTES]), len(written))
    for transform in candidates:
        unseen = stirred and not (view.long and transform.safety is Safety.P0)
        if unseen or (transform not in wanting and transform.sees(view)):
            wanting.append(transform)
            stirred = stirred or transform.safety > Safety.P0
    return wanting


@lru_cache(maxsize=1024)
def transforms(plan: TransformPlan, field: str) -> tuple[Transform, ...]:
    """Those of a plan that may change a field of the body, in order."""
    if plan.level == "off":
        return ()
    chosen = [
        transform
        for transform in VERSIONS[plan.version]
        if field in transform.fields and (transform.safety < Safety.P3 or transform.name in plan.opt_in)
    ]
    moving = any(transform.safety is Safety.P3 for transform in chosen)
    return tuple(chosen if moving else dict.fromkeys(chosen))  # where nothing moves, none is needed again


@lru_cache(maxsize=1024)
def _of_values(plan: TransformPlan, field: str) -> tuple[ValueTransform, ...]:
    return tuple(transform for transform in transforms(plan, field) if isinstance(transform, ValueTransform))


def can_do(plan: TransformPlan) -> bool:
    """Whether this release still has what an earlier one did."""
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
