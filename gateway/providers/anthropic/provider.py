"""The provider for Anthropic's Messages API: sends a chat call as a message request, and returns a chat completion.

`request` builds the request body, and `response` translates complete answers and the events of streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from gateway.core.worker_thread import in_thread
from gateway.policy import Deployment, Secret
from gateway.providers.anthropic.fields import API, check_fields
from gateway.providers.anthropic.request import message_request
from gateway.providers.anthropic.response import MessageStreamTranslator, chat_completion, openai_error
from gateway.providers.base import ProviderFailure
from gateway.providers.media_fetch.parts import FILE, IMAGE
from gateway.providers.native import counted_tokens
from gateway.providers.translation import Fields, TranslatingProvider, UnsupportedField
from gateway.providers.transport import HTTPTransport
from gateway.providers.upstream_errors import MAX_ERROR_BYTES
from gateway.types import Call, Operation

VERSION = b"2026-10-21"
OVERLOADED_STATUS = 529  # Anthropic's status for overload; elsewhere the status is 503
_COUNTED_FIELDS = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control")


class Anthropic(TranslatingProvider):
    """Provider for one deployment of Anthropic's API, or of a server with a compatible Messages API."""

    api: ClassVar[str] = API
    url_parts: ClassVar[frozenset[str]] = frozenset({IMAGE, FILE})
    data_parts: ClassVar[frozenset[str]] = url_parts
    extra_headers: ClassVar[tuple[tuple[bytes, bytes], ...]] = ((b"anthropic-version", VERSION),)

    def __init__(
        self, deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[Secret], str]
    ) -> None:
        super().__init__(deployment, transport, resolve_secret)
        self._default_max_tokens = deployment.default_max_tokens

    def path_of(self, operation: Operation) -> bytes:
        """Return the path of the Messages API, which has only one."""
        return b"messages"

    def check_fields(self, fields: Fields) -> None:
        """See `fields`."""
        check_fields(fields)

    def request_of(self, call: Call) -> dict[str, Any]:
        """Return the chat as the body of a Messages request."""
        request = message_request(self.fields_of(call), self.model_of(call), self._default_max_tokens)
        return {**request, "stream": True} if call.stream else request

    def translate_answer(self, call: Call, body: bytes) -> bytes:
        """See `chat_completion`."""
        return chat_completion(body)

    def stream_translator(self, call: Call) -> MessageStreamTranslator:
        """Return the translator of one stream."""
        return MessageStreamTranslator()

    def translate_error(self, failure: ProviderFailure) -> ProviderFailure:
        """Return the failure with its body in OpenAI's format, and with status 503 instead of Anthropic's 529."""
        if failure.status == OVERLOADED_STATUS:
            failure.status = 503
        failure.body = openai_error(failure.body)
        return failure

    async def count_prompt_tokens(self, call: Call) -> int | None:
        """Request the count from /messages/count_tokens. See `Provider.count_prompt_tokens`."""
        if self.passes(call):
            return await super().count_prompt_tokens(call)
        try:
            body = await in_thread(self._counted, call) if call.large else self._counted(call)
        except UnsupportedField:
            return None
        return counted_tokens(await self._post(self._base_path + b"/messages/count_tokens", body, MAX_ERROR_BYTES))

    def _counted(self, call: Call) -> bytes:
        request = self.request_of(call)
        return msgspec.json.encode({name: request[name] for name in _COUNTED_FIELDS if name in request})
