from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.policy.media_fetch import MediaFetch, host_rule
from tests.gateway.calls import a_policy

DEPLOYMENT = {"name": "a", "base_url": "http://a.invalid/v1", "model": "m"}
MODELS = [{"name": "m", "deployments": ["a"]}]


@pytest.mark.parametrize(
    ("rule", "allowed", "refused"),
    [
        (
            "example.com",
            [("https", "example.com", 443)],
            [("http", "example.com", 80), ("https", "a.example.com", 443)],
        ),
        ("Example.COM:8443", [("https", "example.com", 8443)], [("https", "example.com", 443)]),
        (
            "*.example.com",
            [("https", "a.example.com", 443), ("https", "a.b.example.com", 443)],
            [("https", "example.com", 443), ("https", "badexample.com", 443), ("https", "example.com.evil.net", 443)],
        ),
        ("http://10.0.0.5:9000", [("http", "10.0.0.5", 9000)], [("https", "10.0.0.5", 9000), ("http", "10.0.0.5", 80)]),
        ("https://[::1]", [("https", "::1", 443)], [("https", "::2", 443)]),
    ],
)
def test_a_rule_allows_a_scheme_a_host_and_a_port(
    rule: str, allowed: list[tuple[str, str, int]], refused: list[tuple[str, str, int]]
) -> None:
    assert all(host_rule(rule).allows(*origin) for origin in allowed)
    assert not any(host_rule(rule).allows(*origin) for origin in refused)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hosts": ["*"]}, {"hosts": ["*.com"]}, {"hosts": ["ftp://example.com"]}, {"hosts": ["example.com/path"]},
        {"hosts": ["a.*.com"]}, {"hosts": ["example.com:70000"]}, {"hosts": ["user@example.com"]},
        {"networks": ["10.0.0.1/8"]}, {"networks": ["intranet"]},
    ],
)  # fmt: skip
def test_wrong_hosts_and_networks_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        MediaFetch.model_validate(wrong)


def test_to_fetch_for_a_deployment_needs_hosts() -> None:
    deployments = [{**DEPLOYMENT, "media_urls": "fetch"}]
    with pytest.raises(ValidationError, match=r"deployments\.0\.media_urls: fetch needs media_fetch\.hosts"):
        a_policy(deployments=deployments, models=MODELS)
    policy = a_policy(deployments=deployments, models=MODELS, media_fetch={"hosts": "example.com"})
    assert policy.deployments[0].media_urls == "fetch"


def test_a_deployment_that_fetches_gets_no_requests_that_pass_unchanged() -> None:
    deployments = [{**DEPLOYMENT, "provider": "anthropic", "media_urls": "fetch"}]
    policy = a_policy(deployments=deployments, models=MODELS, media_fetch={"hosts": "example.com"})
    assert policy.deployments[0].native_apis == frozenset()
