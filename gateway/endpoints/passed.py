"""Endpoints whose requests are passed to a deployment of the named model, and whose answers come back unchanged.

The gateway reads only the model's name, which it replaces by the deployment's, and the end user. The body is a JSON
object, or a form (`multipart/form-data`) with a file. The answer may be of any media type. It is one chunk: nothing of
it is sent before it is complete, so another deployment may answer after a failure. If the client asked for a stream of
events and gets one, its events pass as they come.
"""

from __future__ import annotations

import hashlib
import re
from typing import ClassVar

import msgspec

from gateway.core.errors import BadRequest
from gateway.core.passed_requests import PassedRequest
from gateway.endpoints.base import NativeEndpoint
from gateway.prompts.reader import CommonFields, Fields, ParsedBody, decode
from gateway.types import Operation

# Path at the server by the name of an endpoint, which clients send to as /v1/NAME, or as /NAME where servers have it.
# The upstream path is below the server's root, as vLLM, SGLang, OpenAI and their kin have it.
PASSED_PATHS = {
    "rerank": "/v1/rerank",
    "score": "/v1/score",
    "classify": "/classify",
    "pooling": "/pooling",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "moderations": "/v1/moderations",
    "audio/transcriptions": "/v1/audio/transcriptions",
    "audio/translations": "/v1/audio/translations",
    "audio/speech": "/v1/audio/speech",
    "images/generations": "/v1/images/generations",
    "images/edits": "/v1/images/edits",
    "images/variations": "/v1/images/variations",
}
ROOT_NAMES = ("rerank", "score", "classify", "pooling", "tokenize", "detokenize")  # servers have them without /v1, too
MAX_PARTS = 100  # of a form
MAX_PART_HEAD_BYTES = 4096  # headers of a part
MAX_MODEL_BYTES = 1000
BYTES_PER_TOKEN = 4  # of a JSON body, for limits and classes until the answer says how many tokens there were

_decoder = msgspec.json.Decoder(CommonFields)
_BOUNDARY = re.compile(rb"--([0-9A-Za-z'()+_,\-./:=? ]{1,70})\r\n")
_TRUE = (b"true", b"1")
_NAME = re.compile(rb'[; ]name="?([^";\r\n]*)"?', re.IGNORECASE)


class PassedEndpoint(NativeEndpoint):
    """One path whose requests are passed to a deployment."""

    path: ClassVar[str] = ""
    operation: ClassVar[Operation] = Operation.PASSED

    def __init__(self, client_path: str, upstream_path: str) -> None:
        """`client_path` begins with a slash, as does `upstream_path`, which is below the server's root."""
        self.client_path = client_path
        self._name = client_path.removeprefix("/v1").removeprefix("/")
        self._upstream_path = upstream_path

    def read(self, fields: Fields, body: bytes) -> ParsedBody:
        if body.startswith(b"--"):
            return self._read_form(body)
        common = decode(_decoder, body)
        stream = bool(common.stream) or bytes(fields.get("stream_format", b"")) == b'"sse"'
        passed = PassedRequest(self._name, self._upstream_path, "application/json", len(body), stream)
        return ParsedBody(
            common=common,
            fields=fields,
            pieces=(),
            max_output_tokens=0,
            prompt_tokens=len(body) // BYTES_PER_TOKEN,
            passed=passed,
        )

    def _read_form(self, body: bytes) -> ParsedBody:
        begins = _BOUNDARY.match(body)
        if begins is None:
            raise BadRequest("the form must begin with its boundary")
        boundary = begins[1]
        found = _form_values(body, b"\r\n--" + boundary)
        start, end = found["model"]
        stream_start, stream_end = found.get("stream", (0, 0))
        try:
            common = CommonFields(model=body[start:end].decode())
        except UnicodeDecodeError:
            raise BadRequest("model: must be UTF-8", param="model") from None
        passed = PassedRequest(
            self._name,
            self._upstream_path,
            f'multipart/form-data; boundary="{boundary.decode()}"',
            len(body),
            stream=body[stream_start:stream_end].lower() in _TRUE,
            form=(body[:start], body[end:]),
        )
        identity = hashlib.blake2b(body, digest_size=16).hexdigest()  # with which equal requests are recognised
        fields = {"model": _raw(common.model), "form": _raw(identity)}
        return ParsedBody(common=common, fields=fields, pieces=(), max_output_tokens=0, prompt_tokens=0, passed=passed)


def passed_endpoints() -> tuple[PassedEndpoint, ...]:
    """The endpoints that always exist. The policy may list further paths."""
    return (
        *(PassedEndpoint(f"/v1/{name}", upstream) for name, upstream in PASSED_PATHS.items()),
        *(PassedEndpoint(f"/{name}", PASSED_PATHS[name]) for name in ROOT_NAMES),
        PassedEndpoint("/v2/rerank", "/v2/rerank"),
    )


def _raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(text))


def _form_values(body: bytes, separator: bytes) -> dict[str, tuple[int, int]]:
    """Find the values of the fields `model` and `stream`: where each begins and ends. Raises `BadRequest`."""
    at, found = len(separator) - 2, dict[str, tuple[int, int]]()
    for _ in range(MAX_PARTS):
        if body.startswith(b"--", at):
            break  # the end of the form
        head_end = body.find(b"\r\n\r\n", at, at + MAX_PART_HEAD_BYTES)
        end = -1 if head_end < 0 else body.find(separator, head_end + 2)
        if end < 0:
            raise BadRequest("the form is not complete, or a part of it has no headers")
        name = _NAME.search(_disposition(body[at:head_end]))
        if name is not None and name[1] in (b"model", b"stream"):
            field = name[1].decode()
            if field in found:
                raise BadRequest(f"{field}: occurs twice in the form", param=field)
            found[field] = head_end + 4, end
        at = end + len(separator)
    else:
        raise BadRequest(f"the form has more than {MAX_PARTS} parts")
    start, end = found.get("model", (0, 0))
    if not 0 < end - start <= MAX_MODEL_BYTES:
        raise BadRequest("model: the form must name a model", param="model")
    return found


def _disposition(head: bytes) -> bytes:
    lines = head.split(b"\r\n")
    return next((line for line in lines if line.lower().startswith(b"content-disposition:")), b"")
