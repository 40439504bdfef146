"""The part of a scripted provider that its script does not need."""

from __future__ import annotations

from gateway.providers.base import Provider, ProviderFailure
from gateway.types import Call, TokenCounters


class SilentProvider(Provider):
    """Is healthy and can express every call, but has no usage records and counts no tokens. `open` is abstract."""

    has_usage_records: bool = False
    continues_final_message: bool = False

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        return None

    def media_to_fetch(self, call: Call) -> frozenset[str]:
        return frozenset()

    def render(self, call: Call) -> bytes:
        return b""

    async def healthy(self) -> bool:
        return True

    async def recorded_usage(self, call_id: str, *, patient: bool = False) -> bytes | None:
        return None

    async def count_prompt_tokens(self, call: Call) -> int | None:
        return None

    async def count_text_tokens(self, text: str) -> int | None:
        return None

    async def token_counters(self) -> TokenCounters | None:
        return None
