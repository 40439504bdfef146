"""The engines from which blocks may be loaded. An operator names them, because a block of a liar is a wrong answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine's address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class BlockSource:
    """The engine from which a request loads its prompt's blocks.

    If a conversation moves, that engine drops what it has sent, except for the first `kept_tokens` of the prompt.
    """

    peer: Peer
    kept_tokens: int | None = None  # None: it drops nothing


@dataclass(frozen=True, slots=True)
class PeerRule:
    """Matches a host, a host's port, or all addresses of a network. Names are compared as text and never resolved."""

    host: str | None
    port: int | None
    network: IPv4Network | IPv6Network | None = None

    def matches(self, peer: Peer) -> bool:
        if self.network is None:
            return peer.host.lower() == self.host and self.port in (None, peer.port)
        try:
            return ip_address(peer.host) in self.network
        except ValueError:
            return False


def parse_rule(text: str) -> PeerRule:
    """Parses HOST, HOST:PORT, [IPV6]:PORT or a network such as 10.0.0.0/8. Raises ValueError."""
    if "/" in text:
        return PeerRule(None, None, ip_network(text))
    try:
        return PeerRule(str(ip_address(text)), None)  # an IPv6 address has colons, but no port
    except ValueError:
        host, separator, port = text.rpartition(":")
    if not separator:
        host, port = text, ""
    host = host.removeprefix("[").removesuffix("]").lower()
    if not host or (separator and not 0 < int(port) < 65536):
        raise ValueError(text)
    return PeerRule(host, int(port) if separator else None)


def is_allowed(peer: Peer, rules: Sequence[PeerRule]) -> bool:
    return any(rule.matches(peer) for rule in rules)
