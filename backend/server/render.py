"""POST /v1/chat/completions/render and /v1/completions/render: tokenise a request without running it.

The response contains vLLM's `GenerateRequest` for each prompt. Routers made for vLLM read a prompt's tokens from it.
"""

from __future__ import annotations

import asyncio

import msgspec

from backend.server import responses
from backend.server.asgi import Endpoint, HttpExchange
from backend.server.chat import ChatCompletionsEndpoint
from backend.server.completions import CompletionsEndpoint
from backend.server.components import ServerComponents
from backend.server.prompts import split_prompts
from backend.server.request_body import decode_body
from backend.server.requests import ChatRequest, CompletionRequest, GenerationRequest
from backend.server.responses import Json
from backend.server.sequence import GenerationTask
from backend.server.unknown_members import decode_chat, ignored_header


class RenderChatEndpoint(Endpoint):
    """Tokenises a chat request. The response is one `GenerateRequest`."""

    def __init__(self, components: ServerComponents, closing: asyncio.Future[None]) -> None:
        self._components = components
        self._chat = ChatCompletionsEndpoint(components, closing)
        self.closing = closing

    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        request, ignored = decode_chat(body, ChatRequest)
        exchange.response_headers |= ignored_header(ignored)
        request.check()
        adapter = self._components.check_model(request.model)
        task = await self._chat.task(request, len(body))
        name = self._components.name_of(adapter)
        (rendered,) = _generate_requests(f"chatcmpl-{exchange.request_id}", name, request, task)
        await exchange.respond(responses.encode(rendered))


class RenderCompletionsEndpoint(Endpoint):
    """Tokenises a completion request. The response is a list of `GenerateRequest`, one per prompt."""

    def __init__(self, components: ServerComponents, closing: asyncio.Future[None]) -> None:
        self._components = components
        self._completions = CompletionsEndpoint(components, closing)
        self.closing = closing

    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        ignored: list[str] = []
        request = decode_body(body, CompletionRequest, ignored)
        exchange.response_headers |= ignored_header(ignored)
        request.check()
        adapter = self._components.check_model(request.model)
        task = await self._completions.task(request, split_prompts(request.prompt, "prompt"), len(body))
        name = self._components.name_of(adapter)
        rendered = _generate_requests(f"cmpl-{exchange.request_id}", name, request, task)
        await exchange.respond(responses.encode(rendered))


def _generate_requests(request_id: str, model: str, request: GenerationRequest, task: GenerationTask) -> list[Json]:
    """Returns vLLM's `GenerateRequest` for each prompt, with the sampling parameters in effect."""
    sampling = task.samplings[0]
    params = {
        "n": len(task.samplings),
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias.items()} or None,
        "bad_words": request.bad_words or [],
        "allowed_token_ids": request.allowed_token_ids,
        "seed": request.seed,
        "stop": task.stop,
        "stop_token_ids": sorted(sampling.stop_token_ids),
        "ignore_eos": bool(request.ignore_eos),
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "skip_special_tokens": task.skip_special_tokens,
        "include_stop_str_in_output": task.include_stop_string,
    }
    return [
        {
            "request_id": request_id,
            "token_ids": token_ids,
            "features": _features(task),
            "sampling_params": params,
            "model": model,
            "stream": bool(request.stream),
            "stream_options": msgspec.to_builtins(request.stream_options),
            "cache_salt": request.cache_salt,
            "priority": task.priority,
            "kv_transfer_params": None,
        }
        for token_ids in task.prompts
    ]


def _features(task: GenerationTask) -> Json | None:
    """Returns vLLM's description of a prompt's images: which they are, and where their tokens are. No pixels."""
    if task.images is None:
        return None
    placed = task.images.images
    return {
        "mm_hashes": {"image": [each.image.digest.hex() for each in placed]},
        "mm_placeholders": {"image": [{"offset": each.start, "length": each.end - each.start} for each in placed]},
    }
