"""Reads the admin API of a running gateway, for `warmpath status`, `trace` and `top`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from gateway.cli.common import MISUSE, fail, settings_or_exit
from gateway.settings import UpSettings, variable

ANSWER_SECONDS = 5.0
ANSWER_BYTES_MAX = 64 << 20
DEFAULT_PORT = 8082  # that of `warmpath up`

Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Admin API. Default: WARMPATH_ADMIN_HOST, WARMPATH_ADMIN_PORT or 8082."),
]


class AdminError(Exception):
    """The admin API cannot be reached, or rejects the request. The message is a sentence for the user."""


class AdminClient:
    """Requests to the admin API of one gateway."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self._key = key

    def text(self, path: str, **query: str) -> str:
        """The body of a GET. Raises `AdminError`."""
        target = f"{self.url}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            request = urllib.request.Request(target, headers={"authorization": f"Bearer {self._key}"})
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as reply:
                body: bytes = reply.read(ANSWER_BYTES_MAX)
                return body.decode()
        except urllib.error.HTTPError as error:
            with error:
                reason = f"{self.url} answered with status {error.code}"
            if error.code == 401:
                reason += f": the admin key is wrong; set {variable('admin_key')}"
            raise AdminError(reason) from None
        except (OSError, ValueError) as error:
            cause = getattr(error, "reason", error)
            raise AdminError(f"no gateway's admin API at {self.url}: {cause}") from None

    def json(self, path: str, **query: str) -> Any:
        """The JSON body of a GET. Raises `AdminError`."""
        try:
            return json.loads(self.text(path, **query))
        except json.JSONDecodeError:
            raise AdminError(f"{self.url}{path} is not an admin API of Warmpath") from None


def client_or_exit(url: str | None) -> AdminClient:
    """A client for this URL or that of the settings. The key is WARMPATH_ADMIN_KEY, or that of `warmpath up`."""
    settings = settings_or_exit(UpSettings)
    file = settings.data_dir / "admin-key"
    try:
        key = settings.admin_key.get_secret_value() if settings.admin_key else file.read_text().strip()
    except OSError:
        fail(f"no admin key: set {variable('admin_key')}, or run this where `warmpath up` has made {file}", code=MISUSE)
    host = f"[{settings.admin_host}]" if ":" in settings.admin_host else settings.admin_host
    return AdminClient(url or f"http://{host}:{settings.admin_port or DEFAULT_PORT}", key)
