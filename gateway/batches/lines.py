"""Reads a batch's input file: splits a stream of bytes into lines, decodes them, and validates them.

Validation has two stages. During the upload, `FileCheck` checks what depends only on the file: JSON, custom ids, URLs,
and the number and size of lines. Before the lines of a batch are called, `validate_line` checks what depends on the
batch: the endpoint, streaming, and the models that the batch's key may use. Every error contains its line number, which
begins at 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import xxhash

from gateway.batches.records import Batch, LineError
from gateway.core.errors import BadRequest
from gateway.endpoints import BATCH_ENDPOINTS, models
from gateway.endpoints.base import Endpoint
from gateway.policy import Policy
from gateway.prompts.media.counting import Piece, piece_text
from gateway.prompts.reader import decode, read_fields
from gateway.types import Principal

PREFIX_BYTES = 256  # length of the shortest prefix by which lines are ordered; each next prefix is twice as long
ERRORS_MAX = 20  # errors reported for one file; reading stops there
ENDPOINTS: dict[str, Endpoint] = {f"/v1/{endpoint.path}": endpoint for endpoint in BATCH_ENDPOINTS}


class RequestLine(msgspec.Struct):
    """One line of an input file. `body` is the request as it would have been posted to `url`."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decoder = msgspec.json.Decoder(RequestLine)


class LineSplitter:
    """Splits a stream of bytes into lines. Buffers at most one incomplete line.

    Blank lines count for the line numbers, but are not returned.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = bytearray()
        self._offset = 0  # offset in the stream at which the buffered rest begins
        self._number = 0  # number of the last line; the first line is 1

    def feed(self, chunk: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yield (number, offset, line without newline) of each line that ends in the chunk. Raises `BadRequest`."""
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            line = bytes(self._rest) + part if self._rest else part
            self._rest.clear()
            yield from self._line(line, len(line) + 1)
        self._rest += rest
        self._check(len(self._rest))

    def end(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield the last line, if it has no newline."""
        if self._rest:
            yield from self._line(bytes(self._rest), len(self._rest))
            self._rest.clear()

    def _line(self, line: bytes, with_end: int) -> Iterator[tuple[int, int, bytes]]:
        offset, self._offset = self._offset, self._offset + with_end
        self._check(len(line))
        self._number += 1
        if line and not line.isspace():
            yield self._number, offset, line

    def _check(self, line_bytes: int) -> None:
        if line_bytes > self._max_line_bytes:
            raise BadRequest(f"line {self._number + 1} is longer than {self._max_line_bytes} bytes", param="file")


def read_line(number: int, raw: bytes) -> RequestLine | LineError:
    """Decode one line, and check what does not depend on its batch. Returns a `LineError` if the line is invalid."""
    try:
        line = decode(_decoder, raw)
    except BadRequest as error:
        return LineError("invalid_json_line", error.message, number, error.param)
    if not line.custom_id:
        return LineError("missing_custom_id", "custom_id: must not be empty", number, "custom_id")
    if line.method != "POST":
        return LineError("invalid_method", f"method: must be POST, not {line.method[:20]!r}", number, "method")
    if line.url not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        return LineError("invalid_url", f"url: must be one of {known}, not {line.url[:100]!r}", number, "url")
    if not bytes(line.body).startswith(b"{"):
        return LineError("invalid_request", "body: must be a JSON object", number, "body")
    return line


class FileCheck:
    """Checks an input file during its upload, and counts its lines. Keeps all custom ids, which must be unique."""

    def __init__(self, *, max_lines: int, max_line_bytes: int) -> None:
        self.errors: list[LineError] = []
        self.lines = 0
        self._max_lines = max_lines
        self._splitter = LineSplitter(max_line_bytes)
        self._ids: dict[str, int] = {}

    def feed(self, chunk: bytes) -> None:
        """Check the lines that end in the chunk. Raises `BadRequest` at `ERRORS_MAX` errors or too many lines."""
        self._take(self._splitter.feed(chunk))

    def end(self) -> None:
        """Check the last line. Raises `BadRequest` with all errors if a line is invalid or there is none."""
        self._take(self._splitter.end())
        if not self.lines:
            raise BadRequest("the file has no lines", param="file")
        self._raise_errors()

    def _take(self, found: Iterable[tuple[int, int, bytes]]) -> None:
        for number, _, raw in found:
            self.lines += 1
            if self.lines > self._max_lines:
                raise BadRequest(f"line {number}: a file may have at most {self._max_lines} lines", param="file")
            line = read_line(number, raw)
            if isinstance(line, LineError):
                self.errors.append(line)
            elif (earlier := self._ids.setdefault(line.custom_id, number)) != number:
                same = f"custom_id: {line.custom_id[:100]!r} is already the id of line {earlier}"
                self.errors.append(LineError("duplicate_custom_id", same, number, "custom_id"))
            if len(self.errors) >= ERRORS_MAX:
                self._raise_errors()

    def _raise_errors(self) -> None:
        if self.errors:
            raise BadRequest("\n".join(f"line {error.line}: {error.message}" for error in self.errors), param="file")


def prefix_key(pieces: Iterable[Piece]) -> bytes:
    """Return a sort key that places prompts with a common prefix next to each other.

    Prompts with a longer common prefix are closer together. The key is the concatenated hashes of the first 256, 512,
    1024, ... bytes, so it is short for a prompt of any length.
    """
    text = b"".join(map(piece_text, pieces))
    ends = []
    end = PREFIX_BYTES
    while end <= len(text):
        ends.append(end)
        end *= 2
    view = memoryview(text)
    return b"".join(xxhash.xxh3_64_digest(view[:end]) for end in ends)


class LineValidation(NamedTuple):
    """The result of `validate_line`. An `error` fails the complete batch. `prefix` is the line's `prefix_key`."""

    error: LineError | None
    model: str = ""
    prefix: bytes = b""


def validate_line(number: int, raw: bytes, batch: Batch, principal: Principal | None, policy: Policy) -> LineValidation:
    """Validate a line for its batch. `principal` is None if the batch's key was revoked. Models are then not checked.

    A body that only the endpoint rejects is no error here. The line is called, and its 400 reply is written to the
    error file.
    """
    line = read_line(number, raw)
    if isinstance(line, LineError):
        return LineValidation(line)
    if line.url != batch.endpoint:
        message = f"url: must be the batch's endpoint {batch.endpoint}"
        return LineValidation(LineError("mismatched_endpoint", message, number, "url"))
    body = bytes(line.body)
    try:
        fields = read_fields(body)
        if bytes(fields.get("stream", msgspec.Raw())) == b"true":
            return LineValidation(
                LineError("invalid_request", "stream: requests of a batch cannot stream", number, "body.stream")
            )
        parsed = ENDPOINTS[line.url].read(fields, body)
    except BadRequest:  # includes bodies that continue a stored response, which is not loaded here
        return LineValidation(None)
    if principal is not None:
        try:
            models.get_model(policy, principal, 0, parsed.common.model)
        except BadRequest as error:
            return LineValidation(LineError(error.code or "invalid_request", error.message, number, "body.model"))
    return LineValidation(None, parsed.common.model, prefix_key(parsed.pieces))
