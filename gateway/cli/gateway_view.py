"""What `warmpath status` and `warmpath top` show of a running gateway, computed from its admin API."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any

from gateway.cli.admin_client import AdminClient

WINDOW_SECONDS = 60  # over which rates, hit rates and times are computed
CALLS_READ = 500  # the recent calls that are read at once
_SAMPLE = re.compile(r"^(warmpath_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Call = dict[str, Any]  # as in GET /admin/calls


@dataclass(frozen=True, slots=True)
class CallStats:
    """Statistics of the calls of one tenant, or of the attempts on one deployment, that started within the window."""

    name: str
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float | None  # median

    @property
    def hit_rate(self) -> float | None:
        """The share of prompt tokens that were read from the prefix cache; None without prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """One deployment: its state and its traffic. `slots`: its maximum concurrency."""

    state: str
    in_flight: int
    slots: int
    stats: CallStats


@dataclass(frozen=True, slots=True)
class GatewayView:
    """A gateway at one moment. `calls`: the recent ones, latest start first. `queued`: by latency class."""

    url: str
    status: str
    faults: tuple[str, ...]
    policy: str
    in_flight: int
    queued: dict[str, int]
    deployments: tuple[DeploymentView, ...]
    tenants: tuple[CallStats, ...]
    calls: tuple[Call, ...]
    errors: tuple[Call, ...]


def read_view(client: AdminClient) -> GatewayView:
    """Reads state, policy, metrics and recent calls. Raises `AdminError`."""
    state, policy = client.json("/admin/state"), client.json("/admin/policy")
    metrics = _metrics(client.text("/admin/metrics"))
    calls: list[Call] = client.json("/admin/calls", limit=str(CALLS_READ))["data"]
    troubled: list[Call] = client.json("/admin/calls", limit=str(CALLS_READ), troubled="true")["data"]
    since = (datetime.now(UTC) - timedelta(seconds=WINDOW_SECONDS)).isoformat(timespec="milliseconds")[:23]
    recent = [call for call in calls if call["time"][:23] >= since]
    by_tenant = _grouped(recent, "tenant")
    return GatewayView(
        url=client.url,
        status=state["status"],
        faults=tuple(map(str, state["faults"])),
        policy=state["policy"],
        in_flight=int(sum(metrics["warmpath_inflight"].values())),
        queued={name: int(_value(metrics["warmpath_queue_depth"], name)) for name in policy["classes"]},
        deployments=tuple(
            DeploymentView(
                _state_of(one["name"], state, metrics),
                int(_value(metrics["warmpath_deployment_inflight"], one["name"])),
                one["max_concurrency"],
                deployment_stats(one["name"], recent),
            )
            for one in policy["deployments"]
        ),
        tenants=tuple(call_stats(name, by_tenant[name]) for name in sorted(by_tenant)),
        calls=tuple(calls),
        errors=tuple(call for call in troubled if call["outcome"] != "complete"),
    )


def find_call(client: AdminClient, request_id: str) -> Call | None:
    """The recent call with this request id, trace id or event id. Raises `AdminError`."""
    for name in (None, *client.json("/admin/policy")["classes"]):
        for troubled in ("false", "true"):
            query = {"limit": str(CALLS_READ), "troubled": troubled} | ({"class": name} if name else {})
            for call in client.json("/admin/calls", **query)["data"]:
                if request_id in (call["call_id"], call["trace_id"], call["event_id"]):
                    found: Call = call
                    return found
    return None


def deployment_stats(name: str, calls: Sequence[Call]) -> CallStats:
    """The statistics of a deployment: of all attempts on it, and of the calls that it answered."""
    attempts = [attempt for call in calls for attempt in call["attempts"] if attempt["deployment"] == name]
    answered = call_stats(name, [call for call in calls if call["deployment"] == name])
    failed = sum(attempt["failed"] for attempt in attempts)
    return replace(answered, requests=len(attempts), failed=failed)


def call_stats(name: str, calls: Sequence[Call]) -> CallStats:
    """The statistics of these calls."""
    usages = [call["usage"] for call in calls if call["usage"]]
    cached = sum(usage["cache_read"] for usage in usages)
    ttfts = [call["ttft_ms"] for call in calls if call["ttft_ms"] is not None]
    return CallStats(
        name=name,
        requests=len(calls),
        failed=sum(call["result"] == "failed" for call in calls),
        prompt_tokens=cached + sum(usage["input_uncached"] + usage["cache_write"] for usage in usages),
        cached_tokens=cached,
        output_tokens=sum(usage["output"] for usage in usages),
        ttft_ms=median(ttfts) if ttfts else None,
    )


def _grouped(calls: Sequence[Call], field: str) -> defaultdict[str, list[Call]]:
    grouped: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        if call[field] is not None:
            grouped[call[field]].append(call)
    return grouped


def _state_of(name: str, state: dict[str, Any], metrics: dict[str, dict[tuple[str, ...], float]]) -> str:
    """`ok`, or why the deployment gets no traffic."""
    breaker = next((key[1] for key, on in metrics["warmpath_deployment_breaker"].items() if key[0] == name and on), "")
    if breaker not in ("", "closed"):
        return f"breaker {breaker.replace('_', '-')}"
    if reason := state["unavailable"].get(name):
        return str(reason)
    return "ok" if state["deployments"].get(name, True) else "unavailable"


def _metrics(text: str) -> defaultdict[str, dict[tuple[str, ...], float]]:
    """The samples of Prometheus text by name, then by the values of their labels; those of workers are added up."""
    found: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for name, labels, value in _SAMPLE.findall(text):
        key = tuple(text for label, text in _LABEL.findall(labels) if label != "worker")
        found[name][key] = found[name].get(key, 0.0) + float(value)
    return found


def _value(samples: dict[tuple[str, ...], float], label: str) -> float:
    return sum(value for key, value in samples.items() if label in key)
