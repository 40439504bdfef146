"""GET endpoints: models, health, version, metrics, and the usage record of a finished request."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from backend import __version__
from backend.layers.lora import LoraAdapter
from backend.server import metrics, responses
from backend.server.components import ServerComponents
from backend.server.errors import RequestNotFound
from backend.server.responses import Json, usage_object

JSON = "application/json"


class InfoEndpoints:
    """Handlers of all GET endpoints."""

    def __init__(self, components: ServerComponents) -> None:
        self._components = components

    async def models(self, request: Request) -> Response:
        """GET /v1/models: returns a list with the served model and its adapters."""
        adapters = self._components.adapters
        loaded = adapters.store.adapters if adapters else []
        return _json({"object": "list", "data": [self._model(adapter) for adapter in (None, *loaded)]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}: returns the served model or an adapter. Raises ModelNotFound for any other id."""
        return _json(self._model(self._components.check_model(request.path_params["id"])))

    async def request(self, request: Request) -> Response:
        """GET /requests/{x-request-id}: returns the usage of a finished request.

        The gateway reads the usage here after it has lost the connection.
        """
        request_id = request.path_params["id"]
        usage = self._components.usage_records.get(request_id)
        if usage is None:
            raise RequestNotFound(f"No usage record for `{request_id}`: it is still running, expired or unknown.")
        return _json({"id": request_id, "object": "request", "usage": usage_object(usage)})

    async def health(self, request: Request) -> Response:
        """GET /health: returns status 200 while the engine makes progress, else status 503 with the reason."""
        engine = self._components.engine
        if engine.healthy:
            return _json({"status": "ok"})
        reason = "an engine step has stalled" if engine.stalled else engine.error or "the engine is not running"
        return _json({"status": "error", "reason": reason}, status=503)

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        return Response(self._components.metrics.render(), media_type=metrics.CONTENT_TYPE)

    def _model(self, adapter: LoraAdapter | None) -> Json:
        """An entry of the list, as in vLLM: an adapter's `parent` is the model, its `root` the path of its files."""
        model, adapters = self._components.model, self._components.adapters
        return {
            "id": self._components.name_of(adapter),
            "object": "model",
            "created": model.created,
            "owned_by": "warmpath",
            "root": adapters.path_of(adapter) if adapters and adapter else model.root,
            "parent": model.name if adapter else None,
            "max_model_len": model.max_model_len,
            "architecture": {  # as OpenRouter names it
                "input_modalities": ["text", "image"] if self._components.images else ["text"],
                "output_modalities": ["text"],
            },
        }


def _json(payload: Json, status: int = 200) -> Response:
    return Response(responses.encode(payload), status_code=status, media_type=JSON)
