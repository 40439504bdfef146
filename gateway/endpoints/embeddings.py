"""POST /v1/embeddings: embeds one or several inputs, each given as text or as token ids."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gateway.endpoints.base import NativeEndpoint
from gateway.endpoints.completions import Prompt, prompt_pieces
from gateway.prompts.reader import CommonFields, Fields, ParsedBody, decode
from gateway.types import Operation


class EmbeddingBody(CommonFields, kw_only=True):
    """The fields of an embedding request that the gateway acts on."""

    input: Prompt


_decoder = msgspec.json.Decoder(EmbeddingBody)


class EmbeddingEndpoint(NativeEndpoint):
    """POST /v1/embeddings. An embedding has no output tokens, so `max_output_tokens` is 0."""

    path: ClassVar[str] = Operation.EMBEDDING.value
    operation: ClassVar[Operation] = Operation.EMBEDDING

    def read(self, fields: Fields, body: bytes) -> ParsedBody:
        embedding = decode(_decoder, body)
        pieces, tokens = prompt_pieces(embedding.input)
        return ParsedBody(
            common=embedding,
            fields=fields,
            pieces=pieces,
            max_output_tokens=0,
            deterministic=True,
            prompt_tokens=tokens,
        )
