"""Checks across the sections of a policy: names that are used twice or do not exist, and contradicting values."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from gateway.policy.findings import Finding, Path, choices
from gateway.policy.hierarchy import check_hierarchy
from gateway.policy.prices import Price
from gateway.policy.roles import check_roles
from gateway.policy.tenants import Limits
from gateway.policy.wildcards import STAR, star_part

if TYPE_CHECKING:
    from gateway.policy.policy import Policy


def find_contradictions(policy: Policy) -> list[Finding]:
    """Return everything that is wrong with a policy whose sections are valid separately."""
    return [
        *_duplicate_names(policy), *_unknown_names(policy), *_wildcard_findings(policy), *_mixed_currencies(policy),
        *_excessive_shares(policy), *check_hierarchy(policy.tenants), *_names_of_discovered_servers(policy),
        *_media_without_hosts(policy), *check_roles(policy),
    ]  # fmt: skip


def _duplicate_names(policy: Policy) -> Iterator[Finding]:
    """Find names that are used twice. Names and aliases of models share one namespace."""
    named: dict[str, list[tuple[str, Path]]] = {
        "deployment": [(d.name, ("deployments", i, "name")) for i, d in enumerate(policy.deployments)],
        "model": [
            (name, path)
            for i, model in enumerate(policy.models)
            for name, path in (
                (model.name, ("models", i, "name")),
                *((alias, ("models", i, "aliases", j)) for j, alias in enumerate(model.aliases)),
            )
        ],
        "hook": [(hook.name, ("hooks", i, "name")) for i, hook in enumerate(policy.hooks)],
        "tenant": [(t.name, ("tenants", i, "name")) for i, t in enumerate(policy.tenants)],
        "key": [
            (key.id, ("tenants", i, "keys", j, "id"))
            for i, tenant in enumerate(policy.tenants)
            for j, key in enumerate(tenant.keys)
        ],
        **{
            f"part of {tenant.name}": [
                (part.match.label, ("tenants", i, "limits", "parts", j, "match"))
                for j, part in enumerate(tenant.limits.parts)
            ]
            for i, tenant in enumerate(policy.tenants)
        },
    }
    for what, names in named.items():
        seen: set[str] = set()
        for name, path in names:
            if name in seen:
                yield path, f"the {what} name {name!r} is used twice"
            seen.add(name)


def _names_of_discovered_servers(policy: Policy) -> Iterator[Finding]:
    """Find deployments with names as TEMPLATE/SERVER, which servers that the template finds may have."""
    templates = {deployment.name for deployment in policy.deployments if deployment.source is not None}
    for i, deployment in enumerate(policy.deployments):
        template = deployment.name.rpartition("/")[0]
        if template in templates:
            message = f"{deployment.name!r} can be the name of a server that {template!r} finds; choose another name"
            yield ("deployments", i, "name"), message


def _media_without_hosts(policy: Policy) -> Iterator[Finding]:
    """Find deployments for which media are fetched although no host is allowed."""
    for i, deployment in enumerate(policy.deployments):
        if deployment.media_urls == "fetch" and not policy.media_fetch.hosts:
            yield ("deployments", i, "media_urls"), "fetch needs media_fetch.hosts, which names no host"


def _unknown_names(policy: Policy) -> Iterator[Finding]:
    """Find references to deployments, models, classes and tenants that do not exist.

    Key ids are not checked, because keys may be in the storage.
    """
    deployments = [d.name for d in policy.deployments]
    canonical = [m.name for m in policy.models]
    models = [name for m in policy.models for name in (m.name, *m.aliases)]
    classes, tenants = list(policy.classes), [t.name for t in policy.tenants]
    for i, model in enumerate(policy.models):
        yield from _unknown("deployment", model.deployments, deployments, ("models", i, "deployments"))
        yield from _unknown("deployment of it", model.weights or (), model.deployments, ("models", i, "weights"))
        if model.mirror is not None:
            yield from _unknown(
                "deployment", [model.mirror.deployment], deployments, ("models", i, "mirror", "deployment")
            )
        others = [name for name in canonical if name != model.name]
        yield from _unknown("other model", model.fallbacks, others, ("models", i, "fallbacks"))
        for reason, names in model.fallbacks_when:
            yield from _unknown("other model", names, others, ("models", i, "fallbacks_when", reason))
    for path, price in all_prices(policy):
        yield from _unknown("class", price.latency_class or (), classes, (*path, "class"))
    for i, rule in enumerate(policy.rules):
        yield from _unknown("class", [rule.latency_class], classes, ("rules", i, "class"))
        yield from _unknown("model", _absent(policy, rule.match.model), models, ("rules", i, "match", "model"))
        yield from _unknown("tenant", rule.match.tenant or (), tenants, ("rules", i, "match", "tenant"))
    for i, route in enumerate(policy.model_routes):
        yield from _unknown("model", _absent(policy, route.targets), canonical, ("model_routes", i, "to"))
        yield from _unknown("model", _absent(policy, route.match.model), models, ("model_routes", i, "match", "model"))
        yield from _unknown("deployment", route.deployments or (), deployments, ("model_routes", i, "deployments"))
        yield from _unknown("tenant", route.match.tenant or (), tenants, ("model_routes", i, "match", "tenant"))
    for i, exception in enumerate(policy.canonicalise.exceptions):
        yield from _unknown("tenant", exception.tenant or (), tenants, ("canonicalise", "exceptions", i, "tenant"))
        yield from _unknown("model", exception.model or (), canonical, ("canonicalise", "exceptions", i, "model"))
    for i, hook in enumerate(policy.hooks):
        yield from _unknown("tenant", hook.tenants or (), tenants, ("hooks", i, "tenants"))
        yield from _unknown("model", _absent(policy, hook.models), models, ("hooks", i, "models"))
    yield from _unknown("class", [policy.default_class], classes, ("default_class",))
    yield from _unknown("class", [policy.batches.latency_class], classes, ("batches", "class"))
    for i, tenant in enumerate(policy.tenants):
        yield from _unknown("model", _absent(policy, tenant.models), models, ("tenants", i, "models"))
        for j, key in enumerate(tenant.keys):
            yield from _unknown("model", _absent(policy, key.models), models, ("tenants", i, "keys", j, "models"))
            yield from _unknown("class", key.classes or (), classes, ("tenants", i, "keys", j, "classes"))
        for j, part in enumerate(tenant.limits.parts):
            path = ("tenants", i, "limits", "parts", j, "match")
            yield from _unknown("model", part.match.model or (), models, (*path, "model"))
            yield from _unknown("class", part.match.latency_class or (), classes, (*path, "class"))


def _absent(policy: Policy, names: Collection[str] | None) -> list[str]:
    """The names that no entry has and no pattern matches, and the patterns that match no entry."""
    return [
        name
        for name in names or ()
        if policy.find_model(name) is None and not any(star_part(name, each) for each in policy.models_by_name)
    ]


def _wildcard_findings(policy: Policy) -> Iterator[Finding]:
    """Find patterns with several `*`, aliases that are patterns, and names that would leave a `*` without a meaning."""
    known = policy.deployments_by_name
    for i, deployment in enumerate(policy.deployments):
        if deployment.model.count(STAR) > 1:
            yield ("deployments", i, "model"), f"{deployment.model!r} has more than one *"
    for i, model in enumerate(policy.models):
        if model.name.count(STAR) > 1:
            yield ("models", i, "name"), f"{model.name!r} has more than one *"
        for j, alias in enumerate(model.aliases):
            if STAR in alias:
                yield ("models", i, "aliases", j), f"an alias cannot have a *; make {alias!r} a model of its own"
        used = (model, *(m for name in model.all_fallbacks if (m := policy.models_by_name.get(name)) is not None))
        for name in (name for each in used for name in each.deployments):
            if name in known and STAR in known[name].model and not policy.wildcard_part(model.name):
                message = f"the model of {name!r} has a *, which {model.name!r} gives no meaning"
                yield ("models", i, "deployments"), message
    for i, route in enumerate(policy.model_routes):
        if any(STAR in name for name in route.targets) and not all(STAR in name for name in route.match.model or ("",)):
            yield ("model_routes", i, "to"), "a target with a * needs match.model with names that have one"
        for name in route.targets:
            target = policy.find_model(name)
            if target is not None and route.deployments and not set(route.deployments) & set(target.deployments):
                yield ("model_routes", i, "deployments"), f"{name!r} has none of these deployments"


def all_prices(policy: Policy) -> Iterator[tuple[Path, Price]]:
    for path, prices in (
        *((("deployments", i, "price"), d.price) for i, d in enumerate(policy.deployments)),
        *((("models", i, "price"), m.price) for i, m in enumerate(policy.models)),
        *((("models", i, "cache_price"), m.cache_price) for i, m in enumerate(policy.models)),
    ):
        for number, price in enumerate(prices):
            yield (*path, number), price


def _mixed_currencies(policy: Policy) -> Iterator[Finding]:
    """Find budgets in a policy whose prices have several currencies. A budget is an amount in only one currency.

    Also finds tenants with a currency into which the policy cannot convert every price.
    """
    for path, limits in _all_limits(policy):
        tenant = policy.tenants_by_name[policy.tenants[_index(path)].name]
        if limits.budget and len(policy.currencies) > 1 and tenant.currency is None:
            message = f"a budget needs all prices in one currency, not in {' and '.join(policy.currencies)}"
            yield (*path, "budget"), message
    known = {(rate.base, rate.quote) for rate in policy.exchange_rates}
    for i, tenant in enumerate(policy.tenants):
        for currency in policy.currencies if tenant.currency is not None else ():
            if currency != tenant.currency and (currency, tenant.currency) not in known:
                message = f"there is no exchange rate from {currency}, which prices use, to {tenant.currency}"
                yield ("tenants", i, "currency"), message


def _index(path: Path) -> int:
    """The number of the tenant to whose limits a path leads."""
    number = path[1]
    assert isinstance(number, int)
    return number


def _excessive_shares(policy: Policy) -> Iterator[Finding]:
    """Find minimum shares of latency classes that add up to more than 100%."""
    shares = {name: each.min_share for name, each in policy.classes.items() if each.min_share}
    if sum(shares.values()) > 1.0:
        path = ("classes", max(shares, key=lambda name: shares[name]), "min_share")
        yield path, f"the min_share values of {', '.join(shares)} add up to more than 100%"


def _all_limits(policy: Policy) -> Iterator[tuple[Path, Limits]]:
    for i, tenant in enumerate(policy.tenants):
        yield ("tenants", i, "limits"), tenant.limits
        if tenant.limits.end_users is not None:
            yield ("tenants", i, "limits", "end_users"), tenant.limits.end_users
        for j, part in enumerate(tenant.limits.parts):
            yield ("tenants", i, "limits", "parts", j), part
        for j, key in enumerate(tenant.keys):
            if key.limits is not None:
                yield ("tenants", i, "keys", j, "limits"), key.limits


def _unknown(what: str, names: Collection[str], known: Collection[str], path: Path) -> Iterator[Finding]:
    for name in names:
        if name not in known:
            yield path, f"there is no {what} {name!r}; {choices(name, known)}"
