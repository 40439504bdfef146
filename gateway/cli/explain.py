"""`warmpath explain`: shows how the gateway would handle a request, and why, without sending it.

The request, and before it those of `--after`, go through the gateway's own canonicaliser and router with a policy from
a file (`gateway.explanation`). `--json` prints the result, and `_print_explanation` formats it.
"""

from __future__ import annotations

import asyncio
import enum
import json
from pathlib import Path
from typing import Annotated, Any

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
from gateway.explanation import Explainer
from gateway.policy import Policy, Tenant
from gateway.providers import make_provider
from gateway.providers.transport import HTTPTransport
from gateway.routing import STRATEGIES
from gateway.routing.router import Router
from gateway.server.policy_checks import ANYWHERE
from gateway.types import Principal

app = verb_app()

EndpointPath = enum.StrEnum("EndpointPath", {endpoint.path.upper(): endpoint.path for endpoint in ENDPOINTS})  # type: ignore[misc]
CHAT = EndpointPath(ChatEndpoint.path)


@app.command()
def explain(
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Policy file.")],
    request: Annotated[
        Path, typer.Option(metavar="FILE", exists=True, dir_okay=False, help="File with the request's JSON body.")
    ],
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Tenant of the request. Default: the policy's first.")
    ] = None,
    key: Annotated[str, typer.Option(metavar="ID", help="Id of the API key.")] = "explain",
    header: Annotated[
        list[str] | None, typer.Option(metavar="HEADER", help="Request header, as in 'x-team: search'. Repeatable.")
    ] = None,
    endpoint: Annotated[EndpointPath, typer.Option(help="Endpoint, below /v1/.")] = CHAT,
    after: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Requests sent before, in order. Their prompts are cached.",
        ),
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
    transport = HTTPTransport()  # unused, as is the API key: nothing is sent
    fleet = Fleet(lambda deployment: make_provider(deployment, transport, lambda key: ""))
    fleet.apply(policy)
    secret = settings_or_exit().key_pepper.get_secret_value().encode()
    explainer = Explainer(policy, fleet, Router(fleet, STRATEGIES), secret)
    endpoint = next(endpoint for endpoint in ENDPOINTS if endpoint.path == path)
    for body in bodies:
        try:
            explanation = explainer.explain(endpoint, body, headers, principal)
        except GatewayError as error:
            fail(f"rejected with status {error.status} {error.code or error.type}: {error.message}")
        explanation.candidates[0].deployment.cache.add(explanation.call.fingerprint)
    return explanation.json


def _print_explanation(explanation: dict[str, Any]) -> None:
    model, rule, prompt = explanation["model"], explanation["rule"], explanation["prompt"]
    alias = f" (alias of {model['served']})" if model["asked"] != model["served"] else ""
    print_line(f"model   {model['asked']}{alias}")
    if rule is None:
        print_line("rule    no rule matches")
    else:
        print_line(f"rule    rule {rule['index'] + 1} matches {json.dumps(rule['match'])}: class {rule['class']}")
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
    if (prefill := explanation["prefill"]) is not None:
        print_line(f"{prefill['deployment']} computes the prompt before, since it has the role prefill")


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
