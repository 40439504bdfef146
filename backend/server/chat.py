"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time

from backend.server import replies
from backend.server.asgi import Door, Exchange
from backend.server.generation import Delta, Generation, Task
from backend.server.prompts import chat_prompt
from backend.server.replies import Envelope, Json
from backend.server.requests import ChatRequest, decode
from backend.server.serving import Serving


class ChatCompletions(Door):
    def __init__(self, serving: Serving, closing: asyncio.Future[None]) -> None:
        self._serving = serving
        self.closing = closing

    async def answer(self, exchange: Exchange, body: bytes) -> None:
        request = decode(body, ChatRequest)
        request.check()
        self._serving.check_model(request.model)
        prompt = await self._serving.prepare(len(body), lambda: chat_prompt(self._serving.model, request))
        async with Generation(self._serving, exchange, self._task(request, prompt)) as generation:
            if request.stream:
                await self._stream(exchange, request, generation)
            else:
                await self._whole(exchange, request, generation)

    def _task(self, request: ChatRequest, prompt: list[int]) -> Task:
        model = self._serving.model
        limits = {"max_tokens": request.max_tokens, "max_completion_tokens": request.max_completion_tokens}
        limit_field = next((name for name, limit in limits.items() if limit is not None), "max_tokens")
        max_tokens = model.check_context(len(prompt), limits[limit_field], "messages", limit_field)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return Task(
            operation="chat",
            prompts=[prompt],
            samplings=[model.sampling(request, max_tokens, logprobs, i) for i in range(request.n or 1)],
            stop=request.stop_sequences,
            cache_salt=request.cache_salt or "",
            priority=request.priority or 0,
        )

    async def _whole(self, exchange: Exchange, request: ChatRequest, generation: Generation) -> None:
        parts: list[list[Delta]] = [[] for _ in generation.sequences]
        async for delta in generation.deltas():
            parts[delta.index].append(delta)
        choices = [
            replies.chat_choice(i, replies.joined(deltas), self._logprobs(request, deltas), deltas[-1].finish_reason)
            for i, deltas in enumerate(parts)
        ]
        usage = replies.usage_object(generation.usage)
        envelope = self._envelope("chat.completion", request, generation)
        await exchange.reply(replies.encode(envelope.wrap(choices, usage, with_usage=True)))

    async def _stream(self, exchange: Exchange, request: ChatRequest, generation: Generation) -> None:
        envelope = self._envelope("chat.completion.chunk", request, generation)

        def chunk(choice: Json) -> bytes:
            usage = replies.usage_object(generation.usage) if request.continuous_usage else None
            return replies.event(envelope.wrap([choice], usage, with_usage=request.include_usage))

        frames = b"".join(
            chunk(replies.chat_delta(i, {"role": "assistant", "content": ""})) for i in range(len(generation.sequences))
        )
        async for delta in generation.deltas():
            if delta.text or delta.logprobs:
                logprobs = self._logprobs(request, [delta])
                frames += chunk(replies.chat_delta(delta.index, {"content": delta.text}, logprobs))
            if delta.finish_reason:
                frames += chunk(replies.chat_delta(delta.index, {}, finish_reason=delta.finish_reason))
            if frames:
                await exchange.stream(frames)
            frames = b""
        if request.include_usage:
            usage = replies.usage_object(generation.usage)
            frames = replies.event(envelope.wrap([], usage, with_usage=True))
        await exchange.stream(frames + replies.DONE)
        await exchange.end_stream()

    def _logprobs(self, request: ChatRequest, deltas: list[Delta]) -> Json | None:
        if not request.logprobs:
            return None
        return replies.chat_logprobs(self._serving.model.codec, [lp for delta in deltas for lp in delta.logprobs])

    def _envelope(self, kind: str, request: ChatRequest, generation: Generation) -> Envelope:
        return Envelope(
            id=f"chatcmpl-{generation.id}",
            object=kind,
            created=int(time.time()),
            model=self._serving.model.name,
            service_tier="default" if request.service_tier is not None else None,
        )
