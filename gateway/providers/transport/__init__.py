"""HTTP/1.1 client for requests to deployments: one connection pool per origin, on asyncio's protocols and llhttp.

`client` has `HTTPTransport` and `HTTPResponse`, `origin_pool` manages the connections to one origin, and `connection`
implements one connection. The client has only the features that a gateway needs. It keeps connections alive, limits
their number per origin, passes on each piece of a body as it arrives, never decompresses a body, and closes a
connection as soon as its reader stops. It also implements httpx2's transport interface. CPU per small JSON request,
measured in one process: 14 us by `send`, 36 us with httpx2's request and response objects, 87 us by aiohttp, 485 us by
httpx2's own transport.

Callers may rely on this:

* Each kind of failure has its own httpx2 exception: `ConnectError`, `ConnectTimeout`, `PoolTimeout`, `ReadTimeout`,
  `ReadError` (the connection broke or ended before the response did), `RemoteProtocolError` (the response is not HTTP).
* Cancelling a waiting caller, or closing a response before its end, closes the connection at once.
* A request is sent a second time only if a reused connection ended before a byte of the response arrived, because the
  server closed the connection before the request reached it.

HEAD, upgrades and redirects are not supported. A pool may use an HTTP proxy (`proxy`). Request bodies are read
completely before they are sent.
"""

from gateway.providers.transport.client import PROXY_EXTENSION, TLS_EXTENSION, HTTPResponse, HTTPTransport, header_lines
from gateway.providers.transport.proxy import Proxy
from gateway.providers.transport.tls import UnusableFile, tls_context

__all__ = [
    "PROXY_EXTENSION",
    "TLS_EXTENSION",
    "HTTPResponse",
    "HTTPTransport",
    "Proxy",
    "UnusableFile",
    "header_lines",
    "tls_context",
]
