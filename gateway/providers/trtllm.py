"""TensorRT-LLM's server, trtllm-serve: OpenAI's dialect, of which it refuses every field that it does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import msgspec

from gateway.policy import Deployment, EnvSecret
from gateway.providers.openai import OpenAI
from gateway.providers.transport import HTTPTransport
from gateway.types import Call, Operation

_FALSE = msgspec.Raw(b"false")


class TensorRTLLM(OpenAI):
    """Chats are salted by `cache_salt`, which completions do not know there. Counts in every chunk are its habit unless
    it is told not to. Priorities it knows with `waiting_queue_policy: priority`.
    """

    # Fields by which a client would reach past the gateway: other tenants' caches, other requests' turns, the disk of
    # the server, and the other servers of a divided one.
    reserved: ClassVar[tuple[str, ...]] = (
        "cache_salt", "priority", "lora_request", "disaggregated_params", "conversation_params", "prompt_token_ids_b64",
        "injected_chat_template_kwargs",
    )  # fmt: skip
    # What the gateway acts on, and a server that does not know it would refuse.
    acted_on: ClassVar[tuple[str, ...]] = (
        "service_tier", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "store",
    )  # fmt: skip

    def __init__(
        self, deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[EnvSecret], str]
    ) -> None:
        super().__init__(deployment, transport, resolve_secret)
        self._knows_priorities = deployment.priorities
        self._usage_options.setdefault("continuous_usage_stats", _FALSE)

    @property
    def health_path(self) -> bytes:
        return self._base_path.removesuffix(b"/v1") + b"/health"

    def fields(self, call: Call) -> dict[str, msgspec.Raw]:
        fields = super().fields(call)
        for name in (*self.reserved, *self.acted_on):
            fields.pop(name, None)
        if call.operation is Operation.EMBEDDING:
            return fields
        if call.cache_salt and call.operation is Operation.CHAT:
            fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(call.cache_salt))
        if self._knows_priorities:
            fields["priority"] = msgspec.Raw(msgspec.json.encode(share_of(call.latency_class.priority)))
        return fields


def share_of(priority: int) -> float:
    """A priority of the policy, of which the lowest goes first, as one from 0 to 1 of which the highest does; 0 is 0.5,
    as for calls that say nothing.
    """
    return 0.5 - priority / (2 * (1 + abs(priority)))
