"""`Instance`: a server that discovery found. `deployment_of` fills a template's placeholders with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.policy import Deployment
from gateway.policy.deployments import TEMPLATE_FIELDS
from gateway.policy.sources import PLACEHOLDER

NAME_MAX = 120  # characters of an instance's name, which becomes part of a deployment's
MODEL_LABEL = "model"
_UNFIT = re.compile(r"[^A-Za-z0-9._:\[\]-]")  # for names in headers, metrics and file names


class UnusableInstance(ValueError):
    """A template's field has no value for an instance. The message names the instance and the field."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A server that a source has found and that may get requests.

    `identity` is equal as long as it is the same process or pod, also if its address changes: what the gateway has
    learned about its cache then stays valid. Both `name` and `identity` are unique within a source.
    """

    name: str
    identity: str
    host: str
    port: int
    labels: Mapping[str, str] = field(default_factory=dict)
    model: str = ""  # that the server listed; empty without such a request

    @property
    def address(self) -> str:
        """Host and port, as in a URL."""
        return f"{_in_url(self.host)}:{self.port}"


def needs_model(template: Deployment, instance: Instance) -> bool:
    """Whether the server must be asked for its model, because neither policy nor source names it."""
    return "{model}" in template.model and not instance.labels.get(MODEL_LABEL)


def deployment_of(template: Deployment, instance: Instance) -> Deployment:
    """The deployment that a template describes for an instance. Raises `UnusableInstance`."""

    def fill(name: str, text: str) -> str:
        def value(found: re.Match[str]) -> str:
            key = found[1]
            fixed = {
                "host": _in_url(instance.host), "port": str(instance.port), "address": instance.address,
                "name": instance.name, "model": instance.labels.get(MODEL_LABEL) or instance.model,
            }  # fmt: skip
            content = fixed[key] if key in fixed else instance.labels.get(key.removeprefix("label:"), "")
            if not content:
                raise UnusableInstance(f"{instance.name}: {name}: it has no {key.replace(':', ' ')}")
            return content

        return PLACEHOLDER.sub(value, text)

    filled = {
        name: fill(name, text) for name in TEMPLATE_FIELDS if isinstance(text := getattr(template, name), str)
    }  # fmt: skip
    return template.model_copy(update={**filled, "name": f"{template.name}/{fit_name(instance.name)}", "source": None})


def unknown_instance(template: Deployment, name: str, model: str) -> Deployment:
    """A deployment that was discovered before the start and not since then, so that its calls can be billed.

    `model` stands for the model's name if the template does not fix it. The region is not known.
    """
    known = template.model if not PLACEHOLDER.search(template.model) else model
    region = None if template.has_regions else template.region
    return template.model_copy(update={"name": name, "model": known, "region": region, "source": None})


def fit_name(name: str) -> str:
    """An instance's name without characters that are unfit for headers, metrics and file names."""
    return _UNFIT.sub("_", name)[:NAME_MAX]


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
