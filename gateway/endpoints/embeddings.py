"""POST /v1/embeddings."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gateway.endpoints.base import HouseDoor
from gateway.endpoints.completions import Prompt, prompt_pieces
from gateway.prompts.reader import Asked, Common, Fields, decode
from gateway.types import Operation


class EmbeddingBody(Common, kw_only=True):
    input: Prompt


_decoder = msgspec.json.Decoder(EmbeddingBody)


class EmbeddingDoor(HouseDoor):
    path: ClassVar[str] = Operation.EMBEDDING.value
    operation: ClassVar[Operation] = Operation.EMBEDDING

    def read(self, fields: Fields, body: bytes) -> Asked:
        embedding = decode(_decoder, body)
        pieces, tokens = prompt_pieces(embedding.input)
        return Asked(
            common=embedding,
            fields=fields,
            pieces=pieces,
            max_output_tokens=0,
            deterministic=True,
            prompt_tokens=tokens,
        )
