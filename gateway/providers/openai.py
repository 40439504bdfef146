"""The provider for servers with an OpenAI-compatible API. Answers pass unchanged to the client.

`OpenAI.open` builds the request body, sends it through the transport, and checks the response's status and media type.
The response is one of `responses`. The other providers inherit from this class. Most of them only change `body_fields`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import ClassVar

import httpx2
import msgspec

from gateway.core.cache_breakpoints import FIELD, without_breakpoints
from gateway.core.native_requests import NativeRequest
from gateway.core.timers import time_bound
from gateway.policy import Deployment, Secret
from gateway.policy.upstream_requests import encoded_query
from gateway.policy.wildcards import STAR
from gateway.providers.base import ProviderFailure, UpstreamResponse
from gateway.providers.chat_fields import with_stream_options, without_thinking_blocks
from gateway.providers.media_fetch.parts import ALL_PARTS, FILE
from gateway.providers.native import NativeStream, counted_tokens, file_url_error, native_body, native_headers, refused
from gateway.providers.native_formats import NATIVE_APIS
from gateway.providers.passed import form_body, lacking_path, passed_response, upstream_path
from gateway.providers.redaction import NOTHING_SECRET, Redactor
from gateway.providers.responses import (
    MAX_JSON_BYTES,
    EventStreamResponse,
    JSONResponse,
    check_response,
    transport_failure,
)
from gateway.providers.stream_tail import StreamTail
from gateway.providers.transport import HTTPResponse, HTTPTransport, Proxy, header_lines
from gateway.providers.upstream_errors import MAX_ERROR_BYTES, status_failure
from gateway.types import Call, Operation, TokenCounters

MAX_HEADS = 1_000  # that are kept; a model's name with a wildcard has its own
HEALTH_TIMEOUT_SECONDS = 2.0  # also for the gateway's other requests that belong to no call

_raw = msgspec.json.Encoder()
_TRUE = msgspec.Raw(b"true")


class OpenAI:
    """Provider for one deployment of a server with an OpenAI-compatible API."""

    has_usage_records = False
    continues_final_message = False

    stream_type: ClassVar[bytes] = b"text/event-stream"  # media type of a streamed answer
    key_header: ClassVar[str] = "authorization"  # in which the server expects its key
    lists_deployments: ClassVar[bool] = True  # whether the server's list of models has the name in `model`
    accepts_deadlines: ClassVar[bool] = False  # whether the server aborts a call at the time in its deadline header
    url_parts: ClassVar[frozenset[str]] = ALL_PARTS - {FILE}  # types of content parts that the API takes by URL
    data_parts: ClassVar[frozenset[str]] = ALL_PARTS  # and those that it takes as data
    extra_headers: ClassVar[tuple[tuple[bytes, bytes], ...]] = ()  # sent with every request

    def __init__(
        self, deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[Secret], str]
    ) -> None:
        base_url = httpx2.URL(deployment.base_url.rstrip("/"))
        headers = [
            (b"host", base_url.netloc),
            (b"user-agent", b"warmpath"),
            (b"accept-encoding", b"identity"),
            (b"content-type", b"application/json"),
            *self.extra_headers,
        ]
        secrets = []
        if deployment.api_key is not None:
            secrets.append(resolve_secret(deployment.api_key))
            key_header = (deployment.key_header or self.key_header).lower()
            key = f"Bearer {secrets[0]}" if key_header == "authorization" else secrets[0]
            headers.append((key_header.encode(), key.encode()))
        for name, value in deployment.headers.items():
            headers = [header for header in headers if header[0] != name.lower().encode()]
            if isinstance(value, Secret):
                secrets.append(value := resolve_secret(value))
            headers.append((name.lower().encode(), value.encode()))
        self._transport = transport
        proxy = None
        if (given := deployment.proxy) is not None:
            login = None if given.login is None else resolve_secret(given.login)
            secrets += [] if login is None else [login]
            proxy = Proxy.of(given.url, login)
        self._pool = transport.pool(base_url, deployment.tls, proxy)
        self._redactor = Redactor(*secrets) if secrets else NOTHING_SECRET
        self._base_path = base_url.raw_path.rstrip(b"/")
        self._headers = headers
        self._header_lines = header_lines(headers)
        self._query = encoded_query(deployment.query)
        self._heads: dict[tuple[Operation, bool, str], bytes] = {}  # by operation, whether it streams, and wildcard
        self._deployment = deployment
        self._served = deployment.model
        self._model = None if STAR in deployment.model else msgspec.Raw(_raw.encode(deployment.model))
        self._sends_session_id = deployment.kv_events is not None  # KV events then contain each block's call id
        self._omitted_fields = deployment.leave_out
        self._strict_done = deployment.strict_done
        self._native_apis = deployment.native_apis
        taken = {"pass": ALL_PARTS, "fetch": frozenset[str]()}.get(deployment.media_urls or "", self.url_parts)
        self._fetched_parts = self.data_parts - taken
        self._usage_options = {"include_usage": _TRUE}
        if deployment.continuous_usage:
            self._usage_options["continuous_usage_stats"] = _TRUE

    @property
    def models_path(self) -> bytes:
        """The path of the list of models, with its query."""
        return self._base_path + b"/models"

    @property
    def health_path(self) -> bytes:
        """Return the path that answers with a success status while the server is healthy."""
        return self.models_path

    def path_of(self, operation: Operation) -> bytes:
        """Return the path of an operation, relative to the base URL."""
        return operation.value.encode()

    def base_path_of(self, call: Call) -> bytes:
        """Return the path to which that of the operation is added, for a call's model."""
        return self._base_path

    def target_of(self, call: Call) -> bytes:
        """Return the path and the query of a call."""
        return b"%b/%b%b" % (self.base_path_of(call), self.path_of(call.operation), self._query)

    def model_of(self, call: Call) -> str:
        """The name of the call's model at the server."""
        return self._deployment.model_for(call.wildcard)

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        """Return an error for a call in another API, if the deployment lacks it and the call cannot be translated.

        An OpenAI-compatible deployment itself rejects all else that it does not support.
        """
        if call.native is None and call.media is None:  # a chat with text only, or a completion
            return None
        if self.passes(call):
            return None
        if (error := refused(call)) is None and (error := file_url_error(call)) is not None:
            return None if FILE in self.media_to_fetch(call) else error
        return error

    def media_to_fetch(self, call: Call) -> frozenset[str]:
        """Return the types of content parts whose URLs are replaced by data, if the policy allows any host."""
        if not call.policy.media_fetch.hosts or call.operation is not Operation.CHAT or self.passes(call):
            return frozenset()
        return self._fetched_parts

    def passes(self, call: Call) -> bool:
        """Whether the call is sent as the client sent it, because the deployment has the client's API."""
        return call.native is not None and call.native.api in self._native_apis

    def render(self, call: Call) -> bytes:
        """Return the request body: the fields of `body_fields` as JSON, or a form that is passed on."""
        if call.passed is not None and call.passed.form is not None:
            return form_body(call.passed.form, self.model_of(call))
        if call.native is not None and self.passes(call):
            return _raw.encode(self.native_fields(call, call.native))
        return _raw.encode(self.body_fields(call))

    def body_fields(self, call: Call) -> dict[str, msgspec.Raw]:
        """Return the client's top-level fields, with the deployment's model name and a request for usage."""
        fields = self.prompt_fields(call)
        if call.stream:
            fields["stream_options"] = with_stream_options(fields.get("stream_options"), **self._usage_options)
        for name in self._omitted_fields:
            fields.pop(name, None)
        return fields

    def native_fields(self, call: Call, native: NativeRequest) -> dict[str, msgspec.Raw]:
        """Return the fields of a request that passes in the client's API."""
        return native_body(native.fields, self._model or msgspec.Raw(_raw.encode(self.model_of(call))))

    def prompt_fields(self, call: Call) -> dict[str, msgspec.Raw]:
        """Return the client's fields with the deployment's model name, without parts that only other APIs support."""
        fields = {**call.fields, "model": self._model or msgspec.Raw(_raw.encode(self.model_of(call)))}
        if FIELD in call.hints:
            fields = without_breakpoints(fields)
        if call.model_name in call.policy.signing_models and "messages" in fields:
            fields["messages"] = without_thinking_blocks(fields["messages"])
        return fields

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        """Send the call, and check the response's status and media type. See `Provider.open`."""
        if body is None:
            body = self.render(call)
        named = [*map(": ".join, headers.items())]
        if "\n" in (text := "".join(named)) or "\r" in text:
            raise ValueError(f"a header contains a line break: {headers}")
        lines = "\r\n".join([*named, ""])
        if self.accepts_deadlines:
            left_seconds = call.deadline - asyncio.get_running_loop().time()
            lines += f"x-request-deadline-ms: {max(1, int(left_seconds * 1000))}\r\n"
        if self._sends_session_id:
            lines += f"x-session-id: {call.id}\r\n"
        head = b"%bcontent-length: %d\r\n%b" % (self._head_of(call), len(body), lines.encode("latin-1"))
        try:
            response = await self._transport.send(self._pool, head, body)
        except httpx2.TransportError as error:
            raise transport_failure(error) from error
        try:
            media_type = self.stream_type if call.stream else b"application/json"
            await check_response(response, media_type if call.passed is None else None, self._redactor)
        except BaseException as error:
            await response.aclose()
            if isinstance(error, ProviderFailure):
                if call.passed is not None:
                    error = lacking_path(error, call.passed, self._redactor)
                raise self.translate_error(error) from None
            raise
        return (
            self.response_of(call, response)
            if call.passed is None
            else passed_response(call.passed, response, self._redactor)
        )

    def _head_of(self, call: Call) -> bytes:
        """The request line, and the headers that do not depend on the call."""
        if (native := call.native) is not None and self.passes(call):
            lines = header_lines(native_headers(self._headers, native))
            path = (native.path or native.api).encode()
            return b"POST %b/%b%b HTTP/1.1\r\n%b" % (self._base_path, path, self._query, lines)
        if (passed := call.passed) is None:
            key = (call.operation, call.stream, call.wildcard)
            if (head := self._heads.get(key)) is None:
                head = b"POST %b HTTP/1.1\r\n%b" % (self.target_of(call), self._header_lines)
                if len(self._heads) < MAX_HEADS:
                    self._heads[key] = head
            return head
        headers = [(name, value) for name, value in self._headers if name != b"content-type"]
        lines = header_lines([*headers, (b"content-type", passed.content_type.encode("latin-1"))])
        return b"POST %b%b HTTP/1.1\r\n%b" % (upstream_path(self.base_path_of(call), passed), self._query, lines)

    def response_of(self, call: Call, response: HTTPResponse) -> UpstreamResponse:
        """Wrap an HTTP response with a success status, as an event stream if the call streams, else as JSON."""
        if call.native is not None and self.passes(call):
            return self._native_response(call, call.native.api, response)
        if not call.stream:
            return JSONResponse(response, self._redactor)
        return EventStreamResponse(response, self._redactor, None if self._strict_done else StreamTail(call))

    def _native_response(self, call: Call, api: str, response: HTTPResponse) -> UpstreamResponse:
        if call.stream:
            return NativeStream(response, self._redactor, api)
        whole = JSONResponse(response, self._redactor)
        whole.api = api
        return whole

    def translate_error(self, failure: ProviderFailure) -> ProviderFailure:
        """Return the failure with its body translated to OpenAI's format."""
        return failure

    async def healthy(self) -> bool:
        """Send a GET request to the health path. Any success status means healthy."""
        return await self._get(self.health_path) is not None

    async def fetch_models(self) -> bytes:
        """GET the list of models. Raises `ProviderFailure`, as `open` does. There is no timeout."""
        try:
            head = b"GET %b HTTP/1.1\r\n%b" % (self.models_path, self._header_lines)
            response = await self._transport.send(self._pool, head, b"")
            try:
                if response.status >= 300:
                    raise await status_failure(response, "application/json", self._redactor)
                return await response.read_body(MAX_JSON_BYTES)
            finally:
                await response.aclose()
        except httpx2.TransportError as error:
            raise transport_failure(error) from error

    async def recorded_usage(self, call_id: str, *, patient: bool = False) -> bytes | None:
        return None  # OpenAI's API has no usage records

    async def count_prompt_tokens(self, call: Call) -> int | None:
        """Request the count in the client's API, if the deployment has it. See `Provider.count_prompt_tokens`."""
        if call.native is None or not self.passes(call):
            return None
        api = NATIVE_APIS[call.native.api]
        path = b"%b/%b%b" % (self._base_path, api.count_path, self._query)
        fields = self.native_fields(call, call.native)
        body = _raw.encode({name: value for name, value in fields.items() if name not in api.uncounted})
        lines = header_lines(native_headers(self._headers, call.native))
        return counted_tokens(await self._post(path, body, MAX_ERROR_BYTES, lines))

    async def count_text_tokens(self, text: str) -> int | None:
        return None

    async def token_counters(self) -> TokenCounters | None:
        return None

    async def _get(self, path: bytes, max_bytes: int = MAX_ERROR_BYTES) -> bytes | None:
        """GET a body of at most `max_bytes` within HEALTH_TIMEOUT_SECONDS. Returns None without a success status."""
        return await self._request(b"GET %b HTTP/1.1\r\n%b" % (path, self._header_lines), b"", max_bytes)

    async def _post(self, path: bytes, body: bytes, max_bytes: int, lines: bytes | None = None) -> bytes | None:
        head = b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n%b" % (path, len(body), lines or self._header_lines)
        return await self._request(head, body, max_bytes)

    async def _request(self, head: bytes, body: bytes, max_bytes: int) -> bytes | None:
        try:
            async with time_bound(HEALTH_TIMEOUT_SECONDS):
                response = await self._transport.send(self._pool, head, body)
                try:
                    content = await response.read_body(
                        max_bytes
                    )  # reads a short body to its end, to keep the connection
                finally:
                    await response.aclose()
        except (httpx2.TransportError, TimeoutError):
            return None
        return content if 200 <= response.status < 300 else None
