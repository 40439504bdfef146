"""Decides to which network addresses the gateway may connect for a host that a client named.

A name is resolved once. All its addresses are checked, and the connection goes to one of these addresses, so a second
answer of the name server cannot lead elsewhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Collection

from gateway.policy.media_fetch import Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host, each once. Raises `OSError`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [*dict.fromkeys(str(address[0]) for *_, address in found)]


def is_allowed(address: str, networks: Collection[Network]) -> bool:
    """Whether an address is public, or in one of the networks. Loopback and link-local addresses are not public."""
    found = _embedded(ipaddress.ip_address(address.partition("%")[0]))
    return (found.is_global and not found.is_multicast) or any(found in network for network in networks)


def is_address(host: str) -> bool:
    """Whether a host is given as an address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _embedded(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for (mapped, 6to4, Teredo, NAT64), else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo is not None else address)
