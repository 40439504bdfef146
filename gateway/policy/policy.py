"""The whole policy: its parts, and what they must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from typing import Any, Self

from pydantic import Field, model_validator

from gateway.policy.batches import Batches
from gateway.policy.deployments import Deployment, Model
from gateway.policy.fields import Frozen, Name
from gateway.policy.findings import Finding, Path, choices
from gateway.policy.prices import Price, PriceList
from gateway.policy.responses import Responses
from gateway.policy.tenants import Key, Limits, StorageOutage, Tenant
from gateway.policy.traffic import (
    BUILT_IN_CLASSES,
    Cache,
    Canonicalise,
    Diagnosis,
    LatencyClass,
    Routing,
    Rule,
    Tracing,
)


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
    routing: Routing = Field(Routing(), description="How the server of a call is chosen.")
    tracing: Tracing = Field(Tracing(), description="Traces.")
    diagnosis: Diagnosis = Field(Diagnosis(), description="What breaks prefixes, for `warmpath doctor`.")
    responses: Responses = Field(Responses(), description="What /v1/responses keeps.")
    batches: Batches = Field(Batches(), description="The Batch API.")
    storage_outage: StorageOutage = Field(StorageOutage(), description="While the storage does not answer.")
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
        findings = [*_twins(self), *_strangers(self), *_mixed_currencies(self), *_more_than_all(self)]
        if findings:
            raise PolicyNameError(findings)
        return self

    @cached_property
    def currencies(self) -> list[str]:
        """Of all prices, each once."""
        return sorted({price.currency for _, price in _all_prices(self)})

    @cached_property
    def hash(self) -> str:
        """Which policy this is: 16 hex digits over its content, in every receipt and metric."""
        return hashlib.sha256(self.model_dump_json(by_alias=True).encode()).hexdigest()[:16]

    @cached_property
    def stores_responses(self) -> bool:
        """Of any tenant."""
        return any(self.responses_of(tenant).keep != "off" for tenant in self.tenants)

    def responses_of(self, tenant: Tenant) -> Responses:
        return self.responses if tenant.responses is None else tenant.responses

    @cached_property
    def models_by_name(self) -> dict[str, Model]:
        """By name and by alias."""
        return {name: model for model in self.models for name in (model.name, *model.aliases)}

    @cached_property
    def deployments_by_name(self) -> dict[str, Deployment]:
        return {deployment.name: deployment for deployment in self.deployments}

    @cached_property
    def price_lists(self) -> dict[tuple[str, str], PriceList]:
        """By the model that a call asked for and the deployment that answered: the deployment's own prices, or else
        those of the model under which it was reached, which may be a fallback.
        """
        lists = dict[tuple[str, str], PriceList]()
        for asked in self.models:
            for model in (asked, *(self.models_by_name[name] for name in asked.fallbacks)):
                for name in model.deployments:
                    prices = self.deployments_by_name[name].price or model.price
                    lists.setdefault((asked.name, name), PriceList(prices))
        return lists

    @cached_property
    def signing_models(self) -> frozenset[str]:
        """Models that a server of Anthropic's may answer, and another one, too: what the one has signed the other must
        not be sent.
        """
        return frozenset(name for name, spoken in self._spoken.items() if "anthropic" in spoken and len(spoken) > 1)

    @cached_property
    def breakpoint_models(self) -> frozenset[str]:
        """Models that a server may answer that heeds a client's breakpoints (`gateway.core.cache_breakpoints`)."""
        return frozenset(name for name, spoken in self._spoken.items() if "anthropic" in spoken)

    @cached_property
    def _spoken(self) -> dict[str, set[str]]:
        """The dialects of the servers that may answer each model, its fallbacks' included."""
        return {
            model.name: {
                self.deployments_by_name[deployment].provider
                for each in (model, *(self.models_by_name[name] for name in model.fallbacks))
                for deployment in each.deployments
            }
            for model in self.models
        }

    @cached_property
    def cache_prices(self) -> dict[str, PriceList]:
        """What answers from the response cache cost, by the model asked for; free where it is not here."""
        return {model.name: PriceList(model.cache_price) for model in self.models if model.cache_price}

    @cached_property
    def prices_by_model(self) -> dict[str, tuple[Price, ...]]:
        """The different prices that a call for a model may come to cost, its fallbacks' included."""
        found: dict[str, dict[Price, None]] = {model.name: {} for model in self.models}
        for (asked, _), prices in self.price_lists.items():
            found[asked].update(dict.fromkeys(prices.prices))
        return {name: tuple(prices) for name, prices in found.items()}

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
    for place, price in _all_prices(policy):
        yield from _unknown("class", price.latency_class or (), classes, (*place, "class"))
    for i, rule in enumerate(policy.rules):
        yield from _unknown("class", [rule.latency_class], classes, ("rules", i, "class"))
        yield from _unknown("model", rule.match.model or (), models, ("rules", i, "match", "model"))
        yield from _unknown("tenant", rule.match.tenant or (), tenants, ("rules", i, "match", "tenant"))
    for i, exception in enumerate(policy.canonicalise.exceptions):
        yield from _unknown("tenant", exception.tenant or (), tenants, ("canonicalise", "exceptions", i, "tenant"))
        yield from _unknown("model", exception.model or (), canonical, ("canonicalise", "exceptions", i, "model"))
    yield from _unknown("class", [policy.default_class], classes, ("default_class",))
    yield from _unknown("class", [policy.batches.latency_class], classes, ("batches", "class"))
    for i, tenant in enumerate(policy.tenants):
        yield from _unknown("model", tenant.models or (), models, ("tenants", i, "models"))
        for j, key in enumerate(tenant.keys):
            yield from _unknown("model", key.models or (), models, ("tenants", i, "keys", j, "models"))
            yield from _unknown("class", key.classes or (), classes, ("tenants", i, "keys", j, "classes"))
        for j, part in enumerate(tenant.limits.parts):
            place = ("tenants", i, "limits", "parts", j, "match")
            yield from _unknown("model", part.match.model or (), models, (*place, "model"))
            yield from _unknown("class", part.match.latency_class or (), classes, (*place, "class"))


def _all_prices(policy: Policy) -> Iterator[tuple[Path, Price]]:
    for place, prices in (
        *((("deployments", i, "price"), d.price) for i, d in enumerate(policy.deployments)),
        *((("models", i, "price"), m.price) for i, m in enumerate(policy.models)),
        *((("models", i, "cache_price"), m.cache_price) for i, m in enumerate(policy.models)),
    ):
        for number, price in enumerate(prices):
            yield (*place, number), price


def _mixed_currencies(policy: Policy) -> Iterator[Finding]:
    """A budget is one amount: it can not be held against prices in several currencies."""
    if len(policy.currencies) > 1:
        for place, limits in _all_limits(policy):
            if limits.budget:
                message = f"a budget needs all prices in one currency; there are {' and '.join(policy.currencies)}"
                yield (*place, "budget"), message


def _more_than_all(policy: Policy) -> Iterator[Finding]:
    """Shares that no server could give."""
    shares = {name: each.min_share for name, each in policy.classes.items() if each.min_share}
    if sum(shares.values()) > 1.0:
        place = ("classes", max(shares, key=lambda name: shares[name]), "min_share")
        yield place, f"the min_share of {', '.join(shares)} add up to more than 100%"


def _all_limits(policy: Policy) -> Iterator[tuple[Path, Limits]]:
    for i, tenant in enumerate(policy.tenants):
        yield ("tenants", i, "limits"), tenant.limits
        for j, part in enumerate(tenant.limits.parts):
            yield ("tenants", i, "limits", "parts", j), part
        for j, key in enumerate(tenant.keys):
            if key.limits is not None:
                yield ("tenants", i, "keys", j, "limits"), key.limits


def _unknown(what: str, names: Collection[str], known: Collection[str], path: Path) -> Iterator[Finding]:
    for name in names:
        if name not in known:
            yield path, f"there is no {what} {name!r}; {choices(name, known)}"
