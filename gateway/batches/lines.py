"""The lines of an input file: found in a stream of bytes, read, and judged with their numbers.

What can be told of a line alone is told when the file comes in; what depends on the batch, when it is validated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import xxhash

from gateway.batches.records import Batch, LineError
from gateway.core.errors import BadRequest
from gateway.endpoints import BATCH_ENDPOINTS, catalogue
from gateway.endpoints.base import Endpoint
from gateway.policy import Policy
from gateway.prompts.reader import decode, read_fields
from gateway.types import Principal

PREFIX_BYTES = 256  # of the shortest prefix by which lines are grouped; each further one is twice as long
ERRORS_TOLD_MAX = 20  # of one file; the rest follows from them, or can wait
ENDPOINTS: dict[str, Endpoint] = {f"/v1/{endpoint.path}": endpoint for endpoint in BATCH_ENDPOINTS}


class Line(msgspec.Struct):
    """`body` is the request as it would have been posted to `url`."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decoder = msgspec.json.Decoder(Line)


class LineSplitter:
    """Cuts a stream of bytes into lines; empty ones are counted, and left out. Holds less than one line."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = bytearray()
        self._offset = 0  # of the rest in the stream
        self._number = 0  # of the last line that was found, from 1

    def feed(self, chunk: bytes) -> Iterator[tuple[int, int, bytes]]:
        """(number, offset, line without its end) of each line that ends in the chunk. Raises `BadRequest`."""
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            line = bytes(self._rest) + part if self._rest else part
            self._rest.clear()
            yield from self._found(line, len(line) + 1)
        self._rest += rest
        self._check(len(self._rest))

    def end(self) -> Iterator[tuple[int, int, bytes]]:
        """The last line, where no newline ended it."""
        if self._rest:
            yield from self._found(bytes(self._rest), len(self._rest))
            self._rest.clear()

    def _found(self, line: bytes, with_end: int) -> Iterator[tuple[int, int, bytes]]:
        offset, self._offset = self._offset, self._offset + with_end
        self._check(len(line))
        self._number += 1
        if line and not line.isspace():
            yield self._number, offset, line

    def _check(self, line_bytes: int) -> None:
        if line_bytes > self._max_line_bytes:
            raise BadRequest(f"line {self._number + 1} has more than {self._max_line_bytes} bytes", param="file")


def read_line(number: int, raw: bytes) -> Line | LineError:
    """A line by itself: what is wrong with it, or what it says."""
    try:
        line = decode(_decoder, raw)
    except BadRequest as error:
        return LineError("invalid_json_line", error.message, number, error.param)
    if not line.custom_id:
        return LineError("missing_custom_id", "custom_id: it must not be empty", number, "custom_id")
    if line.method != "POST":
        return LineError("invalid_method", f"method: it must be POST, not {line.method[:20]!r}", number, "method")
    if line.url not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        return LineError("invalid_url", f"url: {line.url[:100]!r} is none of {known}", number, "url")
    if not bytes(line.body).startswith(b"{"):
        return LineError("invalid_request", "body: it must be a JSON object", number, "body")
    return line


class FileCheck:
    """Judges an input file as it comes in, and counts its lines. Remembers the ids, which must be unique."""

    def __init__(self, *, max_lines: int, max_line_bytes: int) -> None:
        self.errors: list[LineError] = []
        self.lines = 0
        self._max_lines = max_lines
        self._splitter = LineSplitter(max_line_bytes)
        self._ids: dict[str, int] = {}

    def feed(self, chunk: bytes) -> None:
        self._take(self._splitter.feed(chunk))

    def end(self) -> None:
        """Raises `BadRequest` with the numbers of the lines that are wrong."""
        self._take(self._splitter.end())
        if not self.lines:
            raise BadRequest("the file has no lines", param="file")
        self._tell()

    def _take(self, found: Iterable[tuple[int, int, bytes]]) -> None:
        for number, _, raw in found:
            self.lines += 1
            if self.lines > self._max_lines:
                raise BadRequest(f"line {number}: a file may have {self._max_lines} lines", param="file")
            line = read_line(number, raw)
            if isinstance(line, LineError):
                self.errors.append(line)
            elif (earlier := self._ids.setdefault(line.custom_id, number)) != number:
                same = f"custom_id: {line.custom_id[:100]!r} is that of line {earlier}, too"
                self.errors.append(LineError("duplicate_custom_id", same, number, "custom_id"))
            if len(self.errors) >= ERRORS_TOLD_MAX:
                self._tell()

    def _tell(self) -> None:
        if self.errors:
            raise BadRequest("\n".join(f"line {error.line}: {error.message}" for error in self.errors), param="file")


def prefix_key(pieces: Iterable[bytes]) -> bytes:
    """Sorted by it, prompts that begin alike stand together, and the more so the longer they agree.

    Hashes of the first 256, 512, 1024, ... bytes: a few words for a prompt of any length.
    """
    text = b"".join(pieces)
    ends = []
    end = PREFIX_BYTES
    while end <= len(text):
        ends.append(end)
        end *= 2
    view = memoryview(text)
    return b"".join(xxhash.xxh3_64_digest(view[:end]) for end in ends)


class Verdict(NamedTuple):
    """`error` keeps the line, and so its batch, from being worked on."""

    error: LineError | None
    model: str = ""
    prefix: bytes = b""


def judge(number: int, raw: bytes, batch: Batch, principal: Principal | None, policy: Policy) -> Verdict:
    """A body that is only wrong for its endpoint is no error here: the line gets that answer in the error file.
    Nor is a model, where there is no principal any more that might use it."""
    line = read_line(number, raw)
    if isinstance(line, LineError):
        return Verdict(line)
    if line.url != batch.endpoint:
        message = f"url: it must be the batch's endpoint {batch.endpoint}"
        return Verdict(LineError("mismatched_endpoint", message, number, "url"))
    body = bytes(line.body)
    try:
        fields = read_fields(body)
        if bytes(fields.get("stream", msgspec.Raw())) == b"true":
            return Verdict(LineError("invalid_request", "stream: a batch has no streams", number, "body.stream"))
        asked = ENDPOINTS[line.url].read(fields, body)
    except BadRequest:  # or it goes on from a response, which nobody looks for here
        return Verdict(None)
    if principal is not None:
        try:
            catalogue.entry(policy, principal, 0, asked.common.model)
        except BadRequest as error:
            return Verdict(LineError(error.code or "invalid_request", error.message, number, "body.model"))
    return Verdict(None, asked.common.model, prefix_key(asked.pieces))
