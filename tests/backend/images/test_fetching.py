"""Downloads of images: hosts, addresses, redirects, bytes and time are bounded."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("PIL", reason="the package pillow is not installed")
from backend.images import fetching
from backend.images.decoding import ImageError
from backend.images.fetching import ImageFetcher, is_public

CONTENT = b"an image"


class Handler(http.server.BaseHTTPRequestHandler):
    seen: list[tuple[str, dict[str, str]]]

    def do_GET(self) -> None:
        self.seen.append((self.path, dict(self.headers)))
        match self.path.partition("?")[0]:
            case "/image":
                self._send(200, CONTENT)
            case "/moved":
                self._send(302, b"", location="/image")
            case "/loop":
                self._send(302, b"", location="/loop")
            case "/elsewhere":
                self._send(302, b"", location="http://other.example/image")
            case "/large":
                self._send(200, bytes(3000))
            case "/cut":
                self._send(200, b"half", length=8)
            case "/slow":
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                for _ in range(100):
                    self.wfile.write(b"x: y\r\n")
                    time.sleep(0.05)
            case _:
                self._send(404, b"")

    def _send(self, status: int, body: bytes, location: str = "", length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body) if length is None else length))
        if location:
            self.send_header("location", location)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server on this machine under the name images.example, which is taken to be public."""
    Handler.seen = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    resolve = socket.getaddrinfo

    def resolved(host: str, *args: Any, **options: Any) -> Any:
        return resolve("127.0.0.1" if host.endswith(".example") else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def fetch(url: str, *, allowed: tuple[str, ...] = ("images.example",), seconds: float = 10.0) -> bytes:
    return ImageFetcher(allowed, seconds).fetch(url)


def test_an_image_is_downloaded(port: int) -> None:
    assert fetch(f"http://images.example:{port}/image?size=1#part") == CONTENT
    assert fetch(f"http://IMAGES.example:{port}/moved") == CONTENT
    assert fetch(f"http://any.example:{port}/image", allowed=("*",)) == CONTENT
    (path, headers), *_ = Handler.seen
    assert path == "/image?size=1"
    assert {name.lower() for name in headers} == {"host", "accept-encoding", "user-agent", "accept", "connection"}
    assert headers["Host"] == f"images.example:{port}"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "answered with status 404"),
        ("loop", "more than 3 redirects"),
        ("elsewhere", "--allowed-media-domains does not name other.example"),
        ("cut", "the answer is incomplete"),
    ],
)
def test_other_answers_are_refused(port: int, path: str, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        fetch(f"http://images.example:{port}/{path}")


def test_bytes_are_bounded(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MAX_BYTES", 2000)
    with pytest.raises(ImageError, match="more than 2,000 bytes"):
        fetch(f"http://images.example:{port}/large")


def test_time_is_bounded_whatever_the_host_sends(port: int) -> None:
    with pytest.raises(ImageError, match="it takes too long"):
        fetch(f"http://images.example:{port}/slow", seconds=0.3)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "ftp://images.example/a", "http://user@images.example/", "http://[::1", "http://",
        "http://images.example:port/", "https://other.example/image", "image.png", "http://images.example:99999/",
    ],
)  # fmt: skip
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ImageError):
        fetch(url)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:10.0.0.1]", "0.0.0.0", "[fd00::1]"],
)
def test_private_addresses_are_never_reached(host: str) -> None:
    with pytest.raises(ImageError, match="not public"):
        fetch(f"http://{host}/image", allowed=("*",))


def test_a_host_with_one_private_address_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("8.8.8.8", "192.168.1.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with pytest.raises(ImageError, match="not public"):
        fetch("http://images.example/image")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("64:ff9b::8.8.8.8", True), ("64:ff9b::10.0.0.1", False),
        ("2002:0a00:0001::", False), ("::ffff:127.0.0.1", False), ("224.0.0.1", False), ("100.64.0.1", False),
        ("fe80::1%eth0", False), ("::", False),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) == public


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(ImageError, match="has no address"):
        fetch("http://images.example/image")
