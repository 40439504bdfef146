"""Makes calls from real bodies through the real canonicaliser, for tests of later phases."""

from __future__ import annotations

import json
from typing import Any

from gateway.endpoints import ENDPOINTS
from gateway.endpoints.base import Endpoint
from gateway.policy import Policy
from gateway.prompts.canonicaliser import Canonicaliser, new_call_id
from gateway.types import Call, Operation, Principal, Trace

UNTRACED = Trace(trace_id=1, parent_span_id=0, sampled=False)


def a_policy(**changes: Any) -> Policy:
    """Two servers of one model, one tenant without limits."""
    return Policy.model_validate(
        {
            "deployments": [
                {"name": name, "base_url": f"http://{name}.invalid/v1", "model": "served", "max_concurrency": 2}
                for name in ("a", "b")
            ],
            "models": [{"name": "m", "aliases": ["alias"], "deployments": ["a", "b"]}],
            "tenants": [{"name": "t"}, {"name": "u"}],
            **changes,
        }
    )


def chat(content: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


def a_call(
    body: dict[str, Any] | bytes | None = None,
    policy: Policy | None = None,
    *,
    tenant: str = "t",
    key: str = "k",
    key_models: frozenset[str] | None = None,
    operation: Operation = Operation.CHAT,
    endpoint: Endpoint | None = None,
    headers: dict[bytes, bytes] | None = None,
    now: float = 0.0,
) -> Call:
    policy = policy or a_policy()
    content = body if isinstance(body, bytes) else json.dumps(chat() if body is None else body).encode()
    return Canonicaliser(b"secret").canonicalise(
        endpoint or next(endpoint for endpoint in ENDPOINTS if endpoint.operation is operation),
        content,
        headers or {},
        call_id=new_call_id(),
        principal=Principal(policy.tenants_by_name[tenant], key, key_models),
        policy=policy,
        now=now,
        trace=UNTRACED,
    )
