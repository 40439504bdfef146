"""What is simulated: deployments with their engines, gateways with their policy, and what happens to them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gateway.policy import Policy
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.simulator.engine_steps import EngineSpeed

DEFAULT_DEPLOYMENT = {
    "name": "s",
    "base_url": "http://simulated.invalid/v1",
    "model": "m",
    "max_concurrency": 256,
    "cache_tokens": 1_000_000,
}


class Reports(Enum):
    """What engines report of their caches."""

    EVENTS = "events"  # KV events and metrics, and `cached_tokens` in replies
    REPLIES = "replies"  # `cached_tokens` in replies
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Restart:
    """An engine restarts: it loses its cache, and continues with its requests after `seconds`."""

    at_seconds: float
    deployment: int
    seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class SimulatedSite:
    """Deployments of one kind behind gateways with one policy."""

    policy: Policy
    capacity_tokens: int  # of each deployment's cache
    timing: EngineSpeed
    speeds: tuple[float, ...] = ()  # of each deployment, as factors; by default all 1
    reports: Reports = Reports.REPLIES
    gateways: int = 1
    syncs: bool = True  # whether several gateways exchange what they sent where (replica sync)
    joins_at_seconds: float = 0.0  # when the last deployment joins the others, by a policy reload
    restarts: tuple[Restart, ...] = ()
    block_tokens: int = BLOCK_TOKENS  # of the engines' caches; others need a trace with `EnginePrompt`s
    processors: float | None = None  # that all engines share; None: each has its own


def policy_for(policy: Policy, deployments: int) -> Policy:
    """The policy with `deployments` copies of its first deployment, which all serve the policy's first model."""
    document = policy.model_dump(by_alias=True)
    copies = [{**document["deployments"][0], "name": f"s{number}"} for number in range(deployments)]
    model = {**document["models"][0], "deployments": [copy["name"] for copy in copies], "fallbacks": []}
    return Policy.model_validate({**document, "deployments": copies, "models": [model], "rules": ()})


def default_policy(deployments: int, **settings: object) -> Policy:
    """A minimal policy with so many deployments, each with these settings."""
    document = {
        "deployments": [{**DEFAULT_DEPLOYMENT, **settings}],
        "models": [{"name": "m", "deployments": ["s"]}],
        "tenants": [{"name": "t"}],
    }
    return policy_for(Policy.model_validate(document), deployments)
