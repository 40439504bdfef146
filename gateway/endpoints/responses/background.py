"""Translates a request that runs in the background (`background: true`), and makes the documents of its states.

The client's request ends when its response is queued. `gateway.background` then runs the request as a stream, and
stores the response each time that its status changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar

import msgspec

from gateway.core.errors import GatewayError
from gateway.core.worker_thread import in_thread
from gateway.endpoints.responses import ResponsesEndpoint, ResponsesTranslator
from gateway.endpoints.responses.body import ResponsesRequest, input_items
from gateway.endpoints.responses.response import UNFINISHED, ResponseObject
from gateway.endpoints.responses.stored import StoredTurn, document_of, with_ids
from gateway.response_store import TenantResponses
from gateway.storage.base import Document

Store = Callable[[TenantResponses, Document], Awaitable[bool]]  # stores the final response


class BackgroundEndpoint(ResponsesEndpoint):
    """The endpoint of one request in the background. Its only translator is `running`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.running: BackgroundTranslator | None = None

    def translator(self, call_id: str) -> BackgroundTranslator:
        self.running = BackgroundTranslator(call_id, self._store)
        return self.running


class BackgroundTranslator(ResponsesTranslator):
    """Translates one request in the background. The documents may be made once the request has been read."""

    in_background: ClassVar[bool] = True

    def __init__(self, call_id: str, store: Store) -> None:
        super().__init__(call_id)
        self._store_final = store

    @property
    def tenant_responses(self) -> TenantResponses:
        assert self._tenant_responses is not None
        return self._tenant_responses

    @property
    def status(self) -> str:
        """The status of the response."""
        assert self._response is not None
        return self._response.status

    @property
    def response_json(self) -> bytes:
        """The response as it is now."""
        return self._whole()

    def queued(self) -> bytes:
        """The response is queued. Returns its first events."""
        assert self._events is not None and self._response is not None
        self._response.status = UNFINISHED[0]
        return self._events.queued()

    def started(self) -> bytes:
        """The response is in progress. Returns the events that say so."""
        assert self._events is not None and self._response is not None
        self._response.status = UNFINISHED[1]
        return self._events.started()

    def failure(self, error: GatewayError) -> bytes:
        """The request failed before its answer began. Returns the last events."""
        assert self._events is not None
        return self._events.failure(error)

    def cancel(self) -> None:
        """The response is cancelled."""
        assert self._response is not None
        self._response.cut()
        self._response.status = "cancelled"

    async def document(self, error: GatewayError | None = None) -> Document:
        """Return the document of a response without a complete answer."""
        assert self._request is not None and self._response is not None
        parts = (self._request, self._response, error)
        return await in_thread(self._state_document, *parts) if self.large else self._state_document(*parts)

    def _state_document(
        self, request: ResponsesRequest, response: ResponseObject, error: GatewayError | None
    ) -> Document:
        fields = {**response.json(response.status, error), "store": True}
        output = [msgspec.json.encode(item) for item in fields["output"]]
        turn = StoredTurn(with_ids(input_items(request.body), self._key), output)
        conversation = request.conversation or ""
        return document_of(fields, turn, request.history, state=response.status, conversation=conversation)

    async def _store(self, request: ResponsesRequest, response: ResponseObject) -> bool:
        parts = (request, response)
        document = await in_thread(self._document, *parts) if self.large else self._document(*parts)
        return await self._store_final(self.tenant_responses, document)
