"""The provider for SGLang: vLLM's API, but the request with the highest priority number runs first."""

from __future__ import annotations

import msgspec

from gateway.providers.vllm import VLLM
from gateway.types import Call


class SGLang(VLLM):
    """Provider for SGLang. Differs from vLLM in the sign of a priority.

    SGLang reports cached tokens if it runs with `--enable-cache-report`, and supports priorities if it runs with
    `--enable-priority-scheduling`.
    """

    # Removed in addition to vLLM's fields, because they select a cache, a session, a worker, or a host to fetch KV
    # blocks from.
    reserved_fields = (
        *VLLM.reserved_fields, "extra_key", "rid", "session_id", "session_params", "routed_dp_rank",
        "data_parallel_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    )  # fmt: skip

    def _priority(self, call: Call) -> msgspec.Raw:
        return msgspec.Raw(b"%d" % -call.latency_class.priority)
