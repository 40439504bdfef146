"""`warmpath check`: validates a policy file and summarises it."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from gateway.cli.common import (
    PROBLEM,
    AsJson,
    print_json,
    print_line,
    print_stderr,
    print_table,
    settings_or_exit,
    verb_app,
    warn,
)
from gateway.policy import Deployment, Limits, Policy, TenantLimits
from gateway.policy.file import PolicyError, Problem, load_located, policy_schema, warnings_of
from gateway.policy.located_yaml import LocatedYaml
from gateway.server.policy_checks import ANYWHERE, importable_hooks, shared_caches, usable_tls_files
from gateway.settings import missing_secrets

app = verb_app()


@app.command(no_args_is_help=False)
def check(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Policy file. Default: WARMPATH_POLICY."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of policy files, for editors.")
    ] = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Also ask each deployment for its models, and what it supports, by up to five short chats."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a policy file and summarise it.

    Problems are printed as FILE:LINE:COLUMN: FIELD: MESSAGE. If there are any, the exit code is 1. With --live, a
    deployment that a gateway would eject is a problem, too: it cannot be reached, or its key, URL or model is wrong.
    For the others, --live says whether usage, cached tokens, cache salt, priority, KV events and roles work. Vendors
    bill the chats that it sends.
    """
    if schema:
        typer.echo(policy_schema(), nl=False)
        return
    path = file or settings_or_exit().policy
    try:
        policy, located = load_located(path, checks=ANYWHERE)
    except PolicyError as error:
        if as_json:
            print_json({"ok": False, "problems": [problem._asdict() for problem in error.problems]})
        else:
            count = len(error.problems)
            print_stderr(f"{error}\n{path}: {count} {'problem' if count == 1 else 'problems'}")
        raise typer.Exit(PROBLEM) from None
    warnings = _warnings(path, policy, located)
    live_check = _live_check() if live else None
    results = [] if live_check is None else asyncio.run(live_check.check_live(policy))
    unusable = {each.deployment: each.problem for each in results if each.problem is not None}
    if as_json:
        working = {each.deployment: each.found for each in results if each.problem is None}
        shown = {"unusable": unusable, "live": working} if live else {}
        outline = {**_outline(policy), "warnings": [w._asdict() for w in warnings], **shown}
        print_json({"ok": not unusable, "file": str(path), **outline})
    else:
        for problem in warnings:
            warn(str(problem))
        _print_summary(path, policy)
        if live_check is not None:
            print_line()
            print_table(*live_check.table(results))
    if unusable:
        raise typer.Exit(PROBLEM)


def _live_check() -> ModuleType:
    """The module of `--live`. Imported here, because it imports most of the gateway, which takes long."""
    return importlib.import_module("gateway.cli.live_check")


def _warnings(path: Path, policy: Policy, located: LocatedYaml) -> tuple[Problem, ...]:
    """Findings that may be intended. A secret or a file may be missing here and exist where the gateway runs."""
    missing = warnings_of(path, policy, located, (missing_secrets, usable_tls_files, importable_hooks))
    here = [problem._replace(message=f"{problem.message} here") for problem in missing]
    return (*here, *warnings_of(path, policy, located, (shared_caches,)))


def _outline(policy: Policy) -> dict[str, object]:
    return {
        "hash": policy.hash,
        "deployments": [d.name for d in policy.deployments],
        "roles": {d.name: d.role for d in policy.deployments if d.role is not None},
        "models": [{"name": m.name, "aliases": m.aliases} for m in policy.models],
        "classes": list(policy.classes),
        "rules": len(policy.rules),
        "tenants": [t.name for t in policy.tenants],
    }


def _print_summary(path: Path, policy: Policy) -> None:
    print_line(f"{path}: OK (hash {policy.hash})", style="green")
    print_line()
    print_table(
        ("DEPLOYMENT", "PROVIDER", "URL", "MODEL", "CONCURRENCY", "PRICE PER MILLION"),
        [
            (
                d.name,
                d.provider if d.role is None else f"{d.provider}, {d.role}",
                d.base_url,
                d.model,
                str(d.max_concurrency),
                _price(d, policy),
            )
            for d in policy.deployments
        ],
    )
    print_line()
    print_table(
        ("MODEL", "ALIASES", "DEPLOYMENTS", "FALLBACKS"),
        [(m.name, _names(m.aliases), _names(m.deployments), _names(m.fallbacks)) for m in policy.models],
    )
    print_line()
    print_table(
        ("CLASS", "TTFT", "TOTAL", "MAX WAIT", "MAX QUEUE", "RULES"),
        [
            (
                name + (" (default)" if name == policy.default_class else ""),
                f"{c.ttft:g} s",
                f"{c.total:g} s",
                f"{c.max_wait:g} s",
                str(c.max_queue),
                str(sum(rule.latency_class == name for rule in policy.rules)),
            )
            for name, c in policy.classes.items()
        ],
    )
    print_line()
    print_table(
        ("TENANT", "KEYS IN FILE", "MODELS", "LIMITS"),
        [
            (t.name, _names([k.id for k in t.keys]), "all" if t.models is None else _names(t.models), _limits(t.limits))
            for t in policy.tenants
        ],
    )


def _price(deployment: Deployment, policy: Policy) -> str:
    if not deployment.price:
        by_model = any(model.price for model in policy.models if deployment.name in model.deployments)
        return "by its model" if by_model else "unpriced"
    price, *more = deployment.price
    cached = "" if price.cached_input is None else f", {price.cached_input} cached"
    further = f" (and {len(more)} more)" if more else ""
    return f"{price.input} in{cached}, {price.output} out {price.currency}{further}"


def _limits(limits: TenantLimits) -> str:
    texts = _own_limits(limits)
    texts += [f"{part.match.label}: {', '.join(_own_limits(part)) or 'none'}" for part in limits.parts]
    return ", ".join(texts) or "none"


def _own_limits(limits: Limits) -> list[str]:
    texts = []
    for name in ("requests", "tokens", "input_tokens", "output_tokens"):
        if rate := getattr(limits, name):
            texts.append(f"{rate.amount} {name.replace('_', ' ')} per {rate.period:g} s")
    if limits.concurrency:
        texts.append(f"{limits.concurrency} concurrent")
    if limits.budget:
        texts.append(f"{limits.budget.amount} per {limits.budget.per}".replace("per total", "in total"))
    return texts


def _names(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names) or "-"
