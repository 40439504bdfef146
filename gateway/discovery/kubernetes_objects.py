"""What pods and EndpointSlices of the Kubernetes API say about servers. Only the fields that are used are decoded.

Whether an endpoint may get requests is the API's `ready` condition, which is false while a pod is shut down. The
identity of a server is the uid of its pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from gateway.deployments.instances import Instance
from gateway.discovery.base import SourceError


class ObjectMeta(msgspec.Struct, rename="camel"):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None

    @property
    def all_labels(self) -> dict[str, str]:
        """Labels and annotations. A label hides an annotation of the same name."""
        return {**(self.annotations or {}), **(self.labels or {})}


class AnyObject(msgspec.Struct):
    """The part that all objects have, and that a bookmark has."""

    metadata: ObjectMeta


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""


class _PodIP(msgspec.Struct):
    ip: str = ""


class _PodStatus(msgspec.Struct, rename={"pod_ip": "podIP", "pod_ips": "podIPs"}):
    phase: str = ""
    pod_ip: str = ""
    pod_ips: list[_PodIP] | None = None
    conditions: list[_Condition] | None = None


class _ContainerPort(msgspec.Struct, rename="camel"):
    container_port: int
    name: str = ""
    protocol: str = "TCP"


class _Container(msgspec.Struct):
    ports: list[_ContainerPort] | None = None


class _PodSpec(msgspec.Struct):
    containers: list[_Container] = []


class Pod(AnyObject):
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


class _EndpointConditions(msgspec.Struct):
    ready: bool | None = None


class _TargetRef(msgspec.Struct):
    kind: str = ""
    name: str = ""
    uid: str = ""


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str] = []
    conditions: _EndpointConditions = msgspec.field(default_factory=_EndpointConditions)
    target_ref: _TargetRef | None = None
    zone: str | None = None


class _SlicePort(msgspec.Struct):
    port: int | None = None
    name: str | None = None
    protocol: str | None = None


class EndpointSlice(AnyObject, rename="camel"):
    address_type: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_SlicePort] | None = None


class _LabelSelector(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str] = {}


class _TargetPort(msgspec.Struct):
    number: int


class _PoolSpec(msgspec.Struct, rename="camel"):
    selector: _LabelSelector
    target_ports: list[_TargetPort]


class InferencePool(AnyObject):
    """The pool of the Gateway API's inference extension: the labels of its pods, and the ports on which they serve."""

    spec: _PoolSpec

    @property
    def selector(self) -> str:
        """The label selector of its pods."""
        return ",".join(f"{name}={value}" for name, value in sorted(self.spec.selector.match_labels.items()))


ZONE_LABEL = "topology.kubernetes.io/zone"


def instances_of_pods(pods: Iterable[Pod], port: int | str | None) -> list[Instance]:
    """The servers of the pods that are ready and are not being deleted."""
    return [instance for pod in pods if (instance := _instance_of_pod(pod, port)) is not None]


def instances_of_pool(pool: InferencePool, pods: Iterable[Pod]) -> list[Instance]:
    """The servers of a pool: one for each of its ports in each pod, as with one data-parallel rank per port."""
    ports, ready = [each.number for each in pool.spec.target_ports], list(pods)
    if len(ports) == 1:
        return instances_of_pods(ready, ports[0])
    return [
        Instance(f"{one.name}:{port}", f"{one.identity}:{port}", one.host, port, one.labels)
        for port in ports
        for one in instances_of_pods(ready, port)
    ]


def instances_of_slices(slices: Iterable[EndpointSlice], port: int | str | None) -> list[Instance]:
    """The ready endpoints of all slices of a Service.

    A pod that is in several slices, as with two IP families, counts once: by IPv4 if it has both.
    """
    found: dict[str, Instance] = {}
    for each in sorted(slices, key=lambda one: (one.address_type != "IPv4", one.metadata.name)):
        for instance in _instances_of_slice(each, port):
            found.setdefault(instance.identity, instance)
    return list(found.values())


def _instance_of_pod(pod: Pod, port: int | str | None) -> Instance | None:
    status, meta = pod.status, pod.metadata
    is_ready = any(c.type == "Ready" and c.status == "True" for c in status.conditions or ())
    addresses = [*filter(None, (status.pod_ip, *(each.ip for each in status.pod_ips or ())))]
    if meta.deletion_timestamp is not None or not is_ready or not addresses:
        return None
    if not isinstance(port, int):
        ports = [p for container in pod.spec.containers for p in container.ports or () if p.protocol == "TCP"]
        port = _one_port([(p.name, p.container_port) for p in ports], port, f"pod {meta.name}")
    return Instance(meta.name, meta.uid or meta.name, addresses[0], port, meta.all_labels)


def _instances_of_slice(one: EndpointSlice, port: int | str | None) -> Iterator[Instance]:
    ready = [each for each in one.endpoints or () if each.addresses and each.conditions.ready is not False]
    if not ready:
        return
    if not isinstance(port, int):
        ports = [(p.name or "", p.port) for p in one.ports or () if p.port and (p.protocol or "TCP") == "TCP"]
        port = _one_port(ports, port, f"EndpointSlice {one.metadata.name}")
    for endpoint in ready:
        target, host = endpoint.target_ref, endpoint.addresses[0]
        labels = {**one.metadata.all_labels, **({ZONE_LABEL: endpoint.zone} if endpoint.zone else {})}
        if target is not None and target.name:
            yield Instance(target.name, target.uid or target.name, host, port, labels)
        else:  # without a pod, as for a Service whose endpoints are managed by hand
            name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            yield Instance(name, name, host, port, labels)


def _one_port(ports: Sequence[tuple[str, int]], name: int | str | None, of: str) -> int:
    named = [number for port_name, number in ports if name is None or port_name == name]
    if len(set(named)) == 1:
        return named[0]
    known = ", ".join(f"{port_name or 'unnamed'} ({number})" for port_name, number in ports) or "none"
    if name is None:
        raise SourceError(f"{of} has not exactly one TCP port: set port to one of: {known}")
    raise SourceError(f"{of} has no TCP port named {name!r}; its ports: {known}")
