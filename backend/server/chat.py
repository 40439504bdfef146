"""POST /v1/chat/completions: chats with tool calls, reasoning and structured output, streaming or non-streaming.

`task` converts the request to a `GenerationTask`, with a parser per choice if the model writes tool calls or reasoning.
`_whole` and `_stream` send the deltas of the `Generation` as one JSON body or as server-sent events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from backend.engine.constraint import Constraint
from backend.layers.lora import LoraAdapter
from backend.parsers.base import ToolFormat
from backend.parsers.chained import ChainedParser
from backend.parsers.reasoning import ReasoningFormat
from backend.server import responses
from backend.server.asgi import Endpoint, HttpExchange
from backend.server.chat_stream import ChatStream
from backend.server.choices import ChatChoice
from backend.server.components import ServerComponents
from backend.server.constraints import (
    callable_tools,
    chat_constraint,
    is_call_forced,
    is_constrained,
    relaxed_header,
    token_constraint,
)
from backend.server.generation import Generation
from backend.server.kv_transfer import block_source, response_params
from backend.server.messages import NamedToolChoice, num_tool_calls
from backend.server.prompts import chat_prompt
from backend.server.requests import ChatRequest
from backend.server.responses import Envelope, Json
from backend.server.sequence import ChoiceDelta, GenerationTask
from backend.server.unknown_members import decode_chat, ignored_header


class ChatCompletionsEndpoint(Endpoint):
    """Serves OpenAI's chat completions, with vLLM's additional fields."""

    def __init__(self, components: ServerComponents, closing: asyncio.Future[None]) -> None:
        self._components = components
        self.closing = closing

    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        request, ignored = decode_chat(body, ChatRequest)
        exchange.response_headers |= ignored_header(ignored)
        request.check()
        adapter = self._components.check_model(request.model)
        task = await self.task(request, len(body), adapter)
        exchange.response_headers |= relaxed_header(task.grammar)
        async with Generation(self._components, exchange, task) as generation:
            if request.stream:
                await self._stream(exchange, request, generation)
            else:
                await self._whole(exchange, request, generation)

    async def task(self, request: ChatRequest, size_bytes: int, adapter: LoraAdapter | None = None) -> GenerationTask:
        """Renders and tokenises the request, and compiles its grammar. Raises ApiError.

        `size_bytes` is the size of the request's body.
        """
        model = self._components.model
        images = await self._components.load_images(request.messages, request.cache_salt)
        prompt = await self._components.prepare(
            request.cache_salt, size_bytes, lambda: chat_prompt(model, request, images)
        )
        grammar: Constraint | None = token_constraint(model, request)
        if is_constrained(request):
            grammar = await self._components.grammar_queue.run(
                request.cache_salt or "", lambda: chat_constraint(model, request, prompt.text)
            )
        limit_field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = model.check_context(len(prompt.token_ids), request.limit, "messages", limit_field)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        tools, reasoning = self._formats(request)
        markers = (*(tools.markers if tools else ()), *(reasoning.markers if reasoning else ()))
        # The parsers need markers that are special tokens to stay in the text.
        shows_special = any(model.codec.special_token_id(marker) is not None for marker in markers)
        return GenerationTask(
            operation="chat",
            prompts=[prompt.token_ids],
            samplings=[model.sampling(request, max_tokens, logprobs, i) for i in range(request.n or 1)],
            stop=request.stop_sequences,
            grammar=grammar,
            make_parser=self._parser_maker(request, prompt.text) if tools or reasoning else None,
            skip_special_tokens=request.skip_special_tokens is not False and not shows_special,
            include_stop_string=request.shows_stop,
            continues_prompt=bool(request.continue_final_message),
            cache_salt=request.cache_salt or "",
            images=prompt.images,
            adapter=adapter,
            priority=request.priority or 0,
            block_source=block_source(self._components.kv_transfer, request),
        )

    def _formats(self, request: ChatRequest) -> tuple[ToolFormat | None, ReasoningFormat | None]:
        """Returns the tool call format and the reasoning format of the request's output."""
        model = self._components.model
        reasoning = None if request.separate_reasoning is False else model.reasoning_format
        return model.tool_format if callable_tools(request) else None, reasoning

    def _parser_maker(self, request: ChatRequest, prompt: str) -> Callable[[], ChainedParser]:
        tools, reasoning = self._formats(request)
        offered = callable_tools(request)
        return lambda: ChainedParser(
            reasoning.parser(prompt) if reasoning else None,
            tools.parser(offered) if tools else None,
            calls_only=is_call_forced(request),
        )

    def _make_choices(self, request: ChatRequest, generation: Generation) -> list[ChatChoice]:
        return [
            ChatChoice(
                self._components.model.tool_format,
                with_reasoning=request.include_reasoning is not False,
                is_named=isinstance(request.tool_choice, NamedToolChoice),
                num_earlier_calls=num_tool_calls(request.messages),
            )
            for _ in generation.sequences
        ]

    async def _whole(self, exchange: HttpExchange, request: ChatRequest, generation: Generation) -> None:
        choices = self._make_choices(request, generation)
        parts: list[list[ChoiceDelta]] = [[] for _ in generation.sequences]

        def take(delta: ChoiceDelta) -> None:
            parts[delta.index].append(delta)
            choices[delta.index].take(delta)

        await generation.run(take)
        bodies = []
        for i, (choice, deltas) in enumerate(zip(choices, parts, strict=True)):
            reason = choice.finish_reason(deltas[-1].finish_reason)
            logprobs = responses.requested_logprobs(self._components.model.codec, request, deltas)
            body = responses.chat_choice(i, choice.message, logprobs, reason)
            token_ids = responses.token_ids(deltas) if request.return_token_ids else {}
            bodies.append(body | responses.stop_reason(deltas[-1]) | token_ids)
        usage = generation.usage_object
        transfer = self._components.kv_transfer
        extra = self._extra(request, generation)
        extra |= response_params(transfer, request, exchange.headers, generation.id)
        if request.prompt_logprobs is not None:
            scored = parts[0][0].prompt_logprobs or ()
            extra["prompt_logprobs"] = responses.prompt_logprobs(self._components.model.codec, scored)
        envelope = self._envelope("chat.completion", request, generation)
        await exchange.respond(responses.encode(envelope.wrap(bodies, usage, with_usage=True, extra=extra)))

    async def _stream(self, exchange: HttpExchange, request: ChatRequest, generation: Generation) -> None:
        envelope = self._envelope("chat.completion.chunk", request, generation)
        stream = ChatStream(
            envelope,
            request,
            self._make_choices(request, generation),
            self._components.model.codec,
            lambda: generation.usage_object,
            self._extra(request, generation),
        )

        def take(delta: ChoiceDelta) -> None:
            if events := stream.events(delta):
                exchange.write(events)

        await generation.run(take)
        await exchange.stream(stream.closing())
        await exchange.end_stream()

    def _extra(self, request: ChatRequest, generation: Generation) -> Json:
        if not request.return_token_ids:
            return {}
        return {"prompt_token_ids": generation.sequences[0].request.prompt_token_ids}

    def _envelope(self, kind: str, request: ChatRequest, generation: Generation) -> Envelope:
        return Envelope(
            id=f"chatcmpl-{generation.id}",
            object=kind,
            created=int(time.time()),
            model=generation.model_name,
            service_tier="default" if request.service_tier is not None else None,
        )
