"""POST /v1/embeddings: returns a vector of each input, made from hidden states as the model's files say.

Models that say nothing, such as chat models, get the mean of all tokens' final hidden states, normalised to length 1.
"""

from __future__ import annotations

import asyncio

from backend.server import responses
from backend.server.asgi import Endpoint, HttpExchange
from backend.server.components import ServerComponents
from backend.server.errors import ContextLengthError, InvalidRequest
from backend.server.model import ServedModel
from backend.server.prompts import encode_prompts, prompt_truncator, split_prompts
from backend.server.request_body import decode_body
from backend.server.requests import MAX_POOLING_INPUTS, EmbeddingRequest
from backend.server.vectors import PooledRequest, Vector, normalised


class EmbeddingsEndpoint(Endpoint):
    """Serves embeddings of texts and token lists."""

    def __init__(self, components: ServerComponents, closing: asyncio.Future[None]) -> None:
        self._components = components
        self.closing = closing

    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        request = decode_body(body, EmbeddingRequest)
        adapter = self._components.check_model(request.model)
        model = self._components.model
        if model.pooling.classifier is not None:
            raise InvalidRequest("This model scores pairs of texts; it has no embeddings.", param="model")
        _check_dimensions(model, request.dimensions)
        inputs = split_prompts(request.input, "input")
        if len(inputs) > MAX_POOLING_INPUTS:
            raise InvalidRequest(f"`input` has more than {MAX_POOLING_INPUTS} items.", param="input")
        truncate = prompt_truncator(model, request, model.max_model_len, "right")
        special = request.add_special_tokens is not False
        prompts = await self._components.prepare(
            request.cache_salt,
            len(body),
            lambda: encode_prompts(model, inputs, "input", add_special_tokens=special, truncate=truncate),
        )
        longest = max(len(prompt) for prompt in prompts)
        if longest > model.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {model.max_model_len} tokens, but an input has {longest}.",
                param="input",
            )
        pooled = PooledRequest("embeddings", model.pooling.pooling, request.cache_salt, request.priority, adapter)
        vectors, usage = await pooled.run(self._components, exchange, prompts)
        encoding = request.encoding_format or "float"
        details = self._components.prompt_tokens_details
        payload = {
            "object": "list",
            "data": [
                responses.embedding(i, _finished(model, vector, request.dimensions), encoding)
                for i, vector in enumerate(vectors)
            ],
            "model": self._components.name_of(adapter),
            "usage": responses.prompt_usage_object(usage, prompt_tokens_details=details),
        }
        await exchange.respond(responses.encode(payload))


def _check_dimensions(model: ServedModel, dimensions: int | None) -> None:
    if dimensions in (None, model.hidden_size):
        return
    allowed = model.pooling.matryoshka
    if allowed is None:
        raise InvalidRequest(
            f"This model's embeddings have {model.hidden_size} dimensions and cannot be shortened: it was not trained "
            "for that (config.json has no `is_matryoshka` or `matryoshka_dimensions`).",
            param="dimensions",
        )
    if dimensions > model.hidden_size or (allowed and dimensions not in allowed):
        choices = ", ".join(map(str, sorted(allowed))) or f"1 to {model.hidden_size}"
        raise InvalidRequest(f"`dimensions` must be one of {choices}.", param="dimensions")


def _finished(model: ServedModel, vector: Vector, dimensions: int | None) -> Vector:
    """Shortens a vector and normalises it if the model's files say so."""
    vector = vector[:dimensions]
    return normalised(vector) if model.pooling.normalise else vector
