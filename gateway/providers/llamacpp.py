"""llama.cpp's server: OpenAI's dialect, and slots."""

from __future__ import annotations

import msgspec

from gateway.providers.openai import OpenAI
from gateway.types import Call, Operation

_TRUE = msgspec.Raw(b"true")


class LlamaCpp(OpenAI):
    """A call goes to the slot that the router chose (`id_slot`); where it chose none, the server does. What the slot
    holds is reused (`cache_prompt`). No client names a slot: it would reach into another one's conversation."""

    @property
    def health_path(self) -> bytes:
        return self._base_path.removesuffix(b"/v1") + b"/health"

    def fields(self, call: Call) -> dict[str, msgspec.Raw]:
        fields = super().fields(call)
        fields.pop("id_slot", None)
        if call.operation is not Operation.EMBEDDING:
            fields["cache_prompt"] = _TRUE
            if call.cache_slot is not None:
                fields["id_slot"] = msgspec.Raw(b"%d" % call.cache_slot)
        return fields
