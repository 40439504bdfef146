"""HTTP proxies: a tunnel (CONNECT) to servers with TLS, and requests with the whole URL to others (RFC 9112)."""

from __future__ import annotations

import asyncio
import base64
import socket
from typing import NamedTuple

import httpx2

MAX_REPLY_BYTES = 16 * 1024  # of a proxy's reply to CONNECT
_HEAD_END = b"\r\n\r\n"


class Proxy(NamedTuple):
    """An HTTP proxy, and the value of `proxy-authorization` if it needs a login."""

    host: str
    port: int
    authorization: str = ""

    @classmethod
    def of(cls, url: str, login: str | None) -> Proxy:
        """The proxy at a URL. `login` is `user:password`."""
        parsed = httpx2.URL(url)
        token = "" if login is None else f"Basic {base64.b64encode(login.encode()).decode()}"
        return cls(parsed.host, parsed.port or 80, token)

    @property
    def _header(self) -> bytes:
        return b"proxy-authorization: %b\r\n" % self.authorization.encode() if self.authorization else b""

    def rewritten(self, head: bytes, host: str, port: int) -> bytes:
        """Return the head of a request to a server without TLS, as the proxy expects it: with the whole URL."""
        method, _, rest = head.partition(b" ")
        line, _, lines = rest.partition(b"\r\n")
        return b"%b http://%b%b\r\n%b%b" % (method, _authority(host, port), line, self._header, lines)

    async def open_tunnel(self, loop: asyncio.AbstractEventLoop, host: str, port: int) -> socket.socket:
        """Return a socket that the proxy has connected to a server. Raises `ConnectError` and `OSError`."""
        found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        tunnel = socket.socket(family, kind, protocol)
        try:
            tunnel.setblocking(False)
            await loop.sock_connect(tunnel, address)
            server = _authority(host, port)
            request = b"CONNECT %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (server, server, self._header)
            await loop.sock_sendall(tunnel, request)
            reply = b""
            while _HEAD_END not in reply:
                part = await loop.sock_recv(tunnel, MAX_REPLY_BYTES)
                reply += part
                if not part or len(reply) > MAX_REPLY_BYTES:
                    raise httpx2.ConnectError(f"the proxy {self.host}:{self.port} gave no reply to CONNECT")
            status = reply.split(b"\r\n", 1)[0].split(b" ")[1:2]
            if not status or not status[0].startswith(b"2"):
                named = b"".join(status)[:3].decode("latin-1")
                raise httpx2.ConnectError(f"the proxy {self.host}:{self.port} refused CONNECT with status {named}")
        except BaseException:
            tunnel.close()
            raise
        return tunnel


def _authority(host: str, port: int) -> bytes:
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()
