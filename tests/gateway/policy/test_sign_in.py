"""`sign_in` of the policy: which settings are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.policy.sign_in import SignIn

VALID: dict[str, Any] = {
    "issuer": "https://login.example.com/realms/x",
    "client_id": "warmpath",
    "public_url": "https://warmpath.example.com/",
    "roles": [{"value": "platform", "role": "owner"}],
}


@pytest.mark.parametrize("url", ["http://localhost:80", "http://127.0.0.1", "http://[::1]:8080", "https://a.example"])
def test_secure_urls(url: str) -> None:
    sign_in = SignIn.model_validate({**VALID, "issuer": url, "public_url": url})
    assert (sign_in.origin, sign_in.session, sign_in.claim) == (url, 28_800.0, "groups")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"issuer": "http://login.example.com"}, "https"),
        ({"issuer": "http://localhost.example.com"}, "https"),
        ({"issuer": "https://"}, "https"),
        ({"issuer": "https://[::1"}, "https"),
        ({"public_url": "http://10.0.0.1"}, "https"),
        ({"public_url": "https://example.com/admin"}, "no path"),
        ({"public_url": "https://example.com/?a=1"}, "no path"),
        ({"scopes": ["profile"]}, "openid"),
        ({"roles": []}, "at least 1"),
        ({"roles": [{"value": "a", "role": "root"}]}, "owner"),
        ({"roles": [{"value": "a", "role": "owner", "organisation": "b"}]}, "organisation"),
        ({"session": "8d"}, "less than or equal"),
        ({"client_secret": "plain"}, "Secret"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        SignIn.model_validate({**VALID, **changes})
