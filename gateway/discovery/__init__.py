"""Discovery: finds the servers of a policy's templates, and keeps the fleet up to date while they come and go.

`base.py` is the port of a source. `file.py`, `dns.py` and `kubernetes.py` are the sources. `follower.py` follows one
source and keeps its last good list while the source fails. `discovery.py` runs a follower for each template of the
policy. This package may import `deployments`, `providers`, `settings`, `policy` and `core`. Begin at `base.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from gateway.discovery.base import InstanceSource, SourceError
from gateway.policy import Secret, Source
from gateway.providers.transport import HTTPTransport

# a field of `Source` -> module:class, imported on first use
SOURCES = {
    "file": "gateway.discovery.file:FileSource",
    "dns": "gateway.discovery.dns:DnsSource",
    "kubernetes": "gateway.discovery.kubernetes:KubernetesSource",
}


def make_source(source: Source, transport: HTTPTransport, resolve_secret: Callable[[Secret], str]) -> InstanceSource:
    """Create the source that a template names. Raises `SourceError` if it cannot work here."""
    (kind,) = [name for name in SOURCES if getattr(source, name) is not None]
    module, _, name = SOURCES[kind].partition(":")
    made: InstanceSource = getattr(importlib.import_module(module), name)(
        getattr(source, kind), transport, resolve_secret
    )
    return made


__all__ = ["SOURCES", "InstanceSource", "SourceError", "make_source"]
