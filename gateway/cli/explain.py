"""`warmpath explain`: shows how the gateway would handle a request, and why, without sending it.

The request, and before it those of `--after`, go through the gateway's own canonicaliser and router with a policy from
a file. The result is one JSON-like dictionary (`_explanation`), which `--json` prints and `_print_explanation` formats.
"""

from __future__ import annotations

import asyncio
import difflib
import enum
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from gateway.cli.common import (
    AsJson,
    fail,
    policy_or_exit,
    print_json,
    print_line,
    print_table,
    settings_or_exit,
    verb_app,
)
from gateway.core.errors import GatewayError
from gateway.deployments.fleet import Fleet
from gateway.endpoints import ENDPOINTS
from gateway.endpoints.chat import ChatEndpoint
from gateway.policy import Policy, Tenant
from gateway.policy.traffic import Canonicalise
from gateway.prefix.fingerprint import BLOCK_BYTES
from gateway.prompts.canonicaliser import Canonicaliser, join_fields, new_call_id
from gateway.providers import make_provider
from gateway.providers.transport import HTTPTransport
from gateway.routing import STRATEGIES
from gateway.routing.base import Candidate
from gateway.routing.router import Router
from gateway.server.policy_checks import ANYWHERE
from gateway.types import Call, Principal, Trace

app = verb_app()

MAX_DIFF_LINES = 200

EndpointPath = enum.StrEnum("EndpointPath", {endpoint.path.upper(): endpoint.path for endpoint in ENDPOINTS})  # type: ignore[misc]
CHAT = EndpointPath(ChatEndpoint.path)


@app.command()
def explain(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Policy file.")],
    request: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="File with the request's JSON body.")],
    tenant: Annotated[str | None, typer.Option(help="Tenant of the request. Default: the policy's first.")] = None,
    key: Annotated[str, typer.Option(help="Id of the API key.")] = "explain",
    header: Annotated[
        list[str] | None, typer.Option(help="Request header, as in 'x-team: search'. Repeatable.")
    ] = None,
    endpoint: Annotated[EndpointPath, typer.Option(help="Endpoint, below /v1/.")] = CHAT,
    after: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Requests sent before, in order. Their prompts are cached."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain how the gateway would handle a request.

    Shows the rule that matches it, its latency class, what canonicalisation changes in its body and prefix, the
    candidate deployments with their predicted cost, and which one wins. Nothing is sent. Deployments are assumed idle
    and their caches empty, except for the requests of --after.
    """
    policy = policy_or_exit(file, checks=ANYWHERE)
    principal = Principal(_tenant(policy, tenant), key)
    headers = dict(_header(line) for line in header or [])
    bodies = [path.read_bytes() for path in (*(after or []), request)]
    explanation = asyncio.run(_explain(policy, principal, headers, endpoint, bodies))
    if as_json:
        print_json(explanation)
    else:
        _print_explanation(explanation)


async def _explain(
    policy: Policy, principal: Principal, headers: dict[bytes, bytes], path: EndpointPath, bodies: list[bytes]
) -> dict[str, Any]:
    """Pass all bodies through the gateway's canonicaliser and router. The result describes the last one."""
    secret = settings_or_exit().key_pepper.get_secret_value().encode()
    canonicaliser = Canonicaliser(secret)
    transport = HTTPTransport()  # unused, as is the API key: nothing is sent
    fleet = Fleet(lambda deployment: make_provider(deployment, transport, lambda key: ""))
    fleet.apply(policy)
    router = Router(fleet, STRATEGIES)
    endpoint = next(endpoint for endpoint in ENDPOINTS if endpoint.path == path)
    context: dict[str, Any] = {
        "call_id": new_call_id(), "principal": principal,
        "now": asyncio.get_running_loop().time(), "trace": Trace(trace_id=1, parent_span_id=0, sampled=False),
    }  # fmt: skip
    for body in bodies:
        started = time.perf_counter()
        try:
            call = canonicaliser.canonicalise(endpoint, body, headers, policy=policy, **context)
        except GatewayError as error:
            fail(f"rejected with status {error.status} {error.code or error.type}: {error.message}")
        seconds = time.perf_counter() - started
        candidates = router.order(call)
        if not candidates:
            refusal = next(filter(None, (s.provider.unsupported_error(call) for s in fleet.deployments_of(call.model))))
            fail(f"rejected with status {refusal.status}: {refusal}")
        candidates[0].deployment.cache.add(call.fingerprint)
    untouched = policy.model_copy(update={"canonicalise": Canonicalise(level="off")})
    as_sent = Canonicaliser(secret).canonicalise(endpoint, bodies[-1], headers, policy=untouched, **context)
    return _explanation(policy, call, as_sent, candidates, seconds)


def _explanation(
    policy: Policy, call: Call, as_sent: Call, candidates: list[Candidate], seconds: float
) -> dict[str, Any]:
    rule = None if call.class_rule is None else policy.rules[call.class_rule]
    return {
        "model": {"asked": call.asked_model, "served": call.model.name},
        "rule": None if rule is None else {
            "index": call.class_rule, "match": rule.match.model_dump(exclude_none=True), "class": rule.latency_class,
        },
        "class": call.class_name,
        "prompt": {
            "tokens_estimate": call.prompt_tokens_estimate,
            "media_tokens": {} if call.media is None else dict(call.media.by_kind),
            "blocks": len(call.fingerprint),
            "block_bytes": BLOCK_BYTES,
            "canonical_steps": call.canonical_steps,
            "diff": _diff(as_sent, call),
            "fingerprint": _fingerprints(as_sent, call),
            "seconds": round(seconds, 6),
        },
        "candidates": [
            {
                "deployment": candidate.deployment.name,
                "cost_seconds": round(candidate.cost_seconds, 4),
                "matched_tokens": candidate.matched_tokens,
                "reason": candidate.reason,
            }
            for candidate in candidates
        ],
        "why": _why(candidates),
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


def _why(candidates: list[Candidate]) -> str:
    winner, *others = candidates
    if not others:
        return f"{winner.deployment.name} is the only candidate"
    nearest = others[0]
    if nearest.cost_seconds == winner.cost_seconds:
        tie = f"{winner.deployment.name} and {nearest.deployment.name} cost the same"
        return f"{tie}; the first one in the policy wins"
    if nearest.cost_seconds < winner.cost_seconds:
        return f"{winner.deployment.name} serves the requested model; {nearest.deployment.name} is a fallback"
    less = nearest.cost_seconds - winner.cost_seconds
    return f"{winner.deployment.name} is predicted to cost {less:.3f} s less than {nearest.deployment.name}"


def _print_explanation(explanation: dict[str, Any]) -> None:
    model, rule, prompt = explanation["model"], explanation["rule"], explanation["prompt"]
    alias = f" (alias of {model['served']})" if model["asked"] != model["served"] else ""
    print_line(f"model   {model['asked']}{alias}")
    if rule is None:
        print_line("rule    no rule matches")
    else:
        print_line(f"rule    rule {rule['index'] + 1} matches {rule['match']}: class {rule['class']}")
    print_line(f"class   {explanation['class']}")
    steps = ", ".join(prompt["canonical_steps"]) or "already canonical"
    media = "".join(f", {tokens} of {kind.replace('_', ' ')}" for kind, tokens in prompt["media_tokens"].items())
    print_line(
        f"prompt  about {prompt['tokens_estimate']} tokens{media}, "
        f"{prompt['blocks']} blocks of {prompt['block_bytes']} bytes; {steps}"
    )
    if prompt["canonical_steps"]:
        _print_changes(prompt["diff"], prompt["fingerprint"])
    print_line()
    print_table(
        ("", "DEPLOYMENT", "PREDICTED COST", "REASON"),
        [
            ("wins" if not i else "", c["deployment"], f"{c['cost_seconds']:.3f} s", c["reason"])
            for i, c in enumerate(explanation["candidates"])
        ],
    )
    print_line()
    print_line(explanation["why"])


def _print_changes(diff: list[str], prints: dict[str, Any]) -> None:
    before, after, equal = prints["as_sent"], prints["canonical"], prints["equal_blocks"]
    if not diff:
        print_line("body    same content as sent, different bytes")
    if before == after:
        print_line("prefix  same as sent")
    elif equal < min(len(before), len(after)):
        print_line(f"prefix  block {equal + 1} of {len(after)}: {after[equal]}, as sent {before[equal]}")
    else:
        print_line(f"prefix  {len(after)} blocks, as sent {len(before)}")
    if diff:
        print_line()
    for line in diff:
        print_line(line, style={"+": "green", "-": "red"}.get(line[:1], ""))


def _tenant(policy: Policy, name: str | None) -> Tenant:
    if name is None:
        return policy.tenants[0]
    if name not in policy.tenants_by_name:
        fail(f"there is no tenant {name!r}; known: {', '.join(policy.tenants_by_name)}")
    return policy.tenants_by_name[name]


def _header(line: str) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(":")
    if not colon:
        fail(f"a header must have the form 'name: value', not {line!r}")
    return name.strip().lower().encode(), value.strip().encode()


__all__ = ["app"]
