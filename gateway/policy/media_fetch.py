"""Policy model of media by URL: from which hosts the gateway may fetch them, for deployments that take only data."""

from __future__ import annotations

import ipaddress
import re
from functools import cached_property
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from gateway.policy.fields import Count, CountOrZero, Frozen, Seconds, as_list

SUFFIX = "*."
_HOST = re.compile(r"(?:(https?)://)?(\*\.)?([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")
_PORTS = {"https": 443, "http": 80}

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class HostRule(NamedTuple):
    """An allowed origin. `host` is in lower case, and begins with `.` if all names below it are allowed."""

    scheme: str
    host: str
    port: int

    def allows(self, scheme: str, host: str, port: int) -> bool:
        """Whether a URL's scheme, host in lower case and port are allowed."""
        fits = host.endswith(self.host) if self.host.startswith(".") else host == self.host
        return fits and (scheme, port) == (self.scheme, self.port)


def host_rule(text: str) -> HostRule:
    """Parse an entry of `hosts`. Raises `ValueError`."""
    found = _HOST.fullmatch(text)
    if found is None or (port := int(found[4] or 0)) > 65_535:
        raise ValueError(f"{text!r} is not a host, as in images.example.com, *.example.com or http://10.0.0.5:9000")
    scheme, suffix, host = found[1] or "https", found[2], found[3].lower().strip("[]")
    if suffix and "." not in host:
        raise ValueError(f"{text!r} allows a whole top-level domain; name the hosts, as in *.example.com")
    return HostRule(scheme, f".{host}" if suffix else host, port or _PORTS[scheme])


def _check_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    for host in hosts:
        host_rule(host)
    return hosts


def _check_networks(networks: tuple[str, ...]) -> tuple[str, ...]:
    for network in networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as problem:
            raise ValueError(f"{network!r} is not a network, as in 10.1.0.0/16: {problem}") from None
    return networks


_Texts = Annotated[tuple[str, ...], BeforeValidator(as_list, json_schema_input_type=str | tuple[str, ...])]


class MediaFetch(Frozen):
    """Media by URL that the gateway fetches, and sends as data to deployments that take no URLs."""

    hosts: Annotated[_Texts, AfterValidator(_check_hosts)] = Field(
        (),
        description="Hosts from which media may be fetched, as in [images.example.com, '*.cdn.example.com', "
        "'http://10.0.0.5:9000']. Without a scheme, only https. Redirects may lead only to these hosts. Default: none, "
        "so the gateway fetches nothing.",
    )
    networks: Annotated[_Texts, AfterValidator(_check_networks)] = Field(
        (),
        description="Networks that are not public and in which a host's address may be, as in [10.1.0.0/16]. An "
        "address that `hosts` names needs no network.",
    )
    max_bytes: Count = Field(10_000_000, description="Most bytes that are fetched for one request, all media together.")
    timeout: Seconds = Field(10.0, description="Longest time for the media of one request, all redirects included.")
    cache_bytes: CountOrZero = Field(
        64_000_000, description="Memory for fetched media, per process. 0: nothing is cached."
    )
    cache_for: Seconds = Field(300.0, description="How long fetched media are cached. `no-store` of a host is obeyed.")
    ca: str | None = Field(
        None,
        min_length=1,
        description="PEM file of the certificate authorities of these hosts. Default: the system's.",
    )

    @cached_property
    def rules(self) -> tuple[HostRule, ...]:
        """The allowed origins."""
        return tuple(map(host_rule, self.hosts))

    @cached_property
    def allowed_networks(self) -> tuple[Network, ...]:
        """The networks, parsed."""
        return tuple(map(ipaddress.ip_network, self.networks))
