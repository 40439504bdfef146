"""The other forms that a sampled prompt would have under policies that might be proposed for it, as chains.

The report is made later and without the prompts, so what each transform would do to a prompt has to be known when the
prompt is there. For each transform that a policy line can switch on and that changes this prompt, and for each
combination of them, the prompt's chain under it is kept (`prompt_chain.py`). Most prompts are changed by none or one.
The transforms are the gateway's own. Their decisions, such as which order of chunks was first, are kept apart from
those that requests get.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

import msgspec

from gateway.diagnosis.outline import PromptPart, parts_of_fields
from gateway.diagnosis.prompt_chain import chain_of
from gateway.prefix.fingerprint import seed_of
from gateway.prompts.transforms import VERSION, DecisionNotLoaded, SharedDecisions, TransformPipeline, TransformPlan
from gateway.types import Call

SAFE = "safe"  # the name of the form under level `safe`, where the level is `off`
MOVES = ("volatile_to_end", "volatile_to_user")  # alternatives: a line has one place
ORDERS = ("tool_order", "property_order", "chunk_order")
SWITCHES = (*MOVES, *ORDERS)
MAX_BYTES = 2 * 2**20  # of a prompt; for a longer one no forms are computed
MAX_DECISION_BYTES = 4 * 2**20

Fields = Mapping[str, msgspec.Raw]


class _Message(msgspec.Struct):
    role: str = ""
    content: str | list[msgspec.Raw] | None = None


_messages = msgspec.json.Decoder(list[_Message])


class CandidateForms:
    """Computes the forms. Not thread-safe."""

    def __init__(self) -> None:
        self._pipeline = TransformPipeline(SharedDecisions(max_bytes=MAX_DECISION_BYTES))

    def chains(self, call: Call, parts: tuple[PromptPart, ...]) -> tuple[str, dict[str, str]]:
        """The prompt's chain, and the chains of its other forms by `form_name`, without those that are equal to it."""
        seed = seed_of(call.cache_salt)
        chain = chain_of(parts, seed)
        if sum(len(call.fields.get(name, b"")) for name in ("messages", "tools")) > MAX_BYTES:
            return chain, {}
        form = call.policy.canonicalise.form_for(call.principal.tenant_name, call.model_name)

        def chain_with(*switches: str) -> str:
            level = "full" if switches or form.level == "full" else SAFE
            plan = TransformPlan(VERSION, level, (*form.opt_in, *switches))
            fields = self._apply(call, plan)
            return chain if fields is None else chain_of(parts_of_fields(fields, seed), seed)

        safe = chain_with() if form.level == "off" else chain
        forms = {SAFE: safe} if safe != chain else {}
        single = {name: chain_with(name) for name in SWITCHES if name not in form.opt_in}
        changing = [name for name, changed in single.items() if changed != safe]
        forms |= {name: single[name] for name in changing}
        for names in _combinations(changing):
            forms[form_name(names)] = chain_with(*names)
        return chain, forms

    def _apply(self, call: Call, plan: TransformPlan) -> Fields | None:
        """The body under a plan; None if it is unchanged."""
        try:
            messages = _messages.decode(call.fields["messages"])
            if not messages:
                return None
            body = self._pipeline.canonical_body(dict(call.fields), messages, plan, call.cache_salt)
        except (msgspec.MsgspecError, RecursionError, UnicodeError, DecisionNotLoaded):
            return None
        return None if body is None else body.fields


def form_name(switches: tuple[str, ...]) -> str:
    """The name of the form under several transforms."""
    return "+".join(name for name in SWITCHES if name in switches)


def chain_under(chain: str, forms: Mapping[str, str], switches: frozenset[str]) -> str:
    """The chain of a prompt under these transforms, from what `CandidateForms.chains` returned for it."""
    if switches.issuperset(MOVES):
        switches -= {MOVES[0]}  # the other one moves the same lines, and further
    changing = tuple(name for name in SWITCHES if name in switches and name in forms)
    if changing and (known := forms.get(form_name(changing))) is not None:
        return known
    return forms.get(SAFE, chain) if switches else chain


def _combinations(changing: list[str]) -> Iterator[tuple[str, ...]]:
    """The combinations of two and more transforms. In each, at most one transform moves lines."""
    for count in range(2, len(changing) + 1):
        for names in combinations(changing, count):
            if not set(MOVES) <= set(names):
                yield names
