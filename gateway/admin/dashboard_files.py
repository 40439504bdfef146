"""Serves the dashboard's static files. They need no key, since they contain no data.

The page asks for the admin key and fetches all data from the admin API with it. A content security policy limits
scripts, styles and connections to this listener.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.errors import UnknownUrl
from gateway.endpoints.replies import EXCEPTION_HANDLERS

FOLDER = Path(__file__).parent / "dashboard"
HOME = "/dashboard/"
INDEX = "index.html"
TYPES = {  # only files with these suffixes are served
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
CONTENT_POLICY = "; ".join(
    [
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:", "connect-src 'self'",
        "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    ]
)  # fmt: skip
HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # browsers revalidate each time and download changed files only
}
MAX_NAME_CHARACTERS = 100  # of a requested file name that an error repeats


def is_page(path: str) -> bool:
    """True if the path belongs to the dashboard and not to the API."""
    return path in ("/", HOME.rstrip("/")) or path.startswith(HOME)


def dashboard(folder: Path = FOLDER) -> Starlette:
    """The application that serves the files. It lists the folder once and opens only listed files."""
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.suffix in TYPES and path.is_file()
    }

    async def home(_: Request) -> Response:
        return Response(status_code=307, headers={**HEADERS, "location": HOME})

    async def file(request: Request) -> Response:
        name = request.path_params["name"] or INDEX
        path = files.get(name)
        if path is None:
            raise UnknownUrl(f"the dashboard has no file {name[:MAX_NAME_CHARACTERS]!r}")
        content = await asyncio.to_thread(path.read_bytes)
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {**HEADERS, "etag": tag}
        cached = request.headers.get("if-none-match", "")
        if tag in (each.strip().removeprefix("W/") for each in cached.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, headers={**headers, "content-type": TYPES[path.suffix]})

    application = Starlette(
        routes=[Route("/", home), Route(HOME.rstrip("/"), home), Route(HOME + "{name:path}", file)],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    application.router.redirect_slashes = False  # a redirect would repeat the Host header that the client sent
    return application
