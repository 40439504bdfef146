"""The routing policy as frozen models: what is allowed and what is preferred. Where things are is `settings`' part.

A policy is validated whole before it takes effect and is never changed afterwards: a reload makes a new one, and a
call keeps the one it began with. Every field has a description; the JSON Schema and the reference page are made of
them. Unknown keys are errors. Reading files, with line numbers in the messages, is `policy_file`'s part.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gateway.money import PRICE_DECIMALS, atoms_per_token

Path = tuple[str | int, ...]
"""Where something stands in a policy: keys and list indices, as in ("models", 0, "aliases", 1)."""

Finding = tuple[Path, str]
"""What is wrong, and where."""

Check = Callable[["Policy"], Iterable[Finding]]
"""A further judgement on a policy, by a part of the gateway that knows more than its models do."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_DURATION_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKMG]?)")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_COUNT_FACTOR = {"": 1, "k": 1_000, "K": 1_000, "M": 1_000_000, "G": 1_000_000_000}


def parse_duration(value: Any) -> Any:
    """`10s`, `250ms`, `5m`, `24h`, `7d` -> seconds; a number is taken as seconds."""
    if not isinstance(value, str | bool):  # a bool is a number to Python, and an oversight in a policy
        return value
    match = _DURATION.fullmatch(str(value).strip())
    if match is None:
        raise ValueError("a duration is a number and a unit, as in 250ms, 10s, 5m, 24h or 7d")
    return float(match[1]) * _DURATION_SECONDS[match[2]]


def parse_count(value: Any) -> Any:
    """`600`, `64k`, `1.5M` -> an integer (decimal multiples)."""
    if not isinstance(value, str | bool):
        return value
    match = _COUNT.fullmatch(str(value).strip())
    count = Decimal(match[1]) * _COUNT_FACTOR[match[2]] if match else None
    if count is None or count != int(count):
        raise ValueError("a count is a whole number, with k, M or G where wanted, as in 600, 64k or 1M")
    return int(count)


def parse_rate(value: Any) -> Any:
    """`600/1m` -> {amount: 600, period: 60.0}."""
    if not isinstance(value, str | int | float):
        return value
    amount, slash, period = str(value).partition("/")
    if not slash:
        raise ValueError("a rate is a count per duration, as in 600/1m or 1M/1m")
    return {"amount": parse_count(amount), "period": parse_duration(period)}


def parse_share(value: Any) -> Any:
    """`10%` -> 0.1; a number is taken as it is."""
    if not isinstance(value, str | bool):
        return value
    match = _PERCENT.fullmatch(str(value).strip())
    if match is None:
        raise ValueError("a share is a percentage or a number from 0 to 1, as in 10% or 0.1")
    return float(match[1]) / 100


def one_is_a_list(value: Any) -> Any:
    """`flex` means `[flex]`."""
    return [value] if isinstance(value, str) else value


_Duration = Annotated[str, Field(pattern=r"^\d+(\.\d+)?\s*(ms|s|m|h|d)$")]
_Multiple = Annotated[str, Field(pattern=r"^\d+(\.\d+)?[kKMG]?$")]
_Percent = Annotated[str, Field(pattern=r"^\d+(\.\d+)?\s*%$")]

Seconds = Annotated[
    float,
    BeforeValidator(parse_duration, json_schema_input_type=_Duration | Annotated[float, Field(gt=0)]),
    Field(gt=0, allow_inf_nan=False),
]
Count = Annotated[
    int, BeforeValidator(parse_count, json_schema_input_type=_Multiple | Annotated[int, Field(gt=0)]), Field(gt=0)
]
CountOrZero = Annotated[
    int, BeforeValidator(parse_count, json_schema_input_type=_Multiple | Annotated[int, Field(ge=0)]), Field(ge=0)
]
Share = Annotated[
    float,
    BeforeValidator(parse_share, json_schema_input_type=_Percent | Annotated[float, Field(ge=0, le=1)]),
    Field(ge=0, le=1),
]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]  # some go into headers
Names = Annotated[tuple[Name, ...], BeforeValidator(one_is_a_list, json_schema_input_type=Name | tuple[Name, ...])]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class EnvSecret(_Frozen):
    """A secret that stands in the environment, so that policy files can be shown to anyone."""

    env: Name = Field(description="Name of the environment variable that holds the secret.")


class Price(_Frozen):
    """Money per million tokens, as decimals. A cached price left out means: the full input price."""

    input: Decimal = Field(
        ge=0, max_digits=18, decimal_places=PRICE_DECIMALS, description="Per million input tokens that were computed."
    )
    cached_input: Decimal | None = Field(
        None, ge=0, max_digits=18, decimal_places=PRICE_DECIMALS,
        description="Per million input tokens read from a prefix cache.",
    )  # fmt: skip
    output: Decimal = Field(
        Decimal(0), ge=0, max_digits=18, decimal_places=PRICE_DECIMALS,
        description="Per million output tokens, reasoning included.",
    )  # fmt: skip
    currency: str = Field("USD", pattern="^[A-Z]{3}$", description="ISO 4217 code.")
    version: str = Field("1", description="Written into every receipt; change it with the price.")

    @cached_property
    def atoms(self) -> tuple[int, int, int]:
        """What a token costs in `money`'s atoms: computed input, cached input, output."""
        cached_input = self.input if self.cached_input is None else self.cached_input
        return atoms_per_token(self.input), atoms_per_token(cached_input), atoms_per_token(self.output)

    @cached_property
    def texts(self) -> tuple[str, str | None, str]:
        """The three prices as receipts have them, per million tokens and without exponents."""
        cached_input = None if self.cached_input is None else f"{self.cached_input:f}"
        return f"{self.input:f}", cached_input, f"{self.output:f}"


class Deployment(_Frozen):
    """A configured target: one server, one model on it."""

    name: Name = Field(description="How receipts, metrics and headers name it.")
    provider: Name = Field("openai", description="The dialect it speaks: openai, warmpath, vllm.")
    base_url: str = Field(pattern=r"^https?://", description="The OpenAI-compatible base URL, /v1 included.")
    model: Name = Field(description="The model's name on that server.")
    max_concurrency: Count = Field(64, description="Calls that it is sent at the same time, at most.")
    api_key: EnvSecret | None = Field(None, description="The key it is called with.")
    price: Price | None = Field(None, description="What its tokens cost; without one, receipts say unpriced.")
    cache_tokens: Count = Field(
        262_144, description="First guess of how many tokens its prefix cache holds, until replies teach better."
    )
    prefill_tokens_per_second: Count = Field(
        2_000, description="First guess of its prefill speed, until replies teach better."
    )


class Model(_Frozen):
    """A name that clients ask for, and where it is served."""

    name: Name = Field(description="The model id that clients send.")
    aliases: tuple[Name, ...] = Field((), description="Further names for it.")
    deployments: tuple[Name, ...] = Field(min_length=1, description="Where it is served, by deployment name.")
    fallbacks: tuple[Name, ...] = Field((), description="Models tried, in order, when none of its deployments answers.")


class LatencyClass(_Frozen):
    """How long a call may take, and how it queues. Time limits start when the request has been read."""

    ttft: Seconds = Field(60.0, description="Until the first chunk of the answer.")
    inter_token: Seconds = Field(30.0, description="Between two chunks of a stream.")
    total: Seconds = Field(600.0, description="Until the end of the answer.")
    max_queue: CountOrZero = Field(200, description="Calls that may wait for a deployment pool; one more is refused.")
    max_wait: Seconds = Field(10.0, description="How long a call may wait for its turn.")
    priority: int = Field(0, description="Lower goes first; engines that know priorities are told.")


def _lower_names(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


class Match(_Frozen):
    """Conditions on a call; all that are given must hold. One name may stand without its list."""

    model: Names | None = Field(None, description="The model asked for is one of these.")
    tenant: Names | None = Field(None, description="The tenant is one of these.")
    key: Names | None = Field(None, description="The key id is one of these.")
    service_tier: Names | None = Field(None, description="The body's service_tier is one of these.")
    header: Annotated[dict[str, str], AfterValidator(_lower_names)] | None = Field(
        None, description="Each header has exactly this value; names in any case."
    )
    metadata: dict[str, str] | None = Field(None, description="Each key of the body's metadata has this value.")
    min_prompt_tokens: Count | None = Field(None, description="The prompt has at least so many tokens (estimated).")


class Rule(_Frozen):
    """The first rule that matches decides a call's latency class."""

    match: Match = Field(description="Which calls; {} is all of them.")
    latency_class: Name = Field(alias="class", description="The latency class that it gives.")


class Canonicalise(_Frozen):
    level: Literal["off", "safe"] = Field(
        "safe", description="safe: transforms that provably leave the prompt's tokens as they are (P0)."
    )


class Cache(_Frozen):
    """The exact response cache: equal requests of one tenant (or key) are answered from memory."""

    ttl: Seconds = Field(600.0, description="How long an answer is kept.")
    scope: Literal["off", "tenant", "key"] = Field("tenant", description="Who shares answers. off: nobody.")
    when: Literal["deterministic", "always"] = Field(
        "deterministic", description="deterministic: only calls with temperature 0 or a seed, and embeddings."
    )
    max_answer_bytes: Count = Field(1_000_000, description="Longer answers are not kept.")


class Rate(_Frozen):
    amount: Count = Field(description="How much.")
    period: Seconds = Field(description="Per how long.")


class Budget(_Frozen):
    amount: Decimal = Field(gt=0, description="Money that may be spent per period, in the currency of the prices.")
    per: Literal["day", "month", "total"] = Field("month", description="Calendar period, UTC.")


_PerPeriod = Annotated[str, Field(pattern=r"^\d+(\.\d+)?[kKMG]?/\d+(\.\d+)?\s*(ms|s|m|h|d)$")]
RateField = Annotated[Rate, BeforeValidator(parse_rate, json_schema_input_type=_PerPeriod | Rate)]


class Limits(_Frozen):
    """What a tenant may use. What is left out is unlimited."""

    requests: RateField | None = Field(None, description="Requests, as in 600/1m.")
    tokens: RateField | None = Field(None, description="Tokens, input and output together, as in 1M/1m.")
    concurrency: Count | None = Field(None, description="Calls in flight at the same time.")
    budget: Budget | None = Field(None, description="Money.")
    default_output_tokens: Count = Field(
        1024, description="Output tokens reserved for a call that sets no max_tokens; settled to the truth afterwards."
    )

    @property
    def any(self) -> bool:
        return bool(self.requests or self.tokens or self.concurrency or self.budget)


class Key(_Frozen):
    id: str = Field(pattern="^[a-z0-9][a-z0-9_]{0,62}$", description="Public part of the key wp-<id>-<secret>.")
    hash: str = Field(pattern="^hmac-sha256:[0-9a-f]{64}$", description="As `warmpath keys hash` prints it.")
    models: tuple[Name, ...] | None = Field(None, description="Models that this key may use; left out: all.")


class Tenant(_Frozen):
    name: Name = Field(description="Who is billed.")
    keys: tuple[Key, ...] = Field((), description="Keys kept in this file; others are kept in the storage.")
    models: tuple[Name, ...] | None = Field(None, description="Models that the tenant may use; left out: all.")
    limits: Limits = Field(Limits(), description="What it may use.")


class Tracing(_Frozen):
    sample: Share = Field(1.0, description="Share of requests traced when the caller has not decided.")


class Policy(_Frozen):
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


BUILT_IN_CLASSES: dict[str, dict[str, Any]] = {
    "realtime": {"ttft": 60.0, "inter_token": 30.0, "total": 600.0, "max_queue": 200, "max_wait": 10.0, "priority": 0},
    "batch": {
        "ttft": 3600.0,
        "inter_token": 300.0,
        "total": 86400.0,
        "max_queue": 100_000,
        "max_wait": 3600.0,
        "priority": 10,
    },
}


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


def choices(given: str, known: Collection[str]) -> str:
    """What could have been meant: `known: a, b; did you mean 'b'?`"""
    close = difflib.get_close_matches(given, known, n=1)
    listed = ", ".join(sorted(known)) or "none"
    return f"known: {listed}" + (f"; did you mean {close[0]!r}?" if close else "")


__all__ = [
    "BUILT_IN_CLASSES", "Budget", "Check", "Deployment", "EnvSecret", "Finding", "Key", "LatencyClass", "Limits",
    "Match", "Model", "Path", "Policy", "PolicyNameError", "Price", "Rate", "Rule", "Tenant", "choices",
]  # fmt: skip
