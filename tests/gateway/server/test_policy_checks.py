"""Checks of a policy that need the providers and the settings: those of signing in."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.policy.file import PolicyError, load_policy
from gateway.server.policy_checks import IN_SERVICE
from tests.gateway.harness import policy_of


def problems(folder: Path, **sign_in: Any) -> str:
    """What a policy with this provider lacks to be used."""
    file = folder / "policy.yaml"
    whole = {
        "issuer": "https://login.example.com", "client_id": "me", "public_url": "https://warmpath.example.com",
        "roles": [{"value": "a", "role": "viewer"}], **sign_in,
    }  # fmt: skip
    file.write_text(yaml.safe_dump(policy_of(sign_in=whole)))
    try:
        load_policy(file, checks=IN_SERVICE)
    except PolicyError as error:
        return str(error)
    return ""


def test_the_secret_and_the_certificates_of_a_provider_must_be_readable(tmp_path: Path) -> None:
    assert problems(tmp_path) == ""
    missing = str(tmp_path / "missing")
    assert "sign_in.client_secret" in problems(tmp_path, client_secret={"file": missing})
    assert "sign_in.ca" in problems(tmp_path, ca=missing)


def test_signing_in_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name, name="joserfc")

    monkeypatch.setattr(importlib, "import_module", missing)
    found = problems(tmp_path)
    assert "the package joserfc is not installed: pip install 'warmpath[oidc]'" in found
