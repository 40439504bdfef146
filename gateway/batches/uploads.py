"""POST /v1/files: parses a multipart form, and writes its file to the store chunk by chunk as it arrives.

`receive` reads the request and passes it to python-multipart. The callbacks in `_FormReader` collect the fields and the
file's bytes. `FileCheck` checks each complete chunk of the file, which is then written to the store. Only one chunk,
one line, and the custom ids of the lines are in memory.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from gateway.batches.lines import FileCheck
from gateway.batches.records import INPUT_PURPOSE
from gateway.batches.stores.base import CHUNK_BYTES, BatchStore
from gateway.core.errors import BadRequest, BodyTooLarge, RequestTimeout
from gateway.endpoints.wire import STALL_SECONDS

FIELD_MAX_BYTES = 1024  # most bytes of a field other than the file
FIELDS_MAX = 16
FORM_MAX_BYTES = 64 * 1024  # most bytes of the form, in addition to the file
FILENAME_MAX_CHARACTERS = 255
# Control characters, which are removed from file names.
_NOT_IN_NAMES = re.compile(r"[\x00-\x1f\x7f]")


@dataclass
class UploadForm:
    """The form's fields, and the received bytes of its file that are not yet in the store."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    pending: bytearray = field(default_factory=bytearray)


class _FormReader:
    """Collects the form from python-multipart's callbacks, which announce parts and deliver their bytes."""

    def __init__(self, boundary: bytes) -> None:
        self.form = UploadForm()
        self.ended = False
        self._header, self._value = b"", b""
        self._disposition = b""
        self._field: str | None = None  # the name of the current field, or None inside the file
        self._content = bytearray()
        self.parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_part_end": self._part_end,
                "on_end": self._end,
            },
        )

    def _begin(self) -> None:
        self._disposition = b""
        self._content.clear()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if b"filename" in options or name == "file":
            if name != "file" or self.form.filename is not None:
                raise BadRequest("the form must have exactly one file, in the field `file`", param="file")
            filename = options.get(b"filename", b"").decode("utf-8", "replace")
            if "purpose" in self.form.fields:  # checked before a file for another purpose is read as lines
                check_purpose(self.form.fields["purpose"])
            self.form.filename = _NOT_IN_NAMES.sub("", filename)[:FILENAME_MAX_CHARACTERS] or "file"
            self._field = None
            return
        if len(self.form.fields) >= FIELDS_MAX or name in self.form.fields:
            raise BadRequest(f"the form has the field {name[:100]!r} twice, or has more than {FIELDS_MAX} fields")
        self._field = name

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self.form.pending += data[start:end]
            return
        self._content += data[start:end]
        if len(self._content) > FIELD_MAX_BYTES:
            raise BadRequest(f"the field {self._field[:100]!r} is too long", param=self._field[:100])

    def _part_end(self) -> None:
        if self._field is not None:
            self.form.fields[self._field] = self._content.decode("utf-8", "replace")
            self._field = None

    def _end(self) -> None:
        self.ended = True


def check_purpose(purpose: str) -> None:
    """Raise `BadRequest` unless the purpose is `batch`, the only one supported."""
    if purpose != INPUT_PURPOSE:
        raise BadRequest(f"purpose: must be {INPUT_PURPOSE}, not {purpose[:50]!r}", param="purpose")


async def receive(
    request: Request, store: BatchStore, content: str, check: FileCheck, *, max_bytes: int
) -> tuple[UploadForm, int]:
    """Write the form's file to the store under the id `content`. Returns the form, and the size of its file in bytes.

    Raises `BadRequest`, `BodyTooLarge` or `RequestTimeout`. The caller must then delete the content from the store.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise BadRequest("upload a file as multipart/form-data with the fields `purpose` and `file`")
    return await _store(_chunks(request), _reader(options[b"boundary"]), store, content, check, max_bytes)


def _reader(boundary: bytes) -> _FormReader:
    try:
        return _FormReader(boundary)
    except FormParserError as problem:
        raise BadRequest(f"the multipart boundary is invalid: {problem}") from None


async def _store(
    chunks: AsyncIterator[bytes], reader: _FormReader, store: BatchStore, content: str, check: FileCheck, max_bytes: int
) -> tuple[UploadForm, int]:
    form, received, stored = reader.form, 0, 0
    async for chunk in chunks:
        received += len(chunk)
        # The file's exact size is known only at its end, so this check limits the size of the complete form.
        if received > max_bytes + FORM_MAX_BYTES:
            raise BodyTooLarge(f"a file may have at most {max_bytes} bytes", param="file")
        try:
            reader.parser.write(chunk)
        except FormParserError as problem:
            raise BadRequest(f"the form is not valid multipart data: {problem}") from None
        while len(form.pending) >= CHUNK_BYTES:
            stored += await _put(bytes(form.pending[:CHUNK_BYTES]), form, store, content, check)
    if not reader.ended or form.filename is None:
        raise BadRequest("the form has no file, or is incomplete", param="file")
    if form.pending:
        stored += await _put(bytes(form.pending), form, store, content, check)
    if stored > max_bytes:
        raise BodyTooLarge(f"a file may have at most {max_bytes} bytes", param="file")
    check.end()
    return form, stored


async def _put(chunk: bytes, form: UploadForm, store: BatchStore, content: str, check: FileCheck) -> int:
    check.feed(chunk)
    await store.append(content, chunk)
    del form.pending[: len(chunk)]
    return len(chunk)


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raises an error if the client sends nothing for `STALL_SECONDS` or disconnects."""
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise RequestTimeout(f"no data of the file arrived for {STALL_SECONDS:g} s") from None
        except ClientDisconnect:
            raise BadRequest("the client disconnected before the end of the file") from None
        yield chunk
