"""Policy models of discovery: the source of a template's deployments, and the placeholders of a template's fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gateway.policy.fields import Count, Frozen, Name, Seconds, Secret

INSTANCES_MAX = 4_096
PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
PLACEHOLDERS = ("{host}", "{port}", "{address}", "{name}", "{label:NAME}", "{model}")
_FIXED = frozenset(("host", "port", "address", "name", "model"))

Port = Annotated[int, Field(ge=1, le=65535)]
_KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9.-]{1,253}$")]
_PortName = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,15}$")]


class DnsSource(Frozen):
    """Servers that DNS records name."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,253}$")] = Field(
        description="Domain name, as in vllm.llm.svc.cluster.local, or _http._tcp.vllm.llm.svc.cluster.local for SRV."
    )
    type: Literal["A", "AAAA", "SRV"] = Field("A", description="Record type. SRV records also have the port.")
    port: Port | None = Field(None, description="A and AAAA: port of the servers.")
    refresh: Seconds = Field(30.0, description="Longest time between two lookups. A shorter TTL shortens it.")
    nameservers: tuple[Annotated[str, Field(pattern=r"^\[?[0-9a-fA-F:.]+\]?(:\d+)?$")], ...] = Field(
        (), description="Addresses of DNS servers, as in 10.0.0.10 or 10.0.0.10:53. Default: those of the system."
    )

    @model_validator(mode="after")
    def _has_port(self) -> Self:
        if (self.port is None) != (self.type == "SRV"):
            raise ValueError(
                "port: SRV records have it themselves" if self.type == "SRV" else f"port: {self.type} records need it"
            )
        return self


class KubernetesSource(Frozen):
    """Servers in a Kubernetes cluster: the endpoints of a Service, or pods with given labels or of an InferencePool."""

    service: _KubernetesName | None = Field(None, description="Service whose EndpointSlices are watched.")
    pods: Name | None = Field(None, description="Label selector of pods, as in app=vllm,tier!=test.")
    inference_pool: _KubernetesName | None = Field(
        None, description="InferencePool of the Gateway API (inference.networking.k8s.io/v1) whose pods are watched."
    )
    port: Port | _PortName | None = Field(
        None,
        description="Port of the servers: a number, or its name in the Service or pod. Default: the only port. An "
        "InferencePool has the ports itself.",
    )
    namespace: _KubernetesName | None = Field(None, description="Namespace. Default: the gateway's own.")
    api: Annotated[str, Field(pattern=r"^https?://[^\s]+$")] | None = Field(
        None, description="URL of the API server. Default: that of the cluster in which the gateway runs."
    )
    token: Secret | None = Field(None, description="Bearer token. Default: that of the pod's service account.")
    ca: str | None = Field(
        None,
        min_length=1,
        description="PEM file of the API server's certificate authority. Default: that of the service account.",
    )

    @model_validator(mode="after")
    def _selects_one_kind(self) -> Self:
        if sum(kind is not None for kind in (self.service, self.pods, self.inference_pool)) != 1:
            raise ValueError("must have exactly one of service, pods and inference_pool")
        if self.inference_pool is not None and self.port is not None:
            raise ValueError("port: the InferencePool has the ports itself")
        return self


class Source(Frozen):
    """Where a template's deployments are found: exactly one of `file`, `dns` and `kubernetes`."""

    file: str | None = Field(
        None,
        min_length=1,
        description="JSON or YAML file in the form of Prometheus' file_sd: a list of targets with labels. The label "
        "`name` names a server, `model` its model. A changed file is read within two seconds.",
    )
    dns: DnsSource | None = Field(None, description="DNS records.")
    kubernetes: KubernetesSource | None = Field(
        None, description="Kubernetes EndpointSlices, pods, or the pods of an InferencePool."
    )
    max_instances: Annotated[Count, Field(le=INSTANCES_MAX)] = Field(
        256, description="Most deployments from this source. Further ones are ignored, in the order of names."
    )

    @model_validator(mode="after")
    def _has_one_kind(self) -> Self:
        if sum(kind is not None for kind in (self.file, self.dns, self.kubernetes)) != 1:
            raise ValueError("must have exactly one of file, dns and kubernetes")
        return self


def placeholder_problems(text: str) -> Iterator[str]:
    """What is wrong with the placeholders of a template's field."""
    for found in PLACEHOLDER.finditer(text):
        name = found[1]
        if name not in _FIXED and not (name.startswith("label:") and len(name) > len("label:")):
            yield f"there is no placeholder {found[0]}; valid are {', '.join(PLACEHOLDERS)}"


def example_of(text: str) -> str:
    """A template's text with an example in each place, so that its form can be checked."""
    examples = {"host": "host", "port": "1", "address": "host:1"}
    return PLACEHOLDER.sub(lambda found: examples.get(found[1], "example"), text)
