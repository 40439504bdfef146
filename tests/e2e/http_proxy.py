"""An HTTP proxy as a process of its own: tunnels (CONNECT) and plain requests, with a login. Logs each request line."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sys
from urllib.parse import urlsplit

PIECE_BYTES = 65536


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


async def pass_requests(head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on the requests of a connection, all of which are for one server."""
    while True:
        line, *headers = head.rstrip("\r\n").split("\r\n")
        method, target, version = line.split(" ")
        kept = [h for h in headers if not h.lower().startswith("proxy-")]
        length = next((int(h.partition(":")[2]) for h in headers if h.lower().startswith("content-length:")), 0)
        path = target.partition("://")[2].partition("/")[2]
        writer.write("\r\n".join([f"{method} /{path} {version}", *kept, "", ""]).encode("latin-1"))
        writer.write(await reader.readexactly(length))
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")


async def serve(login: str) -> None:
    wanted = f"basic {base64.b64encode(login.encode()).decode()}"

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            writer.close()
            return
        line, *headers = head.rstrip("\r\n").split("\r\n")
        print(line, flush=True)
        given = next((h.partition(":")[2].strip() for h in headers if h.lower().startswith("proxy-authorization:")), "")
        if f"basic {given.partition(' ')[2]}" != wanted:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
            writer.close()
            return
        method, target, _ = line.split(" ")
        host, port = (target.rpartition(":")[0], int(target.rpartition(":")[2])) if method == "CONNECT" else ("", 0)
        if method != "CONNECT":
            url = urlsplit(target)
            host, port = url.hostname or "", url.port or 80
        upstream_reader, upstream_writer = await asyncio.open_connection(host, port)
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(pipe(reader, upstream_writer), pipe(upstream_reader, writer))
        else:
            await asyncio.gather(
                pass_requests(head, reader, upstream_writer), pipe(upstream_reader, writer), return_exceptions=True
            )

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(f"ready on {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
