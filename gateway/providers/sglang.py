"""SGLang: OpenAI's dialect, salted caches, and priorities of which the highest goes first."""

from __future__ import annotations

import msgspec

from gateway.providers.vllm import VLLM
from gateway.types import Call


class SGLang(VLLM):
    """As vLLM, but for the sign of a priority. What was cached it tells if it runs with `--enable-cache-report`, and
    priorities it knows with `--enable-priority-scheduling`.
    """

    # Beside what vLLM has: whose cache, whose session, which worker, and which host to fetch KV blocks from.
    reserved = (
        *VLLM.reserved, "extra_key", "rid", "session_id", "session_params", "routed_dp_rank", "data_parallel_rank",
        "bootstrap_host", "bootstrap_port", "bootstrap_room",
    )  # fmt: skip

    def _priority(self, call: Call) -> msgspec.Raw:
        return msgspec.Raw(b"%d" % -call.latency_class.priority)
