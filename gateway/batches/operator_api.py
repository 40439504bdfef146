"""`GET /admin/batches` and `POST /admin/batches/{id}/cancel`: the batches of all tenants, for operators.

Routes of the admin API, which checks the admin key. Unlike /v1/batches, they name the tenant and the key of a batch.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.batches.records import Batch, BatchStatus
from gateway.batches.stores.base import BatchStore
from gateway.batches.worker import BatchWorker
from gateway.core.errors import Conflict, NotFound
from gateway.core.numbers import whole_number
from gateway.endpoints.replies import json_reply

DEFAULT_LIMIT, LIMIT_MAX = 100, 500


class OperatorBatchApi:
    """Handlers of the routes."""

    def __init__(self, store: BatchStore, worker: BatchWorker) -> None:
        self._store = store
        self._worker = worker

    def routes(self) -> list[Route]:
        """The routes, to be mounted behind the admin key."""
        return [
            Route("/admin/batches", self._list),
            Route("/admin/batches/{id}/cancel", self._cancel, methods=["POST"]),
        ]

    async def _list(self, request: Request) -> Response:
        text = request.query_params.get("limit", str(DEFAULT_LIMIT))
        limit = whole_number(text, "limit", minimum=1, maximum=LIMIT_MAX)
        batches = await self._store.latest_batches(limit)
        return json_reply(200, {"object": "list", "data": [_entry(batch) for batch in batches]})

    async def _cancel(self, request: Request) -> Response:
        batch_id = request.path_params["id"]
        changed = await self._store.update(batch_id, lambda batch: batch.cancelling(time.time()))
        if changed is None:
            changed = await self._store.batch(batch_id)
            if changed is None:
                raise NotFound(f"batch {batch_id[:100]!r} does not exist", param="id")
            if changed.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
                raise Conflict(f"{changed.id} is {changed.status.value} and can no longer be cancelled")
        self._worker.wake()
        return json_reply(200, _entry(changed))


def _entry(batch: Batch) -> dict[str, Any]:
    return {**batch.to_json(), "tenant": batch.tenant, "key_id": batch.key_id, "owner": batch.owner or None}
