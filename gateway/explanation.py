"""Explains how a request would be handled, without sending it, for `warmpath explain` and the dashboard.

A request goes through a canonicaliser and the router. `Explainer.explain` returns what they decided; `Explanation.json`
has it as one JSON-like dictionary. The router only ranks the deployments, which changes no state.
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.core.errors import BadRequest
from gateway.deployments.fleet import Fleet
from gateway.endpoints.base import Endpoint
from gateway.policy import Policy
from gateway.policy.traffic import Canonicalise
from gateway.prefix.fingerprint import BLOCK_BYTES
from gateway.prompts.canonicaliser import Canonicaliser, join_fields, new_call_id
from gateway.routing.base import Candidate
from gateway.routing.block_source import with_block_source
from gateway.routing.router import Router
from gateway.types import Call, Principal, Trace

MAX_DIFF_LINES = 200


class Explanation(NamedTuple):
    """What would be done with a request. The first candidate wins."""

    policy: Policy
    call: Call
    as_sent: Call  # the same request without canonicalisation
    candidates: Sequence[Candidate]
    seconds: float  # that canonicalisation took
    now: float  # in the event loop's seconds
    own: frozenset[str]  # the deployments of the requested model; other candidates belong to its fallbacks
    prefill: Candidate | None = None  # the prefill deployment that would compute the prompt for the first candidate

    @property
    def json(self) -> dict[str, Any]:
        """The explanation for `--json` and the admin API."""
        return _explanation(self)


class Explainer:
    """Explains requests under one policy. `secret` is the key of the tenants' salts, as for the canonicaliser.

    The router's fleet decides what is explained: that of a running gateway, or an idle one with empty caches.
    """

    def __init__(self, policy: Policy, fleet: Fleet, router: Router, secret: bytes) -> None:
        self._policy = policy
        self._untouched = policy.model_copy(update={"canonicalise": Canonicalise(level="off")})
        self._fleet = fleet
        self._router = router
        self._canonicaliser = Canonicaliser(secret)
        self._secret = secret

    def explain(
        self, endpoint: Endpoint, body: bytes, headers: Mapping[bytes, bytes], principal: Principal
    ) -> Explanation:
        """Explain a request. Raises the `GatewayError` with which it would be rejected."""
        context: dict[str, Any] = {
            "call_id": new_call_id(), "principal": principal,
            "now": asyncio.get_running_loop().time(), "trace": Trace(trace_id=1, parent_span_id=0, sampled=False),
        }  # fmt: skip
        started = time.perf_counter()
        call = self._canonicaliser.canonicalise(endpoint, body, headers, policy=self._policy, **context)
        seconds = time.perf_counter() - started
        candidates = self._router.order(call, context["now"])
        if not candidates:
            raise BadRequest(self._refusal(call))
        as_sent = Canonicaliser(self._secret).canonicalise(endpoint, body, headers, policy=self._untouched, **context)
        own = frozenset(deployment.name for deployment in self._fleet.deployments_of(call.model))
        prefill = self._router.prefill_of(call, candidates[0], context["now"])
        if call.has_prefix:
            candidates = [
                with_block_source(call.fingerprint, candidate, candidates, context["now"]) for candidate in candidates
            ]
        return Explanation(self._policy, call, as_sent, candidates, seconds, context["now"], own, prefill)

    def _refusal(self, call: Call) -> str:
        """Why no deployment can answer the call."""
        for deployment in self._fleet.deployments_of(call.model):
            if (refusal := deployment.provider.unsupported_error(call)) is not None:
                return str(refusal)
        return f"model {call.model_name!r} has no deployments now"


def _explanation(explanation: Explanation) -> dict[str, Any]:
    policy, call, as_sent = explanation.policy, explanation.call, explanation.as_sent
    rule = None if call.class_rule is None else policy.rules[call.class_rule]
    return {
        "model": {"asked": call.asked_model, "served": call.model_name},
        "rule": None if rule is None else {
            "index": call.class_rule, "match": rule.match.model_dump(exclude_none=True), "class": rule.latency_class,
        },
        "class": call.class_name,
        "prompt": {
            "tokens_estimate": call.prompt_tokens_estimate,
            "media_tokens": {} if call.media is None else {str(kind): count for kind, count in call.media.by_kind},
            "blocks": len(call.fingerprint),
            "block_bytes": BLOCK_BYTES,
            "canonical_steps": call.canonical_steps,
            "diff": _diff(as_sent, call),
            "fingerprint": _fingerprints(as_sent, call),
            "seconds": round(explanation.seconds, 6),
        },
        "candidates": [
            {
                "deployment": candidate.deployment.name,
                "cost_seconds": round(candidate.cost_seconds, 4),
                "matched_tokens": candidate.matched_tokens,
                "reason": candidate.reason,
                "fallback": candidate.deployment.name not in explanation.own,
                "unavailable": _unavailable(candidate, explanation.now),
            }
            for candidate in explanation.candidates
        ],
        "prefill": None if (prefill := explanation.prefill) is None else {
            "deployment": prefill.deployment.name, "matched_tokens": prefill.matched_tokens,
            "ttft_seconds": round(prefill.ttft_seconds, 4),
        },
        "why": _why(explanation),
    }  # fmt: skip


def _diff(as_sent: Call, call: Call) -> list[str]:
    """A unified diff of the two bodies, with one line for each value and for each line of a text."""
    before, after = ([*_lines("", msgspec.json.decode(join_fields(c.fields)))] for c in (as_sent, call))
    lines = list(difflib.unified_diff(before, after, "as sent", "canonical", lineterm="", n=1))
    more = len(lines) - MAX_DIFF_LINES
    return lines if more <= 0 else [*lines[:MAX_DIFF_LINES], f"and {more} more lines"]


def _lines(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _lines(f"{path}.{key}" if path else key, item)
    elif isinstance(value, list) and value:
        for i, item in enumerate(value):
            yield from _lines(f"{path}[{i}]", item)
    elif isinstance(value, str):
        for line in value.split("\n"):
            yield f"{path}: {line}"
    else:
        yield f"{path}: {msgspec.json.encode(value).decode()}"


def _fingerprints(as_sent: Call, call: Call) -> dict[str, Any]:
    """The prefix fingerprints with and without canonicalisation, in blocks of 16 hex digits."""
    before, after = ([f"{block:016x}" for block in c.fingerprint] for c in (as_sent, call))
    pairs = zip(before, after, strict=False)
    equal = next((i for i, (b, a) in enumerate(pairs) if b != a), min(len(before), len(after)))
    return {"as_sent": before, "canonical": after, "equal_blocks": equal}


def _unavailable(candidate: Candidate, now: float) -> str | None:
    """Why other deployments are preferred whatever they cost; None if that is not so."""
    deployment = candidate.deployment
    if not deployment.is_deprioritised(now):
        return None
    return deployment.unavailable_reason or "failed recently, or asked for a pause"


def _why(explanation: Explanation) -> str:
    winner, *others = explanation.candidates
    if not others:
        return f"{winner.deployment.name} is the only candidate"
    nearest = others[0]
    if winner.deployment.name in explanation.own and nearest.deployment.name not in explanation.own:
        return f"{winner.deployment.name} serves the requested model; {nearest.deployment.name} is a fallback"
    if (reason := _unavailable(nearest, explanation.now)) is not None:
        return f"{winner.deployment.name} is available; {nearest.deployment.name}: {reason}"
    if nearest.cost_seconds == winner.cost_seconds:
        tie = f"{winner.deployment.name} and {nearest.deployment.name} cost the same"
        return f"{tie}; the first one in the policy wins"
    if nearest.cost_seconds < winner.cost_seconds:
        return f"{winner.deployment.name} is preferred by the routing strategy"
    less = nearest.cost_seconds - winner.cost_seconds
    return f"{winner.deployment.name} is predicted to cost {less:.3f} s less than {nearest.deployment.name}"
