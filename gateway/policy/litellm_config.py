"""Converts the configuration of LiteLLM's proxy (`config.yaml`) to a policy, and reports what was not carried over.

The format is that of LiteLLM's documentation: `model_list` has deployments, grouped by the name that clients send;
`litellm_settings` and `router_settings` have fallbacks and aliases. Everything that is not converted is in the report,
by its path, with what to do instead if there is something. Neither the policy nor the report repeats a secret.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from pydantic import ValidationError

from gateway.policy.deployments import Deployment
from gateway.policy.fields import COUNT_MAX
from gateway.policy.file import findings
from gateway.policy.litellm_prices import UnreadablePrices, as_policy, prices_of
from gateway.policy.litellm_providers import CHAT_FIELDS, PROVIDERS, REPLACEMENTS, Vendor
from gateway.policy.wildcards import STAR

Json = dict[str, Any]
FROM_ENVIRONMENT = "os.environ/"
TENANT = "default"  # of the policy that is written
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_NOT_IN_VARIABLES = re.compile(r"[^A-Z0-9]+")
# Names of headers and fields whose values are secrets.
_SECRET_NAME = re.compile(r"(?:^|[-_])(?:api-?key|auth|authorization|cookie|key|password|secret|token)(?:$|[-_])", re.I)
_SECRET_BEGINNINGS = ("bearer ", "basic ", "sk-")  # of the values of other headers
_PREFIXES = (("claude", "anthropic"), ("gemini", "gemini"), ("command", "cohere_chat"), ("mistral-", "mistral"))
_FALLBACKS = {
    "fallbacks": (),
    "context_window_fallbacks": ("context",),
    "content_policy_fallbacks": ("refused_content",),
}
_SECTIONS = ("model_list", "litellm_settings", "router_settings", "general_settings", "environment_variables")


class UnreadableConfig(Exception):
    """The file is not a configuration of LiteLLM's proxy. The message says why."""


class Omitted(NamedTuple):
    """Something that was not carried over: its path in the file, and what to do instead."""

    path: str
    advice: str


class Converted(NamedTuple):
    """A policy as a YAML file has it, and the report."""

    policy: Json
    omitted: tuple[Omitted, ...]


def convert(config: Any) -> Converted:
    """Convert a parsed file. Raises `UnreadableConfig`."""
    if not isinstance(config, dict) or not isinstance(config.get("model_list"), list):
        raise UnreadableConfig("has no model_list")
    conversion = _Conversion(config)
    policy = conversion.policy()
    if not policy["models"]:
        reasons = "; ".join(f"{path}: {advice}" for path, advice in conversion.omitted[:3])
        raise UnreadableConfig(f"has no model that can be converted ({reasons})")
    return Converted(policy, tuple(dict.fromkeys(conversion.omitted)))


class _Conversion:
    """The state of one conversion."""

    def __init__(self, config: Json) -> None:
        self._config = config
        self.omitted: list[Omitted] = []
        self._variables = self.mapping(config.get("environment_variables"), "environment_variables")
        self._variables_of_secrets: dict[str, str] = {}
        self._names: Counter[str] = Counter()
        self._deployments: list[Json] = []
        self._models: dict[str, Json] = {}
        self._weights: dict[str, dict[str, float]] = {}

    def policy(self) -> Json:
        for number, entry in enumerate(self._config["model_list"]):
            self._add(entry, f"model_list[{number}]")
        for name, weights in self._weights.items():
            if len(self._models[name]["deployments"]) > 1:
                self._models[name]["weights"] = weights
        for section in ("litellm_settings", "router_settings"):
            self._add_settings(self.mapping(self._config.get(section), section), section)
        for name in self.mapping(self._config.get("general_settings"), "general_settings"):
            self.omit(f"general_settings.{name}", REPLACEMENTS.get(name, ""))
        for name in self._variables:
            self.omit(f"environment_variables.{name}", "set it in the gateway's environment")
        for section in self._config.keys() - {*_SECTIONS}:
            self.omit(section, REPLACEMENTS.get(section, ""))
        models = list(self._models.values())
        return {"deployments": self._deployments, "models": models, "tenants": [{"name": TENANT}]}

    def omit(self, path: str, advice: str = "") -> None:
        """Report something that is not carried over."""
        self.omitted.append(Omitted(path, advice or "a policy has nothing like it"))

    def mapping(self, value: Any, path: str) -> Json:
        """Return a mapping. A value of another type is reported, and counts as an empty one."""
        if isinstance(value, dict):
            return value
        if value is not None:
            self.omit(path, "must be a mapping")
        return {}

    def items(self, value: Any, path: str) -> list[Any]:
        """Return a list. A value of another type is reported, and counts as an empty one."""
        if isinstance(value, list):
            return value
        if value is not None:
            self.omit(path, "must be a list")
        return []

    def variable_of(self, secret: str, preferred: str) -> str:
        """Return the environment variable for a secret that is written in the file: one for each secret."""
        if secret not in self._variables_of_secrets:
            taken, number, name = {*self._variables_of_secrets.values()}, 1, preferred
            while name in taken:
                number += 1
                name = f"{preferred}_{number}"
            self._variables_of_secrets[secret] = name
        return self._variables_of_secrets[secret]

    def _add(self, entry: Any, path: str) -> None:
        """Add one entry of `model_list`: a deployment, and the model that it serves."""
        fields = self.mapping(entry, path)
        where = f"{path}.litellm_params"
        params = self.mapping(fields.get("litellm_params"), where)
        name, served = fields.get("model_name"), params.get("model")
        if not isinstance(name, str) or not isinstance(served, str):
            self.omit(path, "it has no model_name or no litellm_params.model")
            return
        kind, model = _vendor_and_model(served, params.get("custom_llm_provider"))
        vendor = PROVIDERS.get(kind)
        if vendor is None:
            self.omit(path, f"there is no provider for {kind}; serve it by LiteLLM behind the gateway")
            return
        base_url = self._base_url(vendor, params.get("api_base") or params.get("base_url"), where)
        if base_url is None:
            return
        given: Json = {"name": self._name(name), "provider": vendor.provider, "base_url": base_url, "model": model}
        given |= _Params(self, params, where, vendor).fields()
        info = self.mapping(fields.get("model_info"), f"{path}.model_info")
        self._add_prices(given, {**params, **info}, f"{path}.model_info")
        for extra in fields.keys() - {"model_name", "litellm_params", "model_info"}:
            self.omit(f"{path}.{extra}")
        if (deployment := self._valid(given, where)) is None:
            return
        self._deployments.append(deployment)
        found = self._models.setdefault(name, {"name": name, "deployments": []})
        found["deployments"].append(deployment["name"])
        weight = params.get("weight")
        if isinstance(weight, int | float) and _is_number(weight) and weight > 0:
            self._weights.setdefault(name, {})[deployment["name"]] = weight
        elif weight is not None:
            self.omit(f"{where}.weight", "must be a positive number")

    def _valid(self, deployment: Json, path: str) -> Json | None:
        """Return the deployment without the fields that are invalid in a policy. None if it needs one of them."""
        try:
            Deployment.model_validate(deployment)
        except ValidationError as error:
            wrong = list(findings(error, Deployment))
        else:
            return deployment
        for where, message in wrong:
            self.omit(path, f"{'.'.join(map(str, where)) or 'the deployment'}: {message}")
        names = {str(where[0]) for where, _ in wrong if where}
        if not names or names & {"name", "provider", "base_url", "model"}:
            return None
        return self._valid({name: value for name, value in deployment.items() if name not in names}, path)

    def _name(self, model: str) -> str:
        """A name for a deployment of a model that no other has."""
        name = _NOT_IN_NAMES.sub("-", model.replace(STAR, "all")).strip("-") or "model"
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name}-{self._names[name]}"

    def _base_url(self, vendor: Vendor, given: Any, path: str) -> str | None:
        """The deployment's base URL, or None, which is reported."""
        url = given if given is not None else vendor.base_url
        if isinstance(url, str) and url.startswith(FROM_ENVIRONMENT):
            variable = url.removeprefix(FROM_ENVIRONMENT)
            url = self._variables.get(variable)
            if url is None:
                self.omit(f"{path}.api_base", f"write the value of {variable} into it: a base_url is no secret")
                return None
        if not isinstance(url, str) or not url:
            self.omit(f"{path}.api_base", "is needed for this vendor")
            return None
        try:
            parts = urlsplit(url)
        except ValueError:
            self.omit(f"{path}.api_base", "is not a URL")
            return None
        host = parts.netloc.rpartition("@")[2]
        if host != parts.netloc or parts.query:
            self.omit(f"{path}.api_base", "its user, password and query may be secrets; use `headers` or `query`")
            url = urlunsplit((parts.scheme, host, parts.path, "", ""))
        return vendor.url(url)

    def _add_prices(self, deployment: Json, info: Json, path: str) -> None:
        """Add the prices of `model_info` or of the parameters, where LiteLLM allows them, too."""
        costs = {}
        for name, value in info.items():
            if "cost" not in name or value is None:
                continue
            if (cost := _decimal(value)) is None:
                self.omit(f"{path}.{name}", "is not a price that a policy can express")
            else:
                costs[name] = cost
        try:
            prices, ignored = prices_of(costs, version="litellm")
        except UnreadablePrices as error:
            self.omit(path, str(error))
            return
        if prices:
            deployment["price"] = as_policy(prices)
        for name in ignored:
            self.omit(f"{path}.{name}")

    def _add_settings(self, settings: Json, path: str) -> None:
        for name, value in settings.items():
            where = f"{path}.{name}"
            if name in _FALLBACKS:
                for entry in self.items(value, where):
                    for model, others in self.mapping(entry, where).items():
                        self._add_fallbacks(model, others, _FALLBACKS[name], f"{where}.{model}")
            elif name == "default_fallbacks":
                for model in self._models:
                    self._add_fallbacks(model, value, (), where)
            elif name == "model_group_alias":
                for alias, target in self.mapping(value, where).items():
                    self._add_alias(alias, target, f"{where}.{alias}")
            else:
                self.omit(where, REPLACEMENTS.get(name, ""))

    def _add_fallbacks(self, model: str, given: Any, when: tuple[str, ...], path: str) -> None:
        names = []
        for other in self.items(given, path):
            if isinstance(other, str) and other in self._models:
                names.append(other)
            else:  # mappings have the fields of a deployment, among which are secrets
                shown = repr(other) if isinstance(other, str) else "an entry that is not a name"
                self.omit(path, f"{shown} is not a model of the policy")
        targets = list(self._models) if model == STAR else [model]
        for target in targets:
            if target not in self._models:
                self.omit(path, f"{target!r} is not a model of the policy")
                continue
            found = self._models[target]
            kept = [name for name in names if name != target]
            if when:
                found = found.setdefault("fallbacks_when", {})
            if kept:
                field = when[0] if when else "fallbacks"
                found[field] = list(dict.fromkeys([*found.get(field, ()), *kept]))

    def _add_alias(self, alias: str, target: Any, path: str) -> None:
        name = target.get("model") if isinstance(target, dict) else target
        if not isinstance(name, str) or name not in self._models or alias in self._models:
            self.omit(path, f"its target is not a model of the policy, or {alias!r} is one already")
            return
        self._models[name].setdefault("aliases", []).append(alias)


class _Params:
    """Converts one deployment's `litellm_params`."""

    def __init__(self, conversion: _Conversion, params: Json, path: str, vendor: Vendor) -> None:
        self._conversion = conversion
        self._params = params
        self._path = path
        self._vendor = vendor

    def fields(self) -> Json:
        """The deployment's fields, with what is not carried over in the report."""
        fields: Json = {}
        for name, value in self._params.items():
            if value is None or name in _READ or "cost" in name:
                continue
            found = dict(self._fields_of(name, value))
            for key, part in found.items():
                fields[key] = {**fields.get(key, {}), **part} if isinstance(part, dict) else part
        if "api_key" not in self._params and self._vendor.key:
            fields["api_key"] = {"env": self._vendor.key}
        return fields

    def _fields_of(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        path = f"{self._path}.{name}"
        if name == "api_key":
            yield from self._key(value, path)
        elif name == "api_version":
            if self._vendor.provider == "azure":
                yield "query", {"api-version": str(value)}
        elif name in ("extra_headers", "headers"):
            given = self._conversion.mapping(value, path)
            yield "headers", {header: self._header(header, text, f"{path}.{header}") for header, text in given.items()}
        elif name == "organization":
            yield "headers", {"OpenAI-Organization": _reference(value) or str(value)}
        elif name in ("rpm", "tpm") and _is_number(value):
            yield "plan", {"requests" if name == "rpm" else "tokens": f"{int(value)}/1m"}
        elif name in ("rpm", "tpm"):
            self._conversion.omit(path, "must be a number")
        elif name == "max_parallel_requests":
            yield "max_concurrency", value
        elif name == "region_name":
            yield "region", value
        elif name in CHAT_FIELDS:
            yield "defaults", {name: value}
        elif name == "extra_body":
            yield "overrides", self._body_fields(value, path)
        elif name == "additional_drop_params":
            yield "leave_out", self._conversion.items(value, path)
        else:
            self._conversion.omit(path, REPLACEMENTS.get(name, ""))

    def _key(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if (reference := _reference(value)) is not None:
            yield "api_key", reference
        elif str(value).lower() not in ("none", "fake-key", "empty", "anything", ""):
            yield "api_key", self._written(str(value), self._vendor.key or "UPSTREAM_API_KEY", path)

    def _header(self, name: str, value: Any, path: str) -> Any:
        """The value of a header, or a reference to an environment variable if it is a secret."""
        if (reference := _reference(value)) is not None:
            return reference
        if _SECRET_NAME.search(name) is None and not str(value).lower().startswith(_SECRET_BEGINNINGS):
            return str(value)
        return self._written(str(value), "UPSTREAM_" + _NOT_IN_VARIABLES.sub("_", name.upper()), path)

    def _written(self, secret: str, preferred: str, path: str) -> Json:
        """Report a secret that is written in the file. Returns a reference to a variable that is to have it."""
        variable = self._conversion.variable_of(secret, preferred)
        self._conversion.omit(path, f"is written in the file; set the environment variable {variable} instead")
        return {"env": variable}

    def _body_fields(self, value: Any, path: str) -> Json:
        """Return fields of a body, without those that have secrets: in a policy, they cannot refer to a variable."""
        kept = {}
        for name, field in self._conversion.mapping(value, path).items():
            if _SECRET_NAME.search(name):
                self._conversion.omit(f"{path}.{name}", "may be a secret; a policy has secrets in `headers` only")
            else:
                kept[name] = self._body_fields(field, f"{path}.{name}") if isinstance(field, dict) else field
        return kept


# Parameters that `_Conversion` reads.
_READ = frozenset({"model", "api_base", "base_url", "weight", "custom_llm_provider"})


def _vendor_and_model(served: str, given: Any) -> tuple[str, str]:
    """The vendor's name in LiteLLM, and the model's name at the vendor."""
    if isinstance(given, str):
        return given, served.removeprefix(f"{given}/")
    prefix, slash, rest = served.partition("/")
    if slash:
        return prefix, rest
    return next((vendor for start, vendor in _PREFIXES if served.startswith(start)), "openai"), served


def _reference(value: Any) -> Json | None:
    """Return a value that LiteLLM reads from an environment variable, as a policy refers to it."""
    text = value if isinstance(value, str) else ""
    return {"env": text.removeprefix(FROM_ENVIRONMENT)} if text.startswith(FROM_ENVIRONMENT) else None


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a policy may have, so neither infinite nor NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= COUNT_MAX


def _decimal(value: Any) -> Decimal | None:
    """Return a number. Text, too, may be one: YAML 1.1 reads `1e-06` as a text."""
    if not isinstance(value, str) and not _is_number(value):
        return None
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
