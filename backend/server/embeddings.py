"""POST /v1/embeddings: the mean of the final hidden states, scaled to length 1."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from backend.engine.request import SamplingParams
from backend.server import replies
from backend.server.asgi import Door, Exchange
from backend.server.decoding import decode
from backend.server.errors import ContextLengthError, EngineFailure, InvalidRequest
from backend.server.generation import Generation
from backend.server.prompts import encode_prompts, prompt_cut, split_prompts
from backend.server.requests import MAX_EMBEDDING_INPUTS, EmbeddingRequest
from backend.server.sequence import Task
from backend.server.serving import Serving

# Inputs of one request that are in the engine together. The rest wait here, not in the engine's queue before others.
MAX_INPUTS_IN_ENGINE = 32


class Embeddings(Door):
    def __init__(self, serving: Serving, closing: asyncio.Future[None]) -> None:
        self._serving = serving
        self.closing = closing

    async def answer(self, exchange: Exchange, body: bytes) -> None:
        request = decode(body, EmbeddingRequest)
        self._serving.check_model(request.model)
        model = self._serving.model
        if request.dimensions not in (None, model.hidden_size):
            raise InvalidRequest(f"This model's embeddings have {model.hidden_size} dimensions.", param="dimensions")
        inputs = split_prompts(request.input, "input")
        if len(inputs) > MAX_EMBEDDING_INPUTS:
            raise InvalidRequest(f"More than {MAX_EMBEDDING_INPUTS} inputs.", param="input")
        cut = prompt_cut(model, request, model.max_model_len, "right")
        special = request.add_special_tokens is not False
        prompts = await self._serving.prepare(
            len(body), lambda: encode_prompts(model, inputs, "input", add_special_tokens=special, cut=cut)
        )
        longest = max(len(prompt) for prompt in prompts)
        if longest > model.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {model.max_model_len} tokens; an input has {longest}.",
                param="input",
            )
        vectors: list[list[float]] = []
        wave_size = min(MAX_INPUTS_IN_ENGINE, self._serving.max_sequences)
        for start in range(0, len(prompts), wave_size):
            wave = prompts[start : start + wave_size]
            vectors += await self._embed(exchange, wave, request.priority or 0)
        total = sum(len(prompt) for prompt in prompts)
        encoding = request.encoding_format or "float"
        reply = {
            "object": "list",
            "data": [replies.embedding(i, vector, encoding) for i, vector in enumerate(vectors)],
            "model": model.name,
            "usage": {"prompt_tokens": total, "total_tokens": total},
        }
        await exchange.reply(replies.encode(reply))

    async def _embed(self, exchange: Exchange, prompts: list[list[int]], priority: int) -> list[list[float]]:
        task = Task(
            operation="embeddings",
            prompts=prompts,
            samplings=[SamplingParams(max_tokens=1)],
            priority=priority,
            pooling=True,
        )
        vectors: list[list[float]] = [[] for _ in prompts]
        async with Generation(self._serving, exchange, task) as generation:
            async for delta in generation.deltas():
                if delta.embedding is None:
                    raise EngineFailure("The engine gave no embedding.")
                vectors[delta.index] = _normalised(delta.embedding)
        return vectors


def _normalised(vector: Sequence[float]) -> list[float]:
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else list(vector)
