"""Computes one vector for each prompt of a request: embeddings, or the logits of a model that scores.

`PooledRequest.run` submits the prompts to the engine in waves of at most `MAX_PROMPTS_IN_ENGINE`. Each wave is one
`Generation`, so a client that leaves aborts the wave, and the usage record has the tokens of all waves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from backend.engine.pooling import Pooling
from backend.engine.sampling_params import SamplingParams
from backend.layers.lora import LoraAdapter
from backend.server.asgi import HttpExchange
from backend.server.components import ServerComponents
from backend.server.errors import EngineFailure
from backend.server.generation import Generation
from backend.server.sequence import ChoiceDelta, GenerationTask
from backend.server.usage_records import NO_USAGE, TokenUsage

# Maximum prompts of one request in the engine at a time. The others wait here, so they do not fill the engine's queue.
MAX_PROMPTS_IN_ENGINE = 32

Vector = Sequence[float]


@dataclass(frozen=True, slots=True)
class PooledRequest:
    """How a request's prompts are computed."""

    operation: str  # as in `GenerationTask`
    pooling: Pooling
    cache_salt: str | None
    priority: int | None
    adapter: LoraAdapter | None

    async def run(
        self, components: ServerComponents, exchange: HttpExchange, prompts: list[list[int]]
    ) -> tuple[list[Vector], TokenUsage]:
        """Returns the vectors in the order of the prompts, and the tokens of all prompts. Raises ApiError."""
        task = GenerationTask(
            operation=self.operation,
            prompts=[],
            samplings=[SamplingParams(max_tokens=1)],
            cache_salt=self.cache_salt or "",
            adapter=self.adapter,
            priority=self.priority or 0,
            pooling=self.pooling,
        )
        vectors: list[Vector] = []
        usage = NO_USAGE
        size = min(MAX_PROMPTS_IN_ENGINE, components.max_sequences)
        for start in range(0, len(prompts), size):
            wave = replace(task, prompts=prompts[start : start + size], earlier_usage=usage)
            async with Generation(components, exchange, wave) as generation:
                vectors += await _vectors(generation)
            usage += generation.usage
        return vectors, usage


async def _vectors(generation: Generation) -> list[Vector]:
    vectors: list[Vector] = [()] * len(generation.sequences)

    def take(delta: ChoiceDelta) -> None:
        if delta.pooled is None:
            raise EngineFailure("The engine returned no vector.")
        vectors[delta.index] = delta.pooled

    await generation.run(take)
    return vectors


def normalised(vector: Vector) -> Vector:
    """Returns the vector with length 1, or the zero vector unchanged."""
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else vector


def cosine(a: Vector, b: Vector) -> float:
    """The cosine of the angle between two vectors; 0 if one of them is zero."""
    lengths = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0
