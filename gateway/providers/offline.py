"""A provider that sends nothing, for programs that simulate deployments."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.providers.base import ProviderFailure, UpstreamResponse
from gateway.types import Call, TokenCounters


class OfflineProvider:
    """Provider for programs that simulate deployments. Sends nothing; `render` and `open` raise `AssertionError`."""

    has_usage_records = False
    continues_final_message = False

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        return None

    def media_to_fetch(self, call: Call) -> frozenset[str]:
        return frozenset()

    def render(self, call: Call) -> bytes:
        raise AssertionError("an offline provider sends nothing")

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        raise AssertionError("an offline provider sends nothing")

    async def healthy(self) -> bool:
        return False

    async def recorded_usage(self, call_id: str, *, patient: bool = False) -> bytes | None:
        return None

    async def count_prompt_tokens(self, call: Call) -> int | None:
        return None

    async def count_text_tokens(self, text: str) -> int | None:
        return None

    async def token_counters(self) -> TokenCounters | None:
        return None
