"""The provider for Gemini's own API: sends a chat call to `generateContent`, and returns a chat completion."""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import quote

import msgspec

from gateway.core.worker_thread import in_thread
from gateway.providers.base import ProviderFailure
from gateway.providers.gemini.request import API, FIELDS, generate_request
from gateway.providers.gemini.response import GeminiStreamTranslator, chat_completion, openai_error
from gateway.providers.media_fetch.parts import ALL_PARTS
from gateway.providers.sse import UNREADABLE
from gateway.providers.translation import Fields, TranslatingProvider, UnsupportedField
from gateway.providers.upstream_errors import MAX_ERROR_BYTES
from gateway.providers.usage.base import TokenCount
from gateway.types import Call

_COLLECTIONS = ("models/", "tunedModels/")


class _CountedPrompt(msgspec.Struct, rename="camel"):
    total_tokens: TokenCount


_token_count = msgspec.json.Decoder(_CountedPrompt).decode


class Gemini(TranslatingProvider):
    """Provider for one model of Gemini's API. `base_url` ends with the API's version, as in /v1beta."""

    api: ClassVar[str] = API
    url_parts: ClassVar[frozenset[str]] = ALL_PARTS
    key_header: ClassVar[str] = "x-goog-api-key"

    def target_of(self, call: Call) -> bytes:
        """Return the path of the model's method, and its query."""
        method, query = b"generateContent", self._query
        if call.stream:
            method, query = b"streamGenerateContent", b"?alt=sse" + query.replace(b"?", b"&", 1)
        return b"%b/%b:%b%b" % (self._base_path, self._model_path(call).encode(), method, query)

    def _model_path(self, call: Call) -> str:
        name = self.model_of(call)
        collection = next((each for each in _COLLECTIONS if name.startswith(each)), "")
        return f"{collection or 'models/'}{quote(name.removeprefix(collection), safe='')}"

    def check_fields(self, fields: Fields) -> None:
        """Check the fields by the API's table."""
        FIELDS.check(fields)

    def request_of(self, call: Call) -> dict[str, Any]:
        """Return the chat as the body of a request to generate content."""
        return generate_request(self.fields_of(call), self.model_of(call))

    def translate_answer(self, call: Call, body: bytes) -> bytes:
        """See `chat_completion`."""
        return chat_completion(body)

    def stream_translator(self, call: Call) -> GeminiStreamTranslator:
        """Return the translator of one stream."""
        return GeminiStreamTranslator()

    def translate_error(self, failure: ProviderFailure) -> ProviderFailure:
        """Return the failure with its body in OpenAI's format."""
        failure.body = openai_error(failure.body)
        return failure

    async def count_prompt_tokens(self, call: Call) -> int | None:
        """Request the count from `countTokens`. See `Provider.count_prompt_tokens`."""
        try:
            body = await in_thread(self._counted, call) if call.large else self._counted(call)
        except UnsupportedField:
            return None
        path = b"%b/%b:countTokens%b" % (self._base_path, self._model_path(call).encode(), self._query)
        response = await self._post(path, body, MAX_ERROR_BYTES)
        try:
            return None if response is None else _token_count(response).total_tokens
        except UNREADABLE:
            return None

    def _counted(self, call: Call) -> bytes:
        request = {"model": self._model_path(call), **self.request_of(call)}
        return msgspec.json.encode({"generateContentRequest": request})
