"""The provider for llama.cpp's server: OpenAI's API, with the choice of a cache slot for each call."""

from __future__ import annotations

import msgspec

from gateway.providers.openai import OpenAI
from gateway.types import Call

_TRUE = msgspec.Raw(b"true")


class LlamaCpp(OpenAI):
    """Provider for llama.cpp. Each call runs in one of the server's cache slots and reuses the prompt cached there.

    The router chooses the slot (`id_slot`). If it chooses none, the server does. Clients cannot choose a slot, because
    the slot may contain another tenant's conversation. `cache_prompt` makes the server reuse the slot's content.
    """

    @property
    def health_path(self) -> bytes:
        return self._base_path.removesuffix(b"/v1") + b"/health"

    def body_fields(self, call: Call) -> dict[str, msgspec.Raw]:
        """Return the request fields, with the slot that the router chose and with `cache_prompt`."""
        fields = super().body_fields(call)
        fields.pop("id_slot", None)
        if call.has_prefix:
            fields["cache_prompt"] = _TRUE
            if call.cache_slot is not None:
                fields["id_slot"] = msgspec.Raw(b"%d" % call.cache_slot)
        return fields
