"""HTTP/1.1 client to deployments: connection pools per origin, on asyncio's protocols and llhttp.

`client` has `HTTPTransport` and `HTTPResponse`, `origin_pool` the connections to one origin, and `connection` one
connection. It does what a gateway needs and no more: it keeps connections alive, bounds them per origin, passes bodies
on in the pieces in which they arrive, never decompresses them, and closes a connection as soon as its reader is gone.
It is also an httpx2 transport. CPU per small JSON request, measured in one process: 14 us by `send`, 36 us with
httpx2's request and response objects, 87 us by aiohttp, 485 us by httpx2's own transport.

Callers may rely on this:

* Each kind of failure has its own httpx2 exception: `ConnectError`, `ConnectTimeout`, `PoolTimeout`, `ReadTimeout`,
  `ReadError` (the connection broke or ended before the response did), `RemoteProtocolError` (the response is not HTTP).
* Cancelling a waiting caller, or closing a response before its end, closes the connection at once.
* A request is sent again in one case only: on a reused connection that ended before a byte of the response arrived,
  because the server closed it while the request was on its way.

HEAD, upgrades, proxies and redirects are not supported. Request bodies are read completely before they are sent.
"""

from gateway.providers.transport.client import HTTPResponse, HTTPTransport, header_lines

__all__ = ["HTTPResponse", "HTTPTransport", "header_lines"]
