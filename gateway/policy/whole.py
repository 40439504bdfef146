"""The whole policy: its parts, and what they must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from typing import Any, Self

from pydantic import Field, model_validator

from gateway.policy.batches import Batches
from gateway.policy.fields import Frozen, Name
from gateway.policy.findings import Finding, Path, choices
from gateway.policy.servers import Deployment, Model, Price
from gateway.policy.tenants import Key, Tenant
from gateway.policy.traffic import BUILT_IN_CLASSES, Cache, Canonicalise, LatencyClass, Rule, Tracing


class Policy(Frozen):
    """The whole policy file."""

    deployments: tuple[Deployment, ...] = Field(min_length=1, description="The servers behind the gateway.")
    models: tuple[Model, ...] = Field(min_length=1, description="What clients may ask for.")
    classes: dict[str, LatencyClass] = Field(
        default_factory=dict, description="Latency classes; realtime and batch always exist, and may be changed here."
    )
    default_class: Name = Field("realtime", description="The class of calls that no rule matches.")
    rules: tuple[Rule, ...] = Field((), description="Which calls get which class; the first match decides.")
    canonicalise: Canonicalise = Field(Canonicalise(), description="Making prompts cache-friendly.")
    cache: Cache = Field(Cache(), description="The exact response cache.")
    tracing: Tracing = Field(Tracing(), description="Traces.")
    batches: Batches = Field(Batches(), description="The Batch API.")
    tenants: tuple[Tenant, ...] = Field(min_length=1, description="Who may call.")

    @model_validator(mode="before")
    @classmethod
    def _built_in_classes(cls, value: Any) -> Any:
        """Both always exist; a policy that names one changes only what it says."""
        given = value.get("classes", {}) if isinstance(value, dict) else None
        if not isinstance(given, dict):
            return value
        whole = {
            name: {**defaults, **given[name]} if isinstance(given.get(name), dict) else given.get(name, defaults)
            for name, defaults in BUILT_IN_CLASSES.items()
        }
        return {**value, "classes": {**given, **whole}}

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        """Everything that is named exists, and nothing is named twice."""
        findings = [*_twins(self), *_strangers(self), *_mixed_currencies(self)]
        if findings:
            raise PolicyNameError(findings)
        return self

    @cached_property
    def hash(self) -> str:
        """Which policy this is: 16 hex digits over its content, in every receipt and metric."""
        return hashlib.sha256(self.model_dump_json(by_alias=True).encode()).hexdigest()[:16]

    @cached_property
    def models_by_name(self) -> dict[str, Model]:
        """By name and by alias."""
        return {name: model for model in self.models for name in (model.name, *model.aliases)}

    @cached_property
    def deployments_by_name(self) -> dict[str, Deployment]:
        return {deployment.name: deployment for deployment in self.deployments}

    @cached_property
    def prices_by_model(self) -> dict[str, tuple[Price, ...]]:
        """The different prices that a call for a model may come to cost, its fallbacks' included."""
        reachable = {
            model.name: [model, *(self.models_by_name[name] for name in model.fallbacks)] for model in self.models
        }
        return {
            name: tuple(
                {
                    price: None
                    for model in models
                    for deployment in model.deployments
                    if (price := self.deployments_by_name[deployment].price) is not None
                }
            )
            for name, models in reachable.items()
        }

    @cached_property
    def tenants_by_name(self) -> dict[str, Tenant]:
        return {tenant.name: tenant for tenant in self.tenants}

    @cached_property
    def keys_by_id(self) -> dict[str, tuple[Tenant, Key]]:
        return {key.id: (tenant, key) for tenant in self.tenants for key in tenant.keys}


class PolicyNameError(ValueError):
    """Parts of a policy that are each well formed and do not agree with each other."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(f"{'.'.join(map(str, path))}: {message}" for path, message in self.findings))


def _twins(policy: Policy) -> Iterator[Finding]:
    """Names that are used twice. A model's aliases are names like any other."""
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
        "tenant": [(t.name, ("tenants", i, "name")) for i, t in enumerate(policy.tenants)],
        "key": [
            (key.id, ("tenants", i, "keys", j, "id"))
            for i, tenant in enumerate(policy.tenants)
            for j, key in enumerate(tenant.keys)
        ],
    }
    for what, names in named.items():
        seen: set[str] = set()
        for name, path in names:
            if name in seen:
                yield path, f"the {what} name {name!r} is used twice"
            seen.add(name)


def _strangers(policy: Policy) -> Iterator[Finding]:
    """Names of deployments, models, classes and tenants that do not exist. Keys may be in the storage."""
    deployments = [d.name for d in policy.deployments]
    canonical = [m.name for m in policy.models]
    models = [name for m in policy.models for name in (m.name, *m.aliases)]
    classes, tenants = list(policy.classes), [t.name for t in policy.tenants]
    for i, model in enumerate(policy.models):
        yield from _unknown("deployment", model.deployments, deployments, ("models", i, "deployments"))
        others = [name for name in canonical if name != model.name]
        yield from _unknown("other model", model.fallbacks, others, ("models", i, "fallbacks"))
    for i, rule in enumerate(policy.rules):
        yield from _unknown("class", [rule.latency_class], classes, ("rules", i, "class"))
        yield from _unknown("model", rule.match.model or (), models, ("rules", i, "match", "model"))
        yield from _unknown("tenant", rule.match.tenant or (), tenants, ("rules", i, "match", "tenant"))
    yield from _unknown("class", [policy.default_class], classes, ("default_class",))
    yield from _unknown("class", [policy.batches.latency_class], classes, ("batches", "class"))
    for i, tenant in enumerate(policy.tenants):
        yield from _unknown("model", tenant.models or (), models, ("tenants", i, "models"))
        for j, key in enumerate(tenant.keys):
            yield from _unknown("model", key.models or (), models, ("tenants", i, "keys", j, "models"))


def _mixed_currencies(policy: Policy) -> Iterator[Finding]:
    """A budget is one amount: it can not be held against prices in several currencies."""
    currencies = sorted({d.price.currency for d in policy.deployments if d.price})
    if len(currencies) > 1:
        for i, tenant in enumerate(policy.tenants):
            if tenant.limits.budget:
                yield (
                    ("tenants", i, "limits", "budget"),
                    f"a budget needs all prices in one currency; there are {' and '.join(currencies)}",
                )


def _unknown(what: str, names: Collection[str], known: Collection[str], path: Path) -> Iterator[Finding]:
    for name in names:
        if name not in known:
            yield path, f"there is no {what} {name!r}; {choices(name, known)}"
