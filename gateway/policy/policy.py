"""`Policy`, the root model of a policy file: all sections, lookup tables, and checks across sections.

The models of the sections are in the other modules of this package. The lookup tables (`models_by_name`, `price_lists`
and others) are computed on first use and cached, since a policy never changes. The checks at the end of this module
find names that are used twice, names that do not exist, and values that contradict each other. They raise one
`PolicyNameError` with all findings.
"""

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
from gateway.policy.hosted_tools import HostedTools
from gateway.policy.idempotency import IdempotencyKeys
from gateway.policy.media import Media
from gateway.policy.media_formulas import MediaFormula
from gateway.policy.model_routes import ModelRoute
from gateway.policy.passthrough import PassedPaths
from gateway.policy.price_bounds import PriceBounds
from gateway.policy.prices import Price, PriceList
from gateway.policy.responses import Responses
from gateway.policy.tenant_prices import ExchangeRate, Terms, find_terms
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
from gateway.policy.webhooks import Webhook

HASH_DIGITS = 16  # of the SHA-256 of a policy's JSON


class Policy(Frozen):
    """The complete content of a policy file."""

    deployments: tuple[Deployment, ...] = Field(min_length=1, description="Inference servers behind the gateway.")
    models: tuple[Model, ...] = Field(min_length=1, description="Models that clients can request.")
    classes: dict[str, LatencyClass] = Field(
        default_factory=dict, description="Latency classes. realtime and batch always exist and can be changed here."
    )
    default_class: Name = Field("realtime", description="Latency class of calls that no rule matches.")
    rules: tuple[Rule, ...] = Field((), description="Rules that assign latency classes. The first match decides.")
    model_routes: tuple[ModelRoute, ...] = Field(
        (), description="Routes that send calls to another model than the named one. The first match decides."
    )
    canonicalise: Canonicalise = Field(Canonicalise(), description="Changes of prompts that make prefixes cacheable.")
    cache: Cache = Field(Cache(), description="Exact response cache.")
    routing: Routing = Field(Routing(), description="How the deployment of a call is chosen.")
    tracing: Tracing = Field(Tracing(), description="Sampling of traces.")
    diagnosis: Diagnosis = Field(Diagnosis(), description="Diagnosis of broken prefixes, for `warmpath doctor`.")
    responses: Responses = Field(Responses(), description="Stored responses of /v1/responses.")
    idempotency: IdempotencyKeys = Field(IdempotencyKeys(), description="Requests with an Idempotency-Key header.")
    batches: Batches = Field(Batches(), description="Batch API.")
    storage_outage: StorageOutage = Field(StorageOutage(), description="Behaviour while the storage is unavailable.")
    webhooks: tuple[Webhook, ...] = Field((), description="Receivers of warnings about budgets.")
    exchange_rates: tuple[ExchangeRate, ...] = Field(
        (), description="Rates for tenants whose `currency` is not that of the prices, with their dates."
    )
    hosted_tools: HostedTools = Field(
        {"web_search": "drop"},
        description="What happens to tools that only a vendor's servers can run, by their type, in requests to "
        "/v1/responses. drop: the model is not offered the tool, and a reply header says so. refuse: a 400. Types that "
        "are not named are refused.",
    )
    passthrough: PassedPaths = Field(
        (), description="Further paths whose requests pass unchanged to a deployment of the named model, as in /v1/ocr."
    )
    tenants: tuple[Tenant, ...] = Field(min_length=1, description="Tenants that may call.")

    @model_validator(mode="before")
    @classmethod
    def _built_in_classes(cls, value: Any) -> Any:
        """Add the built-in classes. A policy that names one of them overrides only the fields that it sets."""
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
        """Run the checks across sections. Raises `PolicyNameError`."""
        findings = [
            *_duplicate_names(self), *_unknown_names(self), *_mixed_currencies(self), *_excessive_shares(self)
        ]  # fmt: skip
        if findings:
            raise PolicyNameError(findings, self)
        return self

    @cached_property
    def currencies(self) -> list[str]:
        """The currencies of all prices, sorted, each once."""
        return sorted({price.currency for _, price in _all_prices(self)})

    @cached_property
    def hash(self) -> str:
        """Hash of the policy's content, 16 hex digits. Recorded in every receipt and in `warmpath_policy_info`."""
        return hashlib.sha256(self.model_dump_json(by_alias=True).encode()).hexdigest()[:HASH_DIGITS]

    @cached_property
    def stores_responses(self) -> bool:
        """True if responses of any tenant are stored."""
        return any(self.responses_of(tenant).keep != "off" for tenant in self.tenants)

    def responses_of(self, tenant: Tenant) -> Responses:
        """Return the settings for a tenant's stored responses: the tenant's own, or else the policy's."""
        return self.responses if tenant.responses is None else tenant.responses

    @cached_property
    def models_by_name(self) -> dict[str, Model]:
        """Models by name and by alias."""
        return {name: model for model in self.models for name in (model.name, *model.aliases)}

    @cached_property
    def deployments_by_name(self) -> dict[str, Deployment]:
        return {deployment.name: deployment for deployment in self.deployments}

    @cached_property
    def price_lists(self) -> dict[tuple[str, str], PriceList]:
        """Prices by (requested model, answering deployment).

        A deployment's own prices apply first. If it has none, the prices of the model through which the call reached
        the deployment apply. That model may be a fallback of the requested one.
        """
        lists = dict[tuple[str, str], PriceList]()
        for asked in self.models:
            for model in (asked, *(self.models_by_name[name] for name in asked.all_fallbacks)):
                for name in model.deployments:
                    deployment = self.deployments_by_name[name]
                    prices = [
                        price
                        for price in deployment.price or model.price
                        if price.region is None or deployment.region in price.region
                    ]
                    lists.setdefault((asked.name, name), PriceList(prices))
        return lists

    @cached_property
    def signing_models(self) -> frozenset[str]:
        """Models that may be answered both by Anthropic and by another provider.

        Signed reasoning from Anthropic must not be sent to the other provider.
        """
        return frozenset(name for name, used in self._providers.items() if "anthropic" in used and len(used) > 1)

    @cached_property
    def breakpoint_models(self) -> frozenset[str]:
        """Models with a deployment that obeys cache breakpoints of clients (`gateway.core.cache_breakpoints`)."""
        return frozenset(name for name, used in self._providers.items() if "anthropic" in used)

    @cached_property
    def _providers(self) -> dict[str, set[str]]:
        """The providers of all deployments that may answer each model, including those of its fallbacks."""
        return {
            model.name: {
                self.deployments_by_name[deployment].provider
                for each in (model, *(self.models_by_name[name] for name in model.all_fallbacks))
                for deployment in each.deployments
            }
            for model in self.models
        }

    def terms(self, tenant: str, price: Price, *, model: str, class_name: str, time_ns: int) -> Terms | None:
        """Return what a tenant pays in proportion to a price. None if there is no exchange rate for that time."""
        owner = self.tenants_by_name.get(tenant)
        return find_terms(
            owner.pricing if owner is not None else (),
            self.exchange_rates,
            currency=owner.currency if owner is not None else None,
            price_currency=price.currency,
            model=model,
            class_name=class_name,
            time_ns=time_ns,
        )

    def grants_tier(self, tier: str | None, *, tenant: str, class_name: str) -> bool:
        """Whether a service tier may lower the price of a tenant's call."""
        owner, limits = self.tenants_by_name.get(tenant), self.classes.get(class_name)
        return (owner is not None and tier in owner.service_tiers) or (
            limits is not None and tier in limits.service_tiers
        )

    @cached_property
    def price_bounds(self) -> PriceBounds:
        """The dearest prices that calls can meet, for reservations."""
        return PriceBounds(self)

    def max_output_tokens(self, model: Model) -> int:
        """The most output tokens of a call without `max_tokens`: the highest of the model and its fallbacks."""
        used = (model, *(self.models_by_name[name] for name in model.all_fallbacks))
        return max(each.max_output_tokens for each in used)

    @cached_property
    def cache_prices(self) -> dict[str, PriceList]:
        """Prices of answers from the response cache, by requested model. A model that is missing here is free."""
        return {model.name: PriceList(model.cache_price) for model in self.models if model.cache_price}

    @cached_property
    def prices_by_model(self) -> dict[str, tuple[Price, ...]]:
        """All prices that may apply to a call for a model, including those of its fallbacks."""
        found: dict[str, dict[Price, None]] = {model.name: {} for model in self.models}
        for (asked, _), prices in self.price_lists.items():
            found[asked].update(dict.fromkeys(prices.prices))
        return {name: tuple(prices) for name, prices in found.items()}

    @cached_property
    def media_formulas(self) -> dict[str, tuple[MediaFormula, ...]]:
        """How the deployments of each model count media, without duplicates. Those of fallbacks are not included."""
        found: dict[str, dict[MediaFormula, None]] = {}
        for model in self.models:
            deployments = [self.deployments_by_name[name] for name in model.deployments]
            found[model.name] = {
                (each.media or model.media or Media()).formula(each.model, each.provider): None for each in deployments
            }
        return {name: tuple(formulas) for name, formulas in found.items()}

    @cached_property
    def tenants_by_name(self) -> dict[str, Tenant]:
        return {tenant.name: tenant for tenant in self.tenants}

    @cached_property
    def keys_by_id(self) -> dict[str, tuple[Tenant, Key]]:
        return {key.id: (tenant, key) for tenant in self.tenants for key in tenant.keys}


class PolicyNameError(ValueError):
    """Sections of a policy are valid separately but contradict each other. `policy` is the contradictory policy."""

    def __init__(self, findings: Iterable[Finding], policy: Policy) -> None:
        self.findings = tuple(findings)
        self.policy = policy
        super().__init__("; ".join(f"{'.'.join(map(str, path))}: {message}" for path, message in self.findings))


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
        others = [name for name in canonical if name != model.name]
        yield from _unknown("other model", model.fallbacks, others, ("models", i, "fallbacks"))
        for reason, names in model.fallbacks_when:
            yield from _unknown("other model", names, others, ("models", i, "fallbacks_when", reason))
    for path, price in _all_prices(policy):
        yield from _unknown("class", price.latency_class or (), classes, (*path, "class"))
    for i, rule in enumerate(policy.rules):
        yield from _unknown("class", [rule.latency_class], classes, ("rules", i, "class"))
        yield from _unknown("model", rule.match.model or (), models, ("rules", i, "match", "model"))
        yield from _unknown("tenant", rule.match.tenant or (), tenants, ("rules", i, "match", "tenant"))
    for i, route in enumerate(policy.model_routes):
        yield from _unknown("model", [route.to], canonical, ("model_routes", i, "to"))
        yield from _unknown("model", route.match.model or (), models, ("model_routes", i, "match", "model"))
        yield from _unknown("tenant", route.match.tenant or (), tenants, ("model_routes", i, "match", "tenant"))
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
            path = ("tenants", i, "limits", "parts", j, "match")
            yield from _unknown("model", part.match.model or (), models, (*path, "model"))
            yield from _unknown("class", part.match.latency_class or (), classes, (*path, "class"))


def _all_prices(policy: Policy) -> Iterator[tuple[Path, Price]]:
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
        if limits.budget and len(policy.currencies) > 1 and policy.tenants[_index(path)].currency is None:
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
        for j, part in enumerate(tenant.limits.parts):
            yield ("tenants", i, "limits", "parts", j), part
        for j, key in enumerate(tenant.keys):
            if key.limits is not None:
                yield ("tenants", i, "keys", j, "limits"), key.limits


def _unknown(what: str, names: Collection[str], known: Collection[str], path: Path) -> Iterator[Finding]:
    for name in names:
        if name not in known:
            yield path, f"there is no {what} {name!r}; {choices(name, known)}"
