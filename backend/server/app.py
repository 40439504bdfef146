"""Composition root of the engine server: parts, routes, lifespan. Starlette is the shell, the doors are bare ASGI."""

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

from backend.server.asgi import RequestIds
from backend.server.catalogue import JSON, Catalogue, Detokenize, Tokenize
from backend.server.chat import ChatCompletions
from backend.server.completions import Completions
from backend.server.embeddings import Embeddings
from backend.server.errors import ApiError, EngineFailure, InvalidRequest, MethodNotAllowed, UnknownUrl
from backend.server.render import RenderChat, RenderCompletions
from backend.server.serving import Serving


def create_app(serving: Serving, closing: asyncio.Future[None]) -> ASGIApp:
    """`closing`: once it is done, replies that still run are ended with an error. Close it before the lifespan ends."""
    catalogue = Catalogue(serving)
    routes = [
        Route("/v1/chat/completions", ChatCompletions(serving, closing), methods=["POST"]),
        Route("/v1/completions", Completions(serving, closing), methods=["POST"]),
        Route("/v1/chat/completions/render", RenderChat(serving, closing), methods=["POST"]),
        Route("/v1/completions/render", RenderCompletions(serving, closing), methods=["POST"]),
        Route("/v1/embeddings", Embeddings(serving, closing), methods=["POST"]),
        Route("/v1/models", catalogue.models),
        Route("/v1/models/{id:path}", catalogue.model),
        Route("/requests/{id}", catalogue.request),
        Route("/health", catalogue.health),
        Route("/version", catalogue.version),
        Route("/metrics", catalogue.metrics),
        Route("/tokenize", Tokenize(serving, closing), methods=["POST"]),
        Route("/detokenize", Detokenize(serving, closing), methods=["POST"]),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await serving.engine.start()
        try:
            yield
        finally:
            await serving.engine.stop()
            if serving.kv_events is not None:
                serving.kv_events.close()
            serving.executor.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(serving.tracer.shutdown)

    handlers = {ApiError: _refused, HTTPException: _unroutable, Exception: _crashed}
    # Outside Starlette, so that its own answer to a crash carries the request's id, too.
    return RequestIds(Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers))


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), status_code=error.status, headers=dict(error.headers), media_type=JSON)


async def _unroutable(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path}"
    if error.status_code == MethodNotAllowed.status:
        return await _refused(request, MethodNotAllowed(f"There is no {place}."))
    if error.status_code == UnknownUrl.status:
        return await _refused(request, UnknownUrl(f"There is no {place}."))
    return await _refused(request, InvalidRequest(error.detail))


async def _crashed(request: Request, error: Exception) -> Response:
    # The server logs the traceback; the client learns only that it was not its fault.
    return await _refused(request, EngineFailure("Internal error."))
