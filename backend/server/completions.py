"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time

from backend.server import replies
from backend.server.asgi import Door, Exchange
from backend.server.errors import InvalidRequest
from backend.server.generation import Delta, Generation, Task
from backend.server.prompts import Prompt, encode_prompts, prompt_text, split_prompts
from backend.server.replies import Envelope, Json
from backend.server.requests import MAX_CHOICES, CompletionRequest, decode
from backend.server.serving import Serving

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class Completions(Door):
    def __init__(self, serving: Serving, closing: asyncio.Future[None]) -> None:
        self._serving = serving
        self.closing = closing

    async def answer(self, exchange: Exchange, body: bytes) -> None:
        request = decode(body, CompletionRequest)
        request.check()
        self._serving.check_model(request.model)
        prompts = split_prompts(request.prompt, "prompt")
        if len(prompts) * (request.n or 1) > MAX_CHOICES:
            raise InvalidRequest(f"Prompts times `n` is more than {MAX_CHOICES}.", param="prompt")
        model = self._serving.model
        encoded = await self._serving.prepare(len(body), lambda: encode_prompts(model, prompts, "prompt"))
        async with Generation(self._serving, exchange, self._task(request, encoded)) as generation:
            # The text that each choice begins with.
            heads = [self._head(request, prompt) for prompt in prompts for _ in range(request.n or 1)]
            if request.stream:
                await self._stream(exchange, request, generation, heads)
            else:
                await self._whole(exchange, request, generation, heads)

    def _task(self, request: CompletionRequest, prompts: list[list[int]]) -> Task:
        model = self._serving.model
        longest = max(len(prompt) for prompt in prompts)
        room = model.check_context(longest, request.max_tokens, "prompt")
        max_tokens = request.max_tokens if request.max_tokens is not None else min(DEFAULT_MAX_TOKENS, room)
        return Task(
            operation="text_completion",
            prompts=prompts,
            samplings=[model.sampling(request, max_tokens, request.logprobs, i) for i in range(request.n or 1)],
            stop=request.stop_sequences,
            cache_salt=request.cache_salt or "",
            priority=request.priority or 0,
        )

    def _head(self, request: CompletionRequest, prompt: Prompt) -> str:
        return prompt_text(self._serving.model.codec, prompt) if request.echo else ""

    async def _whole(
        self, exchange: Exchange, request: CompletionRequest, generation: Generation, heads: list[str]
    ) -> None:
        parts: list[list[Delta]] = [[] for _ in generation.sequences]
        async for delta in generation.deltas():
            parts[delta.index].append(delta)
        choices = []
        for i, (head, deltas) in enumerate(zip(heads, parts, strict=True)):
            logprobs = self._logprobs(request, deltas, 0)
            choices.append(replies.text_choice(i, head + replies.joined(deltas), logprobs, deltas[-1].finish_reason))
        usage = replies.usage_object(generation.usage)
        await exchange.reply(replies.encode(self._envelope(request, generation).wrap(choices, usage, with_usage=True)))

    async def _stream(
        self, exchange: Exchange, request: CompletionRequest, generation: Generation, heads: list[str]
    ) -> None:
        envelope = self._envelope(request, generation)

        def chunk(choice: Json) -> bytes:
            usage = replies.usage_object(generation.usage) if request.continuous_usage else None
            return replies.event(envelope.wrap([choice], usage, with_usage=request.include_usage))

        frames = b"".join(chunk(replies.text_choice(i, head, None, None)) for i, head in enumerate(heads) if head)
        offsets = [0 for _ in heads]
        async for delta in generation.deltas():
            if delta.text or delta.logprobs or delta.finish_reason:
                logprobs = self._logprobs(request, [delta], offsets[delta.index])
                frames += chunk(replies.text_choice(delta.index, delta.text, logprobs, delta.finish_reason))
                offsets[delta.index] += sum(len(token) for token in logprobs["tokens"]) if logprobs else 0
            if frames:
                await exchange.stream(frames)
            frames = b""
        if request.include_usage:
            usage = replies.usage_object(generation.usage)
            frames = replies.event(envelope.wrap([], usage, with_usage=True))
        await exchange.stream(frames + replies.DONE)
        await exchange.end_stream()

    def _logprobs(self, request: CompletionRequest, deltas: list[Delta], offset: int) -> Json | None:
        if request.logprobs is None:
            return None
        logprobs = [lp for delta in deltas for lp in delta.logprobs]
        return replies.text_logprobs(self._serving.model.codec, logprobs, offset)

    def _envelope(self, request: CompletionRequest, generation: Generation) -> Envelope:
        return Envelope(
            id=f"cmpl-{generation.id}",
            object="text_completion",
            created=int(time.time()),
            model=self._serving.model.name,
            service_tier="default" if request.service_tier is not None else None,
        )
