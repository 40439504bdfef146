"""Policy model of sign-in: people use the dashboard through an OpenID Connect provider instead of an admin key."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from gateway.policy.fields import Frozen, Name, Names, Seconds, Secret

Role = Literal["owner", "admin", "viewer", "billing"]

ROLES_MAX = 200  # entries of `roles`
SESSION_SECONDS_MAX = 7 * 86_400.0


def is_secure_url(url: str) -> bool:
    """True if a URL has https and a host, or http and a host on this machine, whose requests stay on it."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme == "https":
        return bool(host)
    return parts.scheme == "http" and (host == "localhost" or _is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _secure_url(url: str) -> str:
    if not is_secure_url(url):
        raise ValueError("must be an https URL; http is for hosts on this machine only")
    return url


SecureUrl = Annotated[Name, AfterValidator(_secure_url)]


class SignInRole(Frozen):
    """Gives a role to all people whose claim has a value."""

    value: Name = Field(description="Value of the claim, as the name of a group.")
    role: Role = Field(description="What these people may do: owner, admin, viewer or billing.")
    organisation: Name | None = Field(
        None, description="Tenant to which these people are restricted, with those below it. Default: all tenants."
    )

    @model_validator(mode="after")
    def _owners_have_no_organisation(self) -> Self:
        if self.role == "owner" and self.organisation is not None:
            raise ValueError("organisation: an owner belongs to no organisation; use the role admin")
        return self


class SignIn(Frozen):
    """An OpenID Connect provider through which people sign in to the dashboard."""

    issuer: SecureUrl = Field(
        description="The provider's issuer, exactly as in its ID tokens. Its metadata is read from "
        "ISSUER/.well-known/openid-configuration."
    )
    client_id: Name = Field(description="Id under which the provider knows this gateway.")
    client_secret: Secret | None = Field(
        None, description="Secret of the client. Default: a public client, which PKCE alone protects."
    )
    public_url: SecureUrl = Field(
        description="URL of the admin listener as browsers reach it, as in https://warmpath.example.com. Register "
        "PUBLIC_URL/session/callback with the provider."
    )
    name: Name = Field("single sign-on", description="Name of the provider on the dashboard's sign-in page.")
    scopes: Names = Field(("openid", "profile", "email"), description="Scopes that are requested.")
    claim: Name = Field(
        "groups",
        description="Claim of the ID token, or else of the userinfo response, that `roles` refers to. Dots lead into "
        "objects, as in realm_access.roles. Its value is a text or a list of texts.",
    )
    roles: Annotated[tuple[SignInRole, ...], Field(min_length=1, max_length=ROLES_MAX)] = Field(
        description="Roles by value of the claim. The first match decides. People without a match are refused."
    )
    session: Annotated[Seconds, Field(gt=0, le=SESSION_SECONDS_MAX)] = Field(
        28_800.0, description="How long a session lasts before its user must sign in again. At most 7d."
    )
    ca: Name | None = Field(
        None, description="File with the certificates that may sign the provider's. Default: those of the system."
    )

    @model_validator(mode="after")
    def _is_usable(self) -> Self:
        if "openid" not in self.scopes:
            raise ValueError("scopes: must contain openid")
        parts = urlsplit(self.public_url)
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ValueError("public_url: must have no path, since the dashboard is at /dashboard/ of its listener")
        return self

    @property
    def origin(self) -> str:
        """`public_url` without a slash at its end."""
        return self.public_url.rstrip("/")
