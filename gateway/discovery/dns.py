"""Source: DNS records. A and AAAA records have addresses, SRV records have host names and ports.

Only the SRV records with the lowest priority value are used (RFC 2782). Their weights are not, because the router
knows the load. A name that does not exist, or has no such records, is an empty list: a headless Service without ready
pods answers so. No answer, and an error of the server, are failures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver

from gateway.deployments.instances import Instance
from gateway.discovery.base import InstanceSource, SourceError, Update
from gateway.policy import DnsSource as Config
from gateway.policy import Secret
from gateway.providers.transport import HTTPTransport

LOOKUP_SECONDS = 5.0
PAUSE_MIN_SECONDS = 1.0  # between two lookups, whatever the TTL
DNS_PORT = 53


class DnsSource(InstanceSource):
    """Looks the name up again when its TTL has passed, and at least every `refresh`."""

    def __init__(self, config: Config, _transport: HTTPTransport, _resolve_secret: Callable[[Secret], str]) -> None:
        self._config = config
        self._resolver = dns.asyncresolver.Resolver(configure=False) if config.nameservers else None
        self.description = f"DNS {config.type} {config.name}"

    async def follow(self, update: Update) -> None:
        while True:
            found, ttl_seconds = await self._look_up()
            update(found)
            await asyncio.sleep(max(PAUSE_MIN_SECONDS, min(ttl_seconds, self._config.refresh)))

    async def _look_up(self) -> tuple[list[Instance], float]:
        try:
            answer = await self._system_resolver().resolve(
                self._config.name, self._config.type, lifetime=LOOKUP_SECONDS, raise_on_no_answer=True
            )
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return [], 0.0
        except (dns.exception.DNSException, OSError) as error:
            raise SourceError(f"lookup failed: {_reason(error)}") from None
        assert answer.rrset is not None
        if self._config.type == "SRV":
            records = [(r.priority, r.target.to_text(omit_final_dot=True), r.port) for r in answer.rrset]
            lowest = min(priority for priority, _, _ in records)
            places = [(host, port) for priority, host, port in records if priority == lowest]
        else:
            port = self._config.port
            assert port is not None
            places = [(record.address, port) for record in answer.rrset]
        found = {
            instance.address: instance
            for host, port in sorted(places)
            for instance in (Instance(f"{host}:{port}", f"{host}:{port}", host, port),)
        }
        return list(found.values()), float(answer.rrset.ttl)

    def _system_resolver(self) -> dns.asyncresolver.Resolver:
        """The resolver. That of the system is read when first used, since its file may be missing."""
        if self._resolver is None:
            try:
                self._resolver = dns.asyncresolver.Resolver()
            except dns.resolver.NoResolverConfiguration:
                raise SourceError("the system has no DNS server: set nameservers") from None
        elif not self._resolver.nameservers:
            self._resolver.nameservers = [_nameserver(text) for text in self._config.nameservers]
        return self._resolver


def _nameserver(text: str) -> dns.nameserver.Nameserver:
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):  # an address without a port
        host, port = text, str(DNS_PORT)
    return dns.nameserver.Do53Nameserver(host.strip("[]"), int(port))


def _reason(error: Exception) -> str:
    if isinstance(error, dns.exception.Timeout):
        return f"no answer within {LOOKUP_SECONDS:g} s"
    if isinstance(error, dns.resolver.NoNameservers):
        return "no DNS server answers; they report an error"
    return str(error) or type(error).__name__
