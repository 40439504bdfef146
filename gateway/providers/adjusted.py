"""A provider whose requests get the fields and the system prompt that the policy sets for its deployment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.core.worker_thread import in_thread
from gateway.policy import Deployment
from gateway.providers.base import Provider, ProviderFailure, UpstreamResponse
from gateway.types import Call, Operation

SYSTEM_ROLES = ("system", "developer")

_messages = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_encode = msgspec.json.encode


class AdjustedProvider:
    """Adjusts each call, and leaves the rest to the deployment's own provider.

    Chats and completions only: the fields of other requests have other meanings.
    """

    def __init__(self, provider: Provider, deployment: Deployment) -> None:
        self._provider = provider
        self._defaults = {name: msgspec.Raw(_encode(value)) for name, value in deployment.defaults.items()}
        self._overrides = {name: msgspec.Raw(_encode(value)) for name, value in deployment.overrides.items()}
        self._system_prompt = deployment.system_prompt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    def adjust(self, call: Call) -> Call:
        """Return the call as the deployment gets it."""
        call = self._with_fields(call)
        if self._system_prompt is None or call.operation is not Operation.CHAT:
            return call
        messages = with_system_prompt(call.fields["messages"], self._system_prompt)
        return msgspec.structs.replace(call, fields={**call.fields, "messages": messages})

    def _with_fields(self, call: Call) -> Call:
        """Return the call with its top-level fields as the deployment gets them, but without the system prompt."""
        if not call.has_prefix:
            return call
        return msgspec.structs.replace(call, fields={**self._defaults, **call.fields, **self._overrides})

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        return self._provider.unsupported_error(self._with_fields(call))

    def render(self, call: Call) -> bytes:
        return self._provider.render(self.adjust(call))

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        if body is None:
            return await self._provider.open(self.adjust(call), headers=headers)
        return await self._provider.open(self._with_fields(call), headers=headers, body=body)

    async def count_prompt_tokens(self, call: Call) -> int | None:
        adjusted = await in_thread(self.adjust, call) if call.large else self.adjust(call)
        return await self._provider.count_prompt_tokens(adjusted)


def with_system_prompt(messages: msgspec.Raw, text: str) -> msgspec.Raw:
    """Put a text before the first system message's own, or before the conversation if there is none."""
    decoded = _messages(messages)
    first = decoded[0] if decoded else {}
    role = msgspec.json.decode(first["role"]) if "role" in first else None
    content = msgspec.json.decode(first["content"]) if role in SYSTEM_ROLES and "content" in first else None
    if isinstance(content, str):
        decoded[0] = {**first, "content": msgspec.Raw(_encode(f"{text}\n\n{content}"))}
    elif isinstance(content, list):
        decoded[0] = {**first, "content": msgspec.Raw(_encode([{"type": "text", "text": text}, *content]))}
    else:
        decoded.insert(0, {"role": msgspec.Raw(b'"system"'), "content": msgspec.Raw(_encode(text))})
    return msgspec.Raw(_encode(decoded))
