"""`Policy`, the root model of a policy file: all sections, lookup tables, and checks across sections.

The models of the sections are in the other modules of this package. The lookup tables (`models_by_name`, `price_lists`
and others) are computed on first use and cached, since a policy never changes. The checks across sections are in
`checks`. A policy that they reject raises one `PolicyNameError` with all findings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Self

from pydantic import Field, model_validator

from gateway.core.native_requests import PASSED_HEADERS
from gateway.policy.batches import Batches
from gateway.policy.checks import all_prices, find_contradictions
from gateway.policy.cors import CORS
from gateway.policy.deployments import Deployment, Model
from gateway.policy.fields import Frozen, Name
from gateway.policy.findings import Finding
from gateway.policy.hierarchy import with_ancestors
from gateway.policy.hooks import Hook
from gateway.policy.hosted_tools import HostedTools
from gateway.policy.idempotency import IdempotencyKeys
from gateway.policy.media import Media
from gateway.policy.media_fetch import MediaFetch
from gateway.policy.media_formulas import MediaFormula
from gateway.policy.model_routes import ModelRoute
from gateway.policy.passthrough import PassedPaths
from gateway.policy.price_bounds import PriceBounds
from gateway.policy.prices import Price, PriceList
from gateway.policy.responses import Responses
from gateway.policy.sign_in import SignIn
from gateway.policy.tenant_prices import ExchangeRate, Terms, find_terms
from gateway.policy.tenants import Key, StorageOutage, Tenant
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
from gateway.policy.wildcards import STAR, star_part

REGIONAL_LISTS_MAX = 1_024  # price lists by region, of one policy
KNOWN_PRICES_MAX = 10_000  # of one policy: triples of a model, a deployment and a region
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
    sign_in: SignIn | None = Field(
        None,
        description="OpenID Connect provider through which people sign in to the dashboard. Default: admin keys only.",
    )
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
    media_fetch: MediaFetch = Field(
        MediaFetch(), description="Media by URL that the gateway fetches for deployments whose API takes no URLs."
    )
    hooks: tuple[Hook, ...] = Field(
        (), description="Python functions that see requests and answers, in this order, for example to mask texts."
    )
    cors: CORS = Field(CORS(), description="Web pages that may call the gateway from a browser.")
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
        findings = find_contradictions(self)
        if findings:
            raise PolicyNameError(findings, self)
        return self

    @cached_property
    def currencies(self) -> list[str]:
        """The currencies of all prices, sorted, each once."""
        return sorted({price.currency for _, price in all_prices(self)})

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
    def _wildcards(self) -> list[Model]:
        """Models whose names have a `*`, the longest name first."""
        return sorted((model for model in self.models if STAR in model.name), key=lambda model: -len(model.name))

    def find_model(self, name: str) -> Model | None:
        """Return the model with a name or alias, else the one with the longest matching pattern."""
        if (model := self.models_by_name.get(name)) is not None or not self._wildcards:
            return model
        return next((model for model in self._wildcards if star_part(model.name, name) is not None), None)

    def wildcard_part(self, name: str) -> str:
        """Return what the `*` of the longest matching pattern stands for in a model's name or alias; "" without one.

        An exact entry beside a pattern, for example with a price of its own, has a part, too.
        """
        if not self._wildcards:
            return ""
        if (exact := self.models_by_name.get(name)) is not None:
            name = exact.name
        parts = (star_part(model.name, name) for model in self._wildcards)
        return next((part for part in parts if part is not None), "")

    @cached_property
    def routed_models(self) -> dict[tuple[int, str], Model]:
        """Models that have fewer deployments, because a route names them, by the route's index and the model's name."""
        found = {}
        for index, route in enumerate(self.model_routes):
            for model in self.models if route.deployments is not None else ():
                kept = tuple(name for name in model.deployments if name in (route.deployments or ()))
                if kept:
                    found[index, model.name] = model.model_copy(update={"deployments": kept})
        return found

    @cached_property
    def deployments_by_name(self) -> dict[str, Deployment]:
        return {deployment.name: deployment for deployment in self.deployments}

    def deployment(self, name: str) -> Deployment | None:
        """The entry of a deployment's name: its own, or the template of a discovered one (`TEMPLATE/SERVER`)."""
        entry = self.deployments_by_name.get(name)
        if entry is None and "/" in name:
            entry = self.deployments_by_name.get(name.rpartition("/")[0])
            return entry if entry is not None and entry.source is not None else None
        return entry

    def prices_of(self, model: str, deployment: str, region: str | None = None) -> PriceList | None:
        """The prices of a requested model at the deployment that answered.

        `region` is the deployment's own, which counts if it is discovered and its template does not fix the region.
        """
        known, key = self._known_prices, (model, deployment, region)
        if (prices := known.get(key)) is not None:
            return prices
        entry = self.deployment(deployment)
        if entry is None:
            return None
        prices = self.price_lists.get((model, entry.name))
        if prices is not None:
            if entry.name in self._templates_in_regions:
                prices = self._regional_prices(model, entry.name, region)
            if len(known) >= KNOWN_PRICES_MAX:
                known.clear()
            known[key] = prices
        return prices

    @cached_property
    def _known_prices(self) -> dict[tuple[str, str, str | None], PriceList]:
        """What `prices_of` has found, by its arguments."""
        return {}

    @cached_property
    def _templates_in_regions(self) -> frozenset[str]:
        """Templates whose servers have their own regions."""
        return frozenset(entry.name for entry in self.deployments if entry.has_regions)

    def possible_price_lists(self, model: str, entry: str) -> list[PriceList]:
        """The price lists that calls may get at an entry of `deployments`: one, or one for each region."""
        prices = self.price_lists[model, entry]
        if entry not in self._templates_in_regions:
            return [prices]
        regions = {region for price in prices.prices for region in price.region or ()}
        return [self._regional_prices(model, entry, region) for region in (None, *sorted(regions))]

    def _regional_prices(self, model: str, template: str, region: str | None) -> PriceList:
        """The prices of a template's servers in one region."""
        key = (model, template, region)
        found = self._price_lists_by_region.get(key)
        if found is None:
            if len(self._price_lists_by_region) >= REGIONAL_LISTS_MAX:
                self._price_lists_by_region.clear()
            prices = self.price_lists[model, template].prices
            applicable = PriceList(price for price in prices if price.region is None or region in price.region)
            found = self._price_lists_by_region[key] = applicable
        return found

    @cached_property
    def _price_lists_by_region(self) -> dict[tuple[str, str, str | None], PriceList]:
        return {}

    @cached_property
    def price_lists(self) -> dict[tuple[str, str], PriceList]:
        """Prices by (requested model, answering deployment).

        A deployment's own prices apply first. If it has none, the prices of the model through which the call reached
        the deployment apply. That model may be a fallback of the requested one. The list of a template whose servers
        have their own regions has the prices of all regions.
        """
        lists = dict[tuple[str, str], PriceList]()
        for asked in self.models:
            for model in (asked, *(self.models_by_name[name] for name in asked.all_fallbacks)):
                for name in model.deployments:
                    deployment = self.deployments_by_name[name]
                    prices = [
                        price
                        for price in deployment.price or model.price
                        if price.region is None or deployment.has_regions or deployment.region in price.region
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
    def native_models(self) -> dict[str, frozenset[str]]:
        """By API format of clients, the models with a deployment that has this API itself (`Deployment.native`).

        None if a hook reads answers, because hooks read answers of chats only.
        """
        if any(hook.after is not None for hook in self.hooks):
            return {api: frozenset() for api in PASSED_HEADERS}
        return {
            api: frozenset(
                model.name
                for model in self.models
                for each in (model, *(self.models_by_name[name] for name in model.all_fallbacks))
                if any(api in self.deployments_by_name[name].native_apis for name in each.deployments)
            )
            for api in PASSED_HEADERS
        }

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
        known, currency = self._constant_terms, price.form.currency
        if (terms := known.get((tenant, currency))) is not None:
            return terms
        owner = self.tenants_by_name.get(tenant)
        adjustments, own_currency = (owner.pricing, owner.currency) if owner is not None else ((), None)
        found = find_terms(
            adjustments,
            self.exchange_rates,
            currency=own_currency,
            price_currency=currency,
            model=model,
            class_name=class_name,
            time_ns=time_ns,
        )
        if owner is not None and found is not None and not adjustments and own_currency in (None, currency):
            known[tenant, currency] = found  # the same for all models and times
        return found

    @cached_property
    def _constant_terms(self) -> dict[tuple[str, str], Terms]:
        """The terms of tenants that pay list prices, by tenant and currency of the price."""
        return {}

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
        """The tenants of the policy, each with what it inherits from its ancestors."""
        return with_ancestors(self.tenants)

    @cached_property
    def keys_by_id(self) -> dict[str, tuple[Tenant, Key]]:
        return {key.id: (tenant, key) for tenant in self.tenants_by_name.values() for key in tenant.keys}

    def priced_as(self, tenant: str, parents: Iterable[str]) -> str:
        """The name of the tenant whose prices a call had: its own, or that of the nearest ancestor in the policy.

        For receipts, which name the ancestors, the outermost first.
        """
        return next((name for name in (tenant, *reversed((*parents,))) if name in self.tenants_by_name), tenant)


class PolicyNameError(ValueError):
    """Sections of a policy are valid separately but contradict each other. `policy` is the contradictory policy."""

    def __init__(self, findings: Iterable[Finding], policy: Policy) -> None:
        self.findings = tuple(findings)
        self.policy = policy
        super().__init__("; ".join(f"{'.'.join(map(str, path))}: {message}" for path, message in self.findings))
