"""An OpenID Connect provider that runs as a process of its own, for the tests of signing in."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

from tests.ports import free_port

START_SECONDS = 60.0


@contextmanager
def oidc_provider() -> Iterator[str]:
    """Run the provider until the end of the block. Yields its issuer.

    `PUT /users/NAME` sets the claims of a person. On its sign-in page, a name is enough to sign in.
    """
    port = free_port()
    issuer = f"http://localhost:{port}"
    command = [sys.executable, "-W", "ignore", "-m", "oidc_provider_mock", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(issuer):
            assert process.poll() is None and time.monotonic() < until, "the provider did not start"
            time.sleep(0.05)
        yield issuer
    finally:
        process.terminate()
        process.wait()


def _answers(issuer: str) -> bool:
    try:
        return httpx2.get(f"{issuer}/.well-known/openid-configuration", verify=False).status_code == 200
    except httpx2.ConnectError:
        return False
