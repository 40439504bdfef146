"""vLLM, and Warmpath's own engine, which speaks its dialect: OpenAI's, and more that a gateway wants."""

from __future__ import annotations

import httpx2
import msgspec

from gateway.providers.openai import OpenAI, with_options
from gateway.types import Call, Operation

_TRUE = msgspec.Raw(b"true")

# Fields by which a client would reach past the gateway: into other tenants' caches, ahead of their requests, and, as
# `kv_transfer_params` names hosts to fetch KV blocks from, into the network.
_RESERVED = ("cache_salt", "priority", "kv_transfer_params")


class VLLM(OpenAI):
    """OpenAI's dialect plus `cache_salt`, and usage in every chunk, so that a stream that is left early is metered too.

    `priority` is not sent: vLLM refuses it unless its scheduler was started with `--scheduling-policy priority`.
    """

    def health_url(self, base_url: str) -> httpx2.URL:
        return httpx2.URL(f"{base_url.removesuffix('/v1')}/health")

    def fields(self, call: Call) -> dict[str, msgspec.Raw]:
        fields = super().fields(call)
        for name in _RESERVED:
            fields.pop(name, None)
        if call.operation is not Operation.EMBEDDING and call.cache_salt:
            fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(call.cache_salt))
        if call.stream:
            options = fields["stream_options"]
            fields["stream_options"] = with_options(options, continuous_usage_stats=_TRUE)
        return fields


class Warmpath(VLLM):
    """The bundled engine, whose scheduler always knows priorities: lower goes first."""

    def fields(self, call: Call) -> dict[str, msgspec.Raw]:
        fields = super().fields(call)
        if call.operation is not Operation.EMBEDDING:
            fields["priority"] = msgspec.Raw(b"%d" % call.latency_class.priority)
        return fields
