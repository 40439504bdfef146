"""Downloads images by URL from hosts that the operator has named, and never from a private address.

A host is resolved once. All its addresses must be public, and the connection goes to one of them, so a second answer of
the name server cannot lead elsewhere. Redirects are followed under the same rules. No header of the client is sent.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Collection
from urllib.parse import SplitResult, urljoin, urlsplit

from backend.images.decoding import MAX_BYTES, ImageError

ANY_HOST = "*"
MAX_REDIRECTS = 3
MAX_ADDRESSES = 3  # of a host, to which a connection is tried
_HEADERS = {"user-agent": "warmpath", "accept": "image/*", "connection": "close"}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class ImageFetcher:
    """Downloads images. `allowed_hosts`: names of hosts, or `ANY_HOST`. Thread-safe."""

    def __init__(self, allowed_hosts: Collection[str], max_seconds: float) -> None:
        self.max_seconds = max_seconds
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        self._tls = ssl.create_default_context()

    def fetch(self, url: str) -> bytes:
        """Returns the content of a URL. Raises `ImageError`.

        Blocks for `max_seconds` at most, and as long as the name server takes.
        """
        deadline = time.monotonic() + self.max_seconds
        for _ in range(MAX_REDIRECTS + 1):
            parts = self._checked(url)
            try:
                found = self._get(parts, deadline)
            except (OSError, http.client.HTTPException) as error:
                reason = "it takes too long" if time.monotonic() >= deadline else error or type(error).__name__
                raise ImageError(f"cannot be downloaded from {parts.hostname}: {reason}") from None
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise ImageError(f"is behind more than {MAX_REDIRECTS} redirects")

    def _checked(self, url: str) -> SplitResult:
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise ImageError("is not a valid URL") from None
        if parts.scheme not in ("http", "https") or not host or parts.username is not None:
            raise ImageError("must be an http or https URL without a user name")
        if not {host, ANY_HOST} & self._allowed_hosts:
            raise ImageError(f"cannot be downloaded: --allowed-media-domains does not name {host}")
        return parts

    def _get(self, url: SplitResult, deadline: float) -> bytes | str:
        """The content, or the target of a redirect."""
        host, is_https = url.hostname or "", url.scheme == "https"
        port = url.port or (http.client.HTTPS_PORT if is_https else http.client.HTTP_PORT)
        connection = (http.client.HTTPSConnection if is_https else http.client.HTTPConnection)(host, port)
        sock = _connect(host, port, deadline)
        if is_https:
            sock = self._tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        # A host that sends a byte now and then would extend every timeout of a read.
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), _shut_down, [sock])
        timer.start()
        try:
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            connection.sock = sock
            target = url._replace(scheme="", netloc="", fragment="").geturl()
            connection.request("GET", target if target.startswith("/") else f"/{target}", headers=_HEADERS)
            with connection.getresponse() as response:
                return _content(response, host, deadline)
        finally:
            timer.cancel()
            connection.close()
            sock.close()


def _content(response: http.client.HTTPResponse, host: str, deadline: float) -> bytes | str:
    if response.status in _REDIRECTS and (location := response.headers.get("location")):
        return str(location)
    if response.status != http.client.OK:
        raise ImageError(f"cannot be downloaded: {host} answered with status {response.status}")
    content = response.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ImageError(f"has more than {MAX_BYTES:,} bytes")
    if response.length or time.monotonic() >= deadline:
        raise ConnectionResetError("the answer is incomplete")
    return content


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """Connects to one of the host's addresses."""
    for address in (addresses := _public_addresses(host, port)):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        try:
            return socket.create_connection((address, port), remaining)
        except OSError:
            if address == addresses[-1]:
                raise
    raise ImageError(f"cannot be downloaded: {host} has no address")


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def is_public(address: str) -> bool:
    """Whether an address, or the IPv4 address that an IPv6 address stands for, belongs to the public internet."""
    found: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64:
            found = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        else:
            teredo = found.teredo
            found = found.ipv4_mapped or found.sixtofour or (teredo[1] if teredo else found)
    return found.is_global and not found.is_multicast


def _public_addresses(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ImageError(f"cannot be downloaded: {host} has no address") from None
    addresses = [*dict.fromkeys(str(each[4][0]) for each in found)]
    if not all(map(is_public, addresses)):
        raise ImageError(f"cannot be downloaded: {host} has an address that is not public")
    return addresses[:MAX_ADDRESSES]
