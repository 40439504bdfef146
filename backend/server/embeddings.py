"""POST /v1/embeddings: returns the mean of the final hidden states of each input, normalised to length 1."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from backend.engine.sampling_params import SamplingParams
from backend.layers.lora import LoraAdapter
from backend.server import responses
from backend.server.asgi import Endpoint, HttpExchange
from backend.server.components import ServerComponents
from backend.server.errors import ContextLengthError, EngineFailure, InvalidRequest
from backend.server.generation import Generation
from backend.server.prompts import encode_prompts, prompt_truncator, split_prompts
from backend.server.request_body import decode_body
from backend.server.requests import MAX_EMBEDDING_INPUTS, EmbeddingRequest
from backend.server.sequence import ChoiceDelta, GenerationTask

# Maximum inputs of one request in the engine at a time. The others wait here, so they do not fill the engine's queue.
MAX_INPUTS_IN_ENGINE = 32


class EmbeddingsEndpoint(Endpoint):
    """Serves embeddings of texts and token lists, in waves of at most `MAX_INPUTS_IN_ENGINE` inputs."""

    def __init__(self, components: ServerComponents, closing: asyncio.Future[None]) -> None:
        self._components = components
        self.closing = closing

    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        request = decode_body(body, EmbeddingRequest)
        adapter = self._components.check_model(request.model)
        model = self._components.model
        if request.dimensions not in (None, model.hidden_size):
            raise InvalidRequest(f"This model's embeddings have {model.hidden_size} dimensions.", param="dimensions")
        inputs = split_prompts(request.input, "input")
        if len(inputs) > MAX_EMBEDDING_INPUTS:
            raise InvalidRequest(f"`input` has more than {MAX_EMBEDDING_INPUTS} items.", param="input")
        truncate = prompt_truncator(model, request, model.max_model_len, "right")
        special = request.add_special_tokens is not False
        prompts = await self._components.prepare(
            len(body), lambda: encode_prompts(model, inputs, "input", add_special_tokens=special, truncate=truncate)
        )
        longest = max(len(prompt) for prompt in prompts)
        if longest > model.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {model.max_model_len} tokens, but an input has {longest}.",
                param="input",
            )
        vectors: list[list[float]] = []
        wave_size = min(MAX_INPUTS_IN_ENGINE, self._components.max_sequences)
        for start in range(0, len(prompts), wave_size):
            wave = prompts[start : start + wave_size]
            vectors += await self._embed(exchange, wave, request.priority or 0, adapter)
        total = sum(len(prompt) for prompt in prompts)
        encoding = request.encoding_format or "float"
        payload = {
            "object": "list",
            "data": [responses.embedding(i, vector, encoding) for i, vector in enumerate(vectors)],
            "model": self._components.name_of(adapter),
            "usage": {"prompt_tokens": total, "total_tokens": total},
        }
        await exchange.respond(responses.encode(payload))

    async def _embed(
        self, exchange: HttpExchange, prompts: list[list[int]], priority: int, adapter: LoraAdapter | None
    ) -> list[list[float]]:
        task = GenerationTask(
            operation="embeddings",
            prompts=prompts,
            samplings=[SamplingParams(max_tokens=1)],
            adapter=adapter,
            priority=priority,
            pooling=True,
        )
        vectors: list[list[float]] = [[] for _ in prompts]

        def take(delta: ChoiceDelta) -> None:
            if delta.embedding is None:
                raise EngineFailure("The engine returned no embedding.")
            vectors[delta.index] = _normalised(delta.embedding)

        async with Generation(self._components, exchange, task) as generation:
            await generation.run(take)
        return vectors


def _normalised(vector: Sequence[float]) -> list[float]:
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else list(vector)
