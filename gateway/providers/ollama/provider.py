"""The provider for Ollama's own API: sends chats to /api/chat and embeddings to /api/embed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gateway.providers.base import ProviderFailure
from gateway.providers.media_fetch.parts import FILE, IMAGE
from gateway.providers.ollama.request import API, FIELDS, chat_request, embed_request
from gateway.providers.ollama.response import (
    LineSplitter,
    OllamaStreamTranslator,
    chat_completion,
    embedding_list,
    openai_error,
)
from gateway.providers.responses import Splitter
from gateway.providers.translation import Fields, TranslatingProvider
from gateway.types import Call, Operation

_PATHS = {Operation.CHAT: b"chat", Operation.EMBEDDING: b"embed"}


class Ollama(TranslatingProvider):
    """Provider for one model of an Ollama server. `base_url` ends with /api."""

    api: ClassVar[str] = API
    url_parts: ClassVar[frozenset[str]] = frozenset()
    data_parts: ClassVar[frozenset[str]] = frozenset({IMAGE, FILE})
    operations: ClassVar[Mapping[Operation, str]] = {Operation.CHAT: "chats", Operation.EMBEDDING: "embeddings"}
    stream_type: ClassVar[bytes] = b"application/x-ndjson"
    splitter: ClassVar[type[Splitter]] = LineSplitter

    @property
    def models_path(self) -> bytes:
        """The path of the list of local models."""
        return self._base_path + b"/tags"

    def path_of(self, operation: Operation) -> bytes:
        """Return the path of an operation."""
        return _PATHS.get(operation, b"chat")

    def check_fields(self, fields: Fields) -> None:
        """Check the fields by the API's table."""
        FIELDS.check(fields)

    def request_of(self, call: Call) -> dict[str, Any]:
        """Return the body of a chat or an embedding."""
        if call.operation is Operation.EMBEDDING:
            return embed_request(self.fields_of(call), self.model_of(call))
        return chat_request(self.fields_of(call), self.model_of(call), stream=call.stream)

    def translate_answer(self, call: Call, body: bytes) -> bytes:
        """See `chat_completion` and `embedding_list`."""
        return embedding_list(body) if call.operation is Operation.EMBEDDING else chat_completion(body, call.id)

    def stream_translator(self, call: Call) -> OllamaStreamTranslator:
        """Return the translator of one stream."""
        return OllamaStreamTranslator(call.id)

    def translate_error(self, failure: ProviderFailure) -> ProviderFailure:
        """Return the failure with its body in OpenAI's format."""
        failure.body = openai_error(failure.body)
        return failure
