"""The dashboard's files. Anyone may have them: they hold no data, and the page asks for the admin key itself.

Whatever the page shows, it fetches from the admin API with that key. Its policy lets a browser load, run and reach
nothing but this listener.
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
TYPES = {  # of the files that are served; nothing else in the folder is
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
    "cache-control": "no-cache",  # asked for again each time, and sent where it has changed
}
MAX_NAME_CHARACTERS = 100  # of a file, in the error that says that there is none


def is_page(path: str) -> bool:
    """Whether a path is the dashboard's, and not the API's."""
    return path in ("/", HOME.rstrip("/")) or path.startswith(HOME)


def dashboard(folder: Path = FOLDER) -> Starlette:
    """An application without a key. It knows the names in the folder, and opens nothing else."""
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
        known = request.headers.get("if-none-match", "")
        if tag in (each.strip().removeprefix("W/") for each in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, headers={**headers, "content-type": TYPES[path.suffix]})

    application = Starlette(
        routes=[Route("/", home), Route(HOME.rstrip("/"), home), Route(HOME + "{name:path}", file)],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    application.router.redirect_slashes = False
    return application
