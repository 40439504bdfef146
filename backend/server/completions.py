"""POST /v1/completions: completes one or several prompts, given as text or tokens, with `echo` and `best_of`.

`task` converts the request to a `GenerationTask`. `_whole` and `_stream` send the deltas of the `Generation` as one
JSON body or as server-sent events. With `echo`, the text of a choice begins with its prompt (`heads`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from backend.engine.constraint import Constraint
from backend.layers.lora import LoraAdapter
from backend.server import responses
from backend.server.asgi import Endpoint, HttpExchange
from backend.server.components import ServerComponents
from backend.server.constraints import is_constrained, relaxed_header, text_constraint, token_constraint
from backend.server.errors import InvalidRequest
from backend.server.generation import Generation
from backend.server.kv_transfer import block_source, response_params
from backend.server.prompts import Prompt, encode_prompts, prompt_text, prompt_truncator, split_prompts
from backend.server.request_body import decode_body
from backend.server.requests import MAX_CHOICES_TOTAL, CompletionRequest
from backend.server.responses import Envelope, Json, TextEvent
from backend.server.sequence import ChoiceDelta, GenerationTask
from backend.server.unknown_members import ignored_header

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint


class CompletionsEndpoint(Endpoint):
    """Serves OpenAI's text completions, with vLLM's additional fields."""

    def __init__(self, components: ServerComponents, closing: asyncio.Future[None]) -> None:
        self._components = components
        self.closing = closing

    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        ignored: list[str] = []
        request = decode_body(body, CompletionRequest, ignored)
        exchange.response_headers |= ignored_header(ignored)
        request.check()
        adapter = self._components.check_model(request.model)
        prompts = split_prompts(request.prompt, "prompt")
        if len(prompts) * request.num_choices > MAX_CHOICES_TOTAL:
            raise InvalidRequest(f"The number of prompts times choices exceeds {MAX_CHOICES_TOTAL}.", param="prompt")
        task = await self.task(request, prompts, len(body), adapter)
        exchange.response_headers |= relaxed_header(task.grammar)
        echoed_prompts = prompts if request.truncate_prompt_tokens is None else task.prompts
        async with Generation(self._components, exchange, task) as generation:
            # The text that each choice begins with: its prompt with `echo`, else nothing.
            heads = [self._head(request, prompt) for prompt in echoed_prompts for _ in range(request.num_choices)]
            if request.stream:
                await self._stream(exchange, request, generation, heads)
            else:
                await self._whole(exchange, request, generation, heads)

    async def task(
        self, request: CompletionRequest, prompts: list[Prompt], size_bytes: int, adapter: LoraAdapter | None = None
    ) -> GenerationTask:
        """Tokenises the prompts and compiles the request's grammar. Raises ApiError.

        `size_bytes` is the size of the request's body.
        """
        model = self._components.model
        special = request.add_special_tokens is not False
        truncate = prompt_truncator(model, request, model.max_model_len - (request.max_tokens or 1), "left")
        encoded = await self._components.prepare(
            request.cache_salt,
            size_bytes,
            lambda: encode_prompts(model, prompts, "prompt", add_special_tokens=special, truncate=truncate),
        )
        grammar: Constraint | None = token_constraint(model, request)
        if is_constrained(request):
            grammar = await self._components.grammar_queue.run(
                request.cache_salt or "", lambda: text_constraint(model, request)
            )
        longest = max(len(prompt) for prompt in encoded)
        room = model.check_context(longest, request.max_tokens, "prompt")
        max_tokens = request.max_tokens if request.max_tokens is not None else min(DEFAULT_MAX_TOKENS, room)
        # `best_of` ranks by log-probability, so the engine must compute it even if the client does not ask for it.
        ranked = request.num_choices > (request.n or 1)
        logprobs = 0 if request.logprobs is None and ranked else request.logprobs
        echoed = request.logprobs if request.echo else None
        choices = range(request.num_choices)
        return GenerationTask(
            operation="text_completion",
            prompts=encoded,
            samplings=[model.sampling(request, max_tokens, logprobs, i, echoed) for i in choices],
            stop=request.stop_sequences,
            grammar=grammar,
            skip_special_tokens=request.skip_special_tokens is not False,
            include_stop_string=request.shows_stop,
            continues_prompt=True,
            cache_salt=request.cache_salt or "",
            adapter=adapter,
            priority=request.priority or 0,
            block_source=block_source(self._components.kv_transfer, request),
        )

    def _head(self, request: CompletionRequest, prompt: Prompt) -> str:
        return prompt_text(self._components.model.codec, prompt) if request.echo else ""

    async def _whole(
        self, exchange: HttpExchange, request: CompletionRequest, generation: Generation, heads: list[str]
    ) -> None:
        parts: list[list[ChoiceDelta]] = [[] for _ in generation.sequences]
        await generation.run(lambda delta: parts[delta.index].append(delta))
        choices: list[Json] = []
        for start in range(0, len(parts), request.num_choices):
            for i in self._best(request, parts, start):
                prompt, deltas = generation.sequences[i].request.prompt_token_ids, parts[i]
                logprobs = self._logprobs(request, deltas, 0, prompt)
                text = heads[i] + responses.joined(deltas)
                choice = responses.text_choice(len(choices), text, logprobs, deltas[-1].finish_reason)
                choice |= responses.stop_reason(deltas[-1])
                choices.append(choice | self._extra(request, deltas, prompt))
        usage = generation.usage_object
        extra = response_params(self._components.kv_transfer, request, exchange.headers, generation.id)
        await exchange.respond(
            responses.encode(self._envelope(request, generation).wrap(choices, usage, with_usage=True, extra=extra))
        )

    def _best(self, request: CompletionRequest, parts: list[list[ChoiceDelta]], start: int) -> Sequence[int]:
        """Returns the indices of the `n` choices of one prompt that have the best mean log-probability."""
        generated = range(start, start + request.num_choices)
        num_returned = request.n or 1
        return (
            generated
            if len(generated) == num_returned
            else sorted(generated, key=lambda i: -_mean_logprob(parts[i]))[:num_returned]
        )

    async def _stream(
        self, exchange: HttpExchange, request: CompletionRequest, generation: Generation, heads: list[str]
    ) -> None:
        envelope = self._envelope(request, generation)

        def chunk(choice: Json) -> bytes:
            usage = generation.usage_object if request.continuous_usage else None
            return responses.event(envelope.wrap([choice], usage, with_usage=request.include_usage))

        offsets = [0 for _ in heads]
        started = [False for _ in heads]
        has_only_text = request.logprobs is None and not (request.return_token_ids or request.continuous_usage)

        def text_event(index: int) -> TextEvent:
            return TextEvent(
                lambda text: envelope.wrap(
                    [responses.text_choice(index, text, None, None)], None, with_usage=request.include_usage
                )
            )

        text_events = [text_event(i) for i in range(len(heads))]  # most chunks of a long answer

        def take(delta: ChoiceDelta) -> None:
            i = delta.index
            if has_only_text and started[i] and delta.finish_reason is None:
                if delta.text:
                    exchange.write(text_events[i](delta.text))
                return
            if not (
                delta.text or delta.logprobs or delta.finish_reason or (request.return_token_ids and delta.token_ids)
            ):
                return
            prompt = generation.sequences[i].request.prompt_token_ids
            logprobs = self._logprobs(request, [delta], offsets[i], prompt)
            offsets[i] += sum(len(token) for token in logprobs["tokens"]) if logprobs else 0
            text = delta.text if started[i] else heads[i] + delta.text
            choice = responses.text_choice(i, text, logprobs, delta.finish_reason) | responses.stop_reason(delta)
            exchange.write(chunk(choice | self._extra(request, [delta], None if started[i] else prompt)))
            started[i] = True

        await generation.run(take)
        frames = b""
        if request.include_usage:
            usage = generation.usage_object
            frames = responses.event(envelope.wrap([], usage, with_usage=True))
        await exchange.stream(frames + responses.DONE)
        await exchange.end_stream()

    def _logprobs(
        self, request: CompletionRequest, deltas: list[ChoiceDelta], offset: int, prompt: list[int]
    ) -> Json | None:
        if request.logprobs is None:
            return None
        name = responses.token_namer(self._components.model.codec, request)
        parts = []
        if request.echo and deltas[0].prompt_logprobs is not None:
            parts.append(responses.echoed_logprobs(name, prompt, deltas[0].prompt_logprobs))
            offset += sum(map(len, parts[0]["tokens"]))
        logprobs = [lp for delta in deltas for lp in delta.logprobs]
        return responses.joined_logprobs([*parts, responses.text_logprobs(name, logprobs, offset)])

    def _extra(self, request: CompletionRequest, deltas: list[ChoiceDelta], prompt: list[int] | None) -> Json:
        """Returns vLLM's additional fields that the request asks for. `prompt` is None after the first chunk."""
        extra: Json = {}
        if request.return_token_ids:
            extra |= responses.token_ids(deltas) | ({} if prompt is None else {"prompt_token_ids": prompt})
        if request.prompt_logprobs is not None:
            scored = deltas[0].prompt_logprobs or ()
            extra["prompt_logprobs"] = responses.prompt_logprobs(self._components.model.codec, scored)
        return extra

    def _envelope(self, request: CompletionRequest, generation: Generation) -> Envelope:
        return Envelope(
            id=f"cmpl-{generation.id}",
            object="text_completion",
            created=int(time.time()),
            model=generation.model_name,
            service_tier="default" if request.service_tier is not None else None,
        )


def _mean_logprob(deltas: list[ChoiceDelta]) -> float:
    """Returns the mean log-probability per token, by which OpenAI ranks `best_of`. Without tokens, it is 0."""
    logprobs = [token.logprob for delta in deltas for token in delta.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0
