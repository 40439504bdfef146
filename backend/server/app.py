"""Composition root of the engine's HTTP server: routes, lifespan and error handlers.

Each POST endpoint is an ASGI app of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from backend.kv_transfer.prefix_loader import PATH as KV_BLOCKS_PATH
from backend.server.adapters import LoadAdapterEndpoint, UnloadAdapterEndpoint
from backend.server.asgi import RequestIdMiddleware
from backend.server.chat import ChatCompletionsEndpoint
from backend.server.completions import CompletionsEndpoint
from backend.server.components import ServerComponents
from backend.server.embeddings import EmbeddingsEndpoint
from backend.server.errors import ApiError, EngineFailure, InvalidRequest, MethodNotAllowed, UnknownUrl
from backend.server.info import JSON, InfoEndpoints
from backend.server.kv_blocks import KvBlocksEndpoint
from backend.server.render import RenderChatEndpoint, RenderCompletionsEndpoint
from backend.server.reranks import RerankEndpoint, ScoreEndpoint
from backend.server.tokenization import DetokenizeEndpoint, TokenizeEndpoint


def create_app(components: ServerComponents, closing: asyncio.Future[None]) -> ASGIApp:
    """Returns the ASGI app. Its lifespan starts and stops the engine.

    When the future `closing` is done, responses in progress end with an error. Set its result before the lifespan ends.
    """
    info = InfoEndpoints(components)
    routes = [
        Route("/v1/chat/completions", ChatCompletionsEndpoint(components, closing), methods=["POST"]),
        Route("/v1/completions", CompletionsEndpoint(components, closing), methods=["POST"]),
        Route("/v1/chat/completions/render", RenderChatEndpoint(components, closing), methods=["POST"]),
        Route("/v1/completions/render", RenderCompletionsEndpoint(components, closing), methods=["POST"]),
        Route("/v1/embeddings", EmbeddingsEndpoint(components, closing), methods=["POST"]),
        *(Route(path, RerankEndpoint(components, closing), methods=["POST"]) for path in ("/rerank", "/v1/rerank")),
        Route("/v2/rerank", RerankEndpoint(components, closing, returns_documents=False), methods=["POST"]),
        *(Route(path, ScoreEndpoint(components, closing), methods=["POST"]) for path in ("/score", "/v1/score")),
        Route("/v1/models", info.models),
        Route("/v1/models/{id:path}", info.model),
        Route("/requests/{id}", info.request),
        Route("/health", info.health),
        Route("/version", info.version),
        Route("/metrics", info.metrics),
        Route("/tokenize", TokenizeEndpoint(components, closing), methods=["POST"]),
        Route("/detokenize", DetokenizeEndpoint(components, closing), methods=["POST"]),
    ]
    adapters = components.adapters
    if adapters and components.updates_adapters:
        routes += [
            Route("/v1/load_lora_adapter", LoadAdapterEndpoint(adapters, closing), methods=["POST"]),
            Route("/v1/unload_lora_adapter", UnloadAdapterEndpoint(adapters, closing), methods=["POST"]),
        ]

    transfer = components.kv_transfer
    if transfer and transfer.serves:
        routes.append(Route(KV_BLOCKS_PATH, KvBlocksEndpoint(components, transfer, closing), methods=["POST"]))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await components.engine.start()
        try:
            yield
        finally:
            # Stop the engine before closing the publisher, because the engine's thread publishes KV events to the end.
            await components.engine.stop()
            if components.kv_events is not None:
                components.kv_events.close()
            if adapters is not None:
                adapters.close()
            if transfer is not None and transfer.loader is not None:
                transfer.loader.close()
            if components.images is not None:
                components.images.close()
            components.preparing.close()
            components.grammar_queue.close()
            components.model.grammars.close()
            await asyncio.to_thread(components.tracer.shutdown)

    handlers = {ApiError: _render_api_error, HTTPException: _render_routing_error, Exception: _render_crash}
    # The middleware is outermost, so that Starlette's own response to a crash also has x-request-id.
    return RequestIdMiddleware(Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers))


async def _render_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), status_code=error.status, headers=dict(error.headers), media_type=JSON)


async def _render_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    target = f"{request.method} {request.url.path}"
    if error.status_code == MethodNotAllowed.status:
        return await _render_api_error(request, MethodNotAllowed(f"{target} is not allowed."))
    if error.status_code == UnknownUrl.status:
        return await _render_api_error(request, UnknownUrl(f"{target} does not exist."))
    return await _render_api_error(request, InvalidRequest(error.detail))


async def _render_crash(request: Request, error: Exception) -> Response:
    # uvicorn logs the traceback. The response contains no details of the crash.
    return await _render_api_error(request, EngineFailure("Internal error."))
