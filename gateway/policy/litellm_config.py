"""Converts the configuration of LiteLLM's proxy (`config.yaml`) to a policy, and reports what was not carried over.

The format is that of LiteLLM's documentation: `model_list` has deployments, grouped by the name that clients send;
`litellm_settings` and `router_settings` have fallbacks and aliases. Everything that is not converted is in the report,
by its path, with what to do instead if there is something.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from gateway.policy.litellm_prices import UnreadablePrices, as_policy, prices_of
from gateway.policy.litellm_providers import CHAT_FIELDS, PROVIDERS, REPLACEMENTS, Vendor
from gateway.policy.wildcards import STAR

Json = dict[str, Any]
FROM_ENVIRONMENT = "os.environ/"
TENANT = "default"  # of the policy that is written
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
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
        self._variables = _mapping(config.get("environment_variables"))
        self.omitted: list[Omitted] = []
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
            self._add_settings(_mapping(self._config.get(section)), section)
        for name in _mapping(self._config.get("general_settings")):
            self._omit(f"general_settings.{name}", REPLACEMENTS.get(name, ""))
        for name in self._variables:
            self._omit(f"environment_variables.{name}", "set it in the gateway's environment")
        for section in self._config.keys() - {*_SECTIONS}:
            self._omit(section, REPLACEMENTS.get(section, ""))
        models = list(self._models.values())
        return {"deployments": self._deployments, "models": models, "tenants": [{"name": TENANT}]}

    def _omit(self, path: str, advice: str = "") -> None:
        self.omitted.append(Omitted(path, advice or "a policy has nothing like it"))

    def _add(self, entry: Any, path: str) -> None:
        """Add one entry of `model_list`: a deployment, and the model that it serves."""
        params = _mapping(_mapping(entry).get("litellm_params"))
        name, served = _mapping(entry).get("model_name"), params.get("model")
        if not isinstance(name, str) or not isinstance(served, str):
            self._omit(path, "it has no model_name or no litellm_params.model")
            return
        kind, model = _vendor_and_model(served, params.get("custom_llm_provider"))
        vendor = PROVIDERS.get(kind)
        if vendor is None:
            self._omit(path, f"there is no provider for {kind}; serve it by LiteLLM behind the gateway")
            return
        base_url = self._base_url(vendor, params.get("api_base") or params.get("base_url"), f"{path}.litellm_params")
        if base_url is None:
            return
        deployment: Json = {"name": self._name(name), "provider": vendor.provider, "base_url": base_url, "model": model}
        reader = _Params(self, params, f"{path}.litellm_params", vendor)
        deployment |= reader.fields()
        self._add_info(deployment, {**params, **_mapping(entry.get("model_info"))}, f"{path}.model_info")
        for extra in entry.keys() - {"model_name", "litellm_params", "model_info"}:
            self._omit(f"{path}.{extra}")
        self._deployments.append(deployment)
        found = self._models.setdefault(name, {"name": name, "deployments": []})
        found["deployments"].append(deployment["name"])
        if isinstance(weight := params.get("weight"), int | float) and weight > 0:
            self._weights.setdefault(name, {})[deployment["name"]] = weight

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
                self._omit(f"{path}.api_base", f"write the value of {variable} into it: a base_url is no secret")
                return None
        if not isinstance(url, str) or not url:
            self._omit(f"{path}.api_base", "is needed for this vendor")
            return None
        return vendor.url(url)

    def _add_info(self, deployment: Json, info: Json, path: str) -> None:
        """Add the price of `model_info` or of the parameters, where LiteLLM allows it, too."""
        costs = {key: Decimal(str(value)) for key, value in info.items() if "cost" in key and _is_number(value)}
        try:
            prices, ignored = prices_of(costs, version="litellm")
        except UnreadablePrices as error:
            self._omit(path, str(error))
            return
        if prices:
            deployment["price"] = as_policy(prices)
        for name in ignored:
            self._omit(f"{path}.{name}")

    def _add_settings(self, settings: Json, path: str) -> None:
        for name, value in settings.items():
            where = f"{path}.{name}"
            if name in _FALLBACKS:
                for entry in value or ():
                    for model, others in _mapping(entry).items():
                        self._add_fallbacks(model, others, _FALLBACKS[name], f"{where}.{model}")
            elif name == "default_fallbacks":
                for model in self._models:
                    self._add_fallbacks(model, [other for other in value if other != model], (), where)
            elif name == "model_group_alias":
                for alias, target in _mapping(value).items():
                    self._add_alias(alias, target, f"{where}.{alias}")
            else:
                self._omit(where, REPLACEMENTS.get(name, ""))

    def _add_fallbacks(self, model: str, others: Any, when: tuple[str, ...], path: str) -> None:
        names = [other for other in others if isinstance(other, str) and other in self._models]
        for other in others:
            if other not in names:
                self._omit(path, f"{other!r} is not a model of the policy")
        targets = list(self._models) if model == STAR else [model]
        for target in targets:
            if target not in self._models:
                self._omit(path, f"{target!r} is not a model of the policy")
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
        if name not in self._models or alias in self._models:
            self._omit(path, f"{name!r} is not a model of the policy, or {alias!r} is one already")
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
            yield "headers", {header: self._secret(text, path) for header, text in _mapping(value).items()}
        elif name == "organization":
            yield "headers", {"OpenAI-Organization": self._secret(value, path)}
        elif name in ("rpm", "tpm") and _is_number(value):
            yield "plan", {"requests" if name == "rpm" else "tokens": f"{int(value)}/1m"}
        elif name == "max_parallel_requests":
            yield "max_concurrency", value
        elif name == "region_name":
            yield "region", value
        elif name in CHAT_FIELDS:
            yield "defaults", {name: value}
        elif name == "extra_body":
            yield "overrides", _mapping(value)
        elif name == "additional_drop_params":
            yield "leave_out", list(value)
        else:
            self._conversion._omit(path, REPLACEMENTS.get(name, ""))

    def _key(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        secret = self._secret(value, path)
        if isinstance(secret, dict):
            yield "api_key", secret
        elif str(value).lower() not in ("none", "fake-key", "empty", "anything", ""):
            variable = self._vendor.key or "UPSTREAM_API_KEY"
            self._conversion._omit(path, f"is written in the file; set the environment variable {variable} instead")
            yield "api_key", {"env": variable}

    def _secret(self, value: Any, path: str) -> Any:
        """A reference to an environment variable, or the value itself."""
        text = str(value)
        return {"env": text.removeprefix(FROM_ENVIRONMENT)} if text.startswith(FROM_ENVIRONMENT) else text


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


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
