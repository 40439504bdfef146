"""The provider for TensorRT-LLM's server, trtllm-serve: OpenAI's API, without the fields that the server rejects."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import msgspec

from gateway.policy import Deployment, Secret
from gateway.providers.openai import OpenAI
from gateway.providers.transport import HTTPTransport
from gateway.types import Call, Operation

_FALSE = msgspec.Raw(b"false")


class TensorRTLLM(OpenAI):
    """Provider for trtllm-serve, which has OpenAI's API and rejects every field that it does not know.

    Chats accept `cache_salt`, but completions do not. The server sends usage in every chunk unless the request says
    otherwise. It supports priorities if it runs with `waiting_queue_policy: priority`.
    """

    # Removed from clients' requests, because they bypass the gateway: they reach other tenants' caches, overtake other
    # requests, read the server's disk, or address the servers of a disaggregated deployment.
    reserved_fields: ClassVar[tuple[str, ...]] = (
        "cache_salt", "priority", "lora_request", "disaggregated_params", "conversation_params", "prompt_token_ids_b64",
        "injected_chat_template_kwargs",
    )  # fmt: skip
    # Removed because the gateway acts on them, and the server would reject them as unknown.
    gateway_fields: ClassVar[tuple[str, ...]] = (
        "service_tier", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "store",
    )  # fmt: skip

    def __init__(
        self, deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[Secret], str]
    ) -> None:
        super().__init__(deployment, transport, resolve_secret)
        self._sends_priority = deployment.priorities
        self._usage_options.setdefault("continuous_usage_stats", _FALSE)

    @property
    def health_path(self) -> bytes:
        return self._base_path.removesuffix(b"/v1") + b"/health"

    def body_fields(self, call: Call) -> dict[str, msgspec.Raw]:
        """Return the request fields, without fields that the server rejects or that bypass the gateway.

        Adds the gateway's cache salt and priority.
        """
        fields = super().body_fields(call)
        for name in (*self.reserved_fields, *self.gateway_fields):
            fields.pop(name, None)
        if not call.has_prefix:
            return fields
        if call.cache_salt and call.operation is Operation.CHAT:
            fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(call.cache_salt))
        if self._sends_priority:
            fields["priority"] = msgspec.Raw(msgspec.json.encode(priority_fraction(call.latency_class.priority)))
        return fields


def priority_fraction(priority: int) -> float:
    """Convert a policy's priority to TensorRT-LLM's scale. Priority 0 becomes 0.5, which is the server's default.

    In the policy, the lowest number runs first. In TensorRT-LLM, priorities are from 0 to 1 and the highest runs first.
    """
    return 0.5 - priority / (2 * (1 + abs(priority)))
