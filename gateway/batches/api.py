"""OpenAI's /v1/files and /v1/batches: the routes that upload files, and create, list and cancel batches.

Only the tenant whose key created a file or batch can use it. For other tenants it does not exist (404).
Handlers only read and write records. `BatchWorker.wake` makes the worker act on a new or cancelled batch at once.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway.auth.authenticator import Authenticator
from gateway.batches.lines import ENDPOINTS, FileCheck
from gateway.batches.records import DAY_SECONDS, INPUT_PURPOSE, Batch, BatchStatus, File, new_id
from gateway.batches.stores.base import CHUNK_BYTES, BatchStore
from gateway.batches.uploads import UploadForm, check_purpose, receive
from gateway.batches.worker import BatchWorker
from gateway.core.errors import BadRequest, BodyTooLarge, Conflict, NotFound, Overloaded
from gateway.core.numbers import whole_number
from gateway.endpoints.replies import json_reply
from gateway.policy import Policy
from gateway.policy.fields import Seconds
from gateway.policy.file import PolicyHolder
from gateway.prompts.reader import Metadata, decode
from gateway.types import Principal

UPLOADS_AT_ONCE = 16
CREATE_MAX_BYTES = 64 * 1024
FILES_PER_PAGE = 10_000  # OpenAI's page sizes
BATCHES_PER_PAGE = 20
BATCHES_PER_PAGE_MAX = 100


class ExpiresAfter(msgspec.Struct):
    """OpenAI's `output_expires_after`: the lifetime of the output files, from their creation."""

    anchor: str
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=30 * DAY_SECONDS)]


class NewBatch(msgspec.Struct):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


_new_batch = msgspec.json.Decoder(NewBatch)
_seconds: TypeAdapter[float] = TypeAdapter(Seconds)


class BatchApi:
    """Handlers of the Batch API's routes. At most `UPLOADS_AT_ONCE` uploads run at the same time."""

    def __init__(
        self,
        authenticator: Authenticator,
        policies: PolicyHolder,
        store: BatchStore,
        worker: BatchWorker,
        *,
        max_file_bytes: int,
        max_line_bytes: int,
    ) -> None:
        self._authenticator = authenticator
        self._policies = policies
        self._store = store
        self._worker = worker
        self._max_file_bytes = max_file_bytes
        self._max_line_bytes = max_line_bytes
        self._uploads = 0

    def routes(self) -> list[Route]:
        return [
            Route("/v1/files", self._upload, methods=["POST"]),
            Route("/v1/files", self._list_files, methods=["GET"]),
            Route("/v1/files/{id}", self._show_file, methods=["GET"]),
            Route("/v1/files/{id}", self._delete_file, methods=["DELETE"]),
            Route("/v1/files/{id}/content", self._content, methods=["GET"]),
            Route("/v1/batches", self._create, methods=["POST"]),
            Route("/v1/batches", self._list_batches, methods=["GET"]),
            Route("/v1/batches/{id}", self._show_batch, methods=["GET"]),
            Route("/v1/batches/{id}/cancel", self._cancel, methods=["POST"]),
        ]

    async def _authenticate(self, request: Request) -> tuple[Principal, Policy]:
        policy = self._policies.current
        return await self._authenticator.authenticate(dict(request.scope["headers"]), policy), policy

    # Files

    async def _upload(self, request: Request) -> Response:
        principal, policy = await self._authenticate(request)
        if self._uploads >= UPLOADS_AT_ONCE:
            raise Overloaded(f"{UPLOADS_AT_ONCE} files are already being uploaded", retry_after_seconds=5.0)
        self._uploads += 1
        file_id, added = new_id("file-"), False
        try:
            check = FileCheck(max_lines=policy.batches.max_lines, max_line_bytes=self._max_line_bytes)
            form, stored = await receive(request, self._store, file_id, check, max_bytes=self._max_file_bytes)
            file = _new_file(file_id, form, stored, principal, policy)
            added = await self._store.add_file(file, max_stored_bytes=policy.batches.max_stored_bytes)
        finally:
            self._uploads -= 1
            if not added:
                await self._store.delete_content(file_id)
        if not added:
            raise BodyTooLarge(
                f"the tenant's files may have at most {policy.batches.max_stored_bytes} bytes in total: delete some",
                param="file",
            )
        return json_reply(200, file.to_json())

    async def _list_files(self, request: Request) -> Response:
        principal, _ = await self._authenticate(request)
        limit = _limit(request, default=FILES_PER_PAGE, maximum=FILES_PER_PAGE)
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest("order: must be asc or desc", param="order")
        files = await self._store.files(
            principal.tenant_name,
            purpose=request.query_params.get("purpose"),
            after=request.query_params.get("after"),
            limit=limit + 1,
            newest_first=order == "desc",
        )
        return _page([file.to_json() for file in files], limit)

    async def _requested_file(self, request: Request) -> File:
        principal, _ = await self._authenticate(request)
        return await self._file(request.path_params["id"], principal, param="id")

    async def _file(self, file_id: str, principal: Principal, *, param: str) -> File:
        file = await self._store.file(file_id)
        # An expired file may still be in the store until the next sweep.
        if file is None or file.tenant != principal.tenant_name or file.expires_at <= time.time():
            raise NotFound(f"file {file_id[:100]!r} does not exist", param=param)
        return file

    async def _show_file(self, request: Request) -> Response:
        return json_reply(200, (await self._requested_file(request)).to_json())

    async def _delete_file(self, request: Request) -> Response:
        file = await self._requested_file(request)
        # Without its input file, an open batch would fail.
        for batch in await self._store.open_batches():
            if batch.input_file_id == file.id:
                raise Conflict(f"{file.id} is the input of {batch.id}, which has not ended: cancel that batch first")
        await self._store.delete_file(file)
        return json_reply(200, {"id": file.id, "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        """Stream a file's content from the store, one chunk in memory at a time."""
        file = await self._requested_file(request)
        headers = {"content-length": str(file.bytes)}
        return StreamingResponse(self._chunks(file), headers=headers, media_type="application/octet-stream")

    async def _chunks(self, file: File) -> AsyncIterator[bytes]:
        for offset in range(0, file.bytes, CHUNK_BYTES):
            yield await self._store.read(file.id, offset, CHUNK_BYTES)

    # Batches

    async def _create(self, request: Request) -> Response:
        principal, policy = await self._authenticate(request)
        wanted = decode(_new_batch, await _small_body(request))
        if wanted.endpoint not in ENDPOINTS:
            known = ", ".join(ENDPOINTS)
            raise BadRequest(f"endpoint: must be one of {known}, not {wanted.endpoint[:100]!r}", param="endpoint")
        window = _window_seconds(wanted.completion_window)
        try:
            file = await self._file(wanted.input_file_id, principal, param="input_file_id")
        except NotFound as error:
            raise BadRequest(error.message, param="input_file_id") from None
        if file.purpose != INPUT_PURPOSE:
            raise BadRequest(
                f"input_file_id: the purpose of {file.id} is {file.purpose}, not {INPUT_PURPOSE}", param="input_file_id"
            )
        now = time.time()
        batch = Batch(
            id=new_id("batch_"),
            tenant=principal.tenant_name,
            key_id=principal.key_id,
            endpoint=wanted.endpoint,
            input_file_id=file.id,
            completion_window=wanted.completion_window,
            created_at=int(now),
            expires_at=int(now + window),
            metadata=wanted.metadata,
            output_expires_seconds=wanted.output_expires_after.seconds if wanted.output_expires_after else None,
        )
        if not await self._store.add_batch(batch, max_open=policy.batches.max_open):
            raise Conflict(f"{policy.batches.max_open} batches are open: wait until one ends, or cancel one")
        self._worker.wake()
        return json_reply(200, batch.to_json())

    async def _list_batches(self, request: Request) -> Response:
        principal, _ = await self._authenticate(request)
        limit = _limit(request, default=BATCHES_PER_PAGE, maximum=BATCHES_PER_PAGE_MAX)
        after = request.query_params.get("after")
        batches = await self._store.batches(principal.tenant_name, after=after, limit=limit + 1)
        return _page([batch.to_json() for batch in batches], limit)

    async def _requested_batch(self, request: Request) -> Batch:
        principal, _ = await self._authenticate(request)
        batch_id = request.path_params["id"]
        batch = await self._store.batch(batch_id)
        if batch is None or batch.tenant != principal.tenant_name:
            raise NotFound(f"batch {batch_id[:100]!r} does not exist", param="id")
        return batch

    async def _show_batch(self, request: Request) -> Response:
        return json_reply(200, (await self._requested_batch(request)).to_json())

    async def _cancel(self, request: Request) -> Response:
        batch = await self._requested_batch(request)
        changed = await self._store.update(batch.id, lambda each: each.cancelling(time.time()))
        if changed is None:
            # The batch did not change, because it is already being cancelled or can no longer be cancelled.
            changed = await self._requested_batch(request)
            if changed.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
                raise Conflict(f"{batch.id} is {changed.status.value} and can no longer be cancelled")
        self._worker.wake()
        return json_reply(200, changed.to_json())


def _new_file(file_id: str, form: UploadForm, stored: int, principal: Principal, policy: Policy) -> File:
    """Create the record of an uploaded file. Raises `BadRequest` if the form's fields are invalid."""
    fields = dict(form.fields)
    purpose = fields.pop("purpose", "")
    check_purpose(purpose)
    anchor, seconds = fields.pop("expires_after[anchor]", None), fields.pop("expires_after[seconds]", None)
    if fields:
        raise BadRequest(f"the form has an unknown field {next(iter(fields))[:100]!r}", param=next(iter(fields))[:100])
    keep = policy.batches.keep
    if seconds is not None or anchor is not None:
        if anchor != "created_at":
            raise BadRequest("expires_after: the anchor must be created_at", param="expires_after[anchor]")
        name = "expires_after[seconds]"
        keep = float(whole_number(seconds or "", name, minimum=3600, maximum=30 * DAY_SECONDS))
    now = time.time()
    return File(
        id=file_id,
        tenant=principal.tenant_name,
        filename=form.filename or "file",
        purpose=purpose,
        bytes=stored,
        created_at=int(now),
        expires_at=int(now + keep),
    )


async def _small_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > CREATE_MAX_BYTES:
            raise BodyTooLarge(f"the body is larger than {CREATE_MAX_BYTES} bytes")
    return bytes(body)


def _window_seconds(window: str) -> float:
    try:
        seconds = _seconds.validate_python(window)
    except ValidationError:
        seconds = 0.0
    if not 0 < seconds <= DAY_SECONDS:
        raise BadRequest("completion_window: must be 24h or shorter, for example 30m or 1h", param="completion_window")
    return seconds


def _limit(request: Request, *, default: int, maximum: int) -> int:
    given = request.query_params.get("limit", str(default))
    return whole_number(given, "limit", minimum=1, maximum=maximum)


def _page(shown: Sequence[dict[str, Any]], limit: int) -> Response:
    """Return OpenAI's list object. If there is a next page, `shown` has one row more than `limit`."""
    data = shown[:limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return json_reply(200, {"object": "list", "data": data, **ends, "has_more": len(shown) > limit})
