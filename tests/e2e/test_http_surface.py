"""What a client may do to the HTTP/1.1 parsers of the gateway and of the bundled engine, on raw sockets."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.processes import PATIENCE_SECONDS, Gateway, Running, chat, key

pytestmark = pytest.mark.e2e

BODY = json.dumps(chat(max_tokens=2)).encode()
OFFERS = {
    # What Java's HttpClient sends by default for the first request to an origin.
    "h2c": "Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
    "Upgrade: h2c\r\n",
    "websocket": "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
}


@pytest.fixture(params=["gateway", "engine"])
def server(request: pytest.FixtureRequest, local_gateway: Gateway, local_engine: Running) -> Running:
    return local_gateway if request.param == "gateway" else local_engine


def connect(server: Running) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=PATIENCE_SECONDS)


def head(length: int, lines: str = "", *, host: str = "Host: x\r\n") -> bytes:
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\n{host}{lines}authorization: Bearer {key('dev')}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def reply(connection: socket.socket) -> tuple[int, Any]:
    """Read one complete reply. Returns its status and JSON."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, json.loads(response.read())


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("apart", [False, True], ids=["in one segment", "in two segments"])
def test_an_offered_upgrade_is_declined_and_the_request_is_served(server: Running, offer: str, apart: bool) -> None:
    with connect(server) as connection:
        parts = [head(len(BODY), OFFERS[offer]), BODY] if apart else [head(len(BODY), OFFERS[offer]) + BODY]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
            if part is not parts[-1]:
                # The server has read the head once it answers on another connection that was opened later.
                with connect(server) as other:
                    other.sendall(head(2) + b"[]")
                    assert reply(other)[0] == 400
        status, answer = reply(connection)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
        connection.sendall(head(len(BODY)) + BODY)  # the connection stays in use
        assert reply(connection)[0] == 200


def test_a_body_behind_an_offered_upgrade_is_no_request(server: Running) -> None:
    smuggled = head(len(BODY)) + BODY
    with connect(server) as connection:
        connection.sendall(head(len(smuggled), OFFERS["h2c"]))
        connection.sendall(smuggled)
        assert reply(connection)[0] == 400  # it is not JSON, and what it contains is not served
        connection.sendall(head(2) + b"[]")
        assert reply(connection)[0] == 400


@pytest.mark.parametrize("host", ["", "Host: a\r\nHost: b\r\n", "Host: a b\r\n", "Host: user@a\r\n"])
def test_a_wrong_host_is_refused(server: Running, host: str) -> None:
    with connect(server) as connection:
        connection.sendall(head(len(BODY), host=host) + BODY)
        status, error = reply(connection)
        assert status == 400 and "Host" in error["error"]["message"]
        assert connection.recv(1) == b""


@pytest.mark.parametrize("chunked", [False, True])
def test_a_hundred_megabytes_get_their_413(server: Running, chunked: bool) -> None:
    piece, count = b"x" * 2**20, 100
    lines = head(count * len(piece)).decode()
    if chunked:
        lines = lines.replace(f"content-length: {count * len(piece)}", "transfer-encoding: chunked")
    with connect(server) as connection:
        connection.sendall(lines.encode())
        for _ in range(count):  # a client that reads nothing before it has sent everything
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        connection.sendall(b"0\r\n\r\n" if chunked else b"")
        status, error = reply(connection)
        assert (status, error["error"]["type"]) == (413, "invalid_request_error")
        connection.sendall(head(len(BODY)) + BODY)
        assert reply(connection)[0] == 200


def test_an_announced_body_is_too_large_whoever_sends_it(local_gateway: Gateway) -> None:
    with connect(local_gateway) as connection:
        connection.sendall(head(10**12).replace(key("dev").encode(), b"nobody"))
        assert reply(connection)[0] == 413
