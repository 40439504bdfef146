"""All errors with which a request can fail, as a tree of exceptions with their HTTP status and error code.

* GatewayError
  x InternalError              500 internal_error: a bug in the gateway
  x BadRequest                 400 invalid_request_error: malformed JSON, wrong types, invalid parameters
    + ModelNotFound            404 model_not_found
    + UnknownUrl               404 unknown_url
    + MethodNotAllowed         405 method_not_allowed
    + UpgradeRequired          426 upgrade_required: the endpoint has no WebSocket mode; the client must send a POST
    + NotFound                 404 not_found: no such file, batch, key or response
    + PreviousResponseNotFound 400 previous_response_not_found: there is no stored response to continue
    + Conflict                 409 conflict: the object's state does not allow the operation
    + IdempotencyKeyInFlight   409 idempotency_key_in_flight: the first request with this key has no answer yet
    + IdempotencyKeyReused     422 idempotency_key_reused: the key belongs to another request
    + ThreadsUnsupported       400 thread_unsupported_request: Anthropic's SDK then sends the whole conversation
    + ThreadNotFound           404 thread_not_found: Anthropic's SDK then begins a new thread
    + ThreadAlreadyContinued   400 thread_already_continued: each message continues a thread only once
    + ThreadContinueInFlight   400 thread_continue_in_flight: another request continues the same message
    + ThreadFingerprintMismatch 400 thread_fingerprint_mismatch: a field differs from the thread's
    + BodyTooLarge             413 request_too_large
    + RequestTimeout           408 request_timeout: the body did not arrive in time
  x TokenCountUnavailable      501 not_counted: no deployment of the model can count a prompt's tokens
  x Unauthenticated            401 invalid_api_key
  x Forbidden                  403 permission_denied
  x LimitReached               429 rate_limit_exceeded, with the time to wait
  x BudgetSpent                429 insufficient_quota, not retryable
  x Overloaded                 503 overloaded: a queue is full, a queue wait timed out, or the gateway is draining
  x StorageUnavailable         503 storage_unavailable: limits cannot be checked
  x LedgerUnavailable          503 ledger_unavailable: the call could not be billed, so it is rejected
  x UpstreamError              502 upstream_error: no deployment sent a first chunk
    + UpstreamTimeout          504 upstream_timeout
    + UpstreamBusy             503 upstream_busy: all attempted deployments answered 429 or 503
  x QuarantinedRequest         422 poisonous_request: backends crashed while processing this request
  x HookRejected               400 rejected_by_hook, or another 4xx of the hook: it rejected the request or answer
  x HookFailed                 500 hook_failed: a hook of the policy failed, and the policy refuses such requests
  x UpstreamRefused            the upstream's own status: the request itself is at fault, so it is not retried
  x UpstreamCut                upstream_cut: the reply broke off after its first byte; sent as an event in the stream

`gateway/endpoints/replies.py` writes these errors in OpenAI's format. If an endpoint has another API format, its
translator writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

RETRY_AFTER_MAX_SECONDS = 120.0  # OpenAI's SDKs do not retry at all beyond this


class GatewayError(Exception):
    """Base class of the errors that clients receive, with OpenAI's status, type and code.

    `retryable` says whether the same request may succeed later. The gateway sends it as `x-should-retry`, which
    OpenAI's SDKs obey. `param` names the invalid parameter. `headers` are added to the reply.
    """

    status: int = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers: dict[str, str] = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object under `error` in the reply. Always has these four keys; a subclass may add more."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


class InternalError(GatewayError):
    """A bug in the gateway. The log has the cause with the call's id."""


class BadRequest(GatewayError):
    """The request is invalid; `param` names the parameter at fault."""

    status = 400
    type = "invalid_request_error"
    code: ClassVar[str | None] = None


class ModelNotFound(BadRequest):
    """The policy has no model of this name, or the tenant may not use it."""

    status = 404
    code = "model_not_found"


class UnknownUrl(BadRequest):
    """No endpoint has this path."""

    status = 404
    code = "unknown_url"


class MethodNotAllowed(BadRequest):
    """The endpoint does not support this HTTP method."""

    status = 405
    code = "method_not_allowed"


class UpgradeRequired(BadRequest):
    """The client asks for a WebSocket, which the endpoint does not have.

    Codex tries a WebSocket first. On this status it sends a POST at once. After a 405 it tries six times more.
    """

    status = 426
    code = "upgrade_required"


class NotFound(BadRequest):
    """No file, batch, key or stored response has this id."""

    status = 404
    code = "not_found"


class PreviousResponseNotFound(BadRequest):
    """No stored response has the id in `previous_response_id`.

    The status is 400 and not 404, as at OpenAI: the missing object is not the one that the URL names.
    """

    code = "previous_response_not_found"


class Conflict(BadRequest):
    """The object's current state does not allow the operation."""

    status = 409
    code = "conflict"


class IdempotencyKeyInFlight(BadRequest):
    """A request with the same idempotency key is in flight, and the policy says not to join it."""

    status = 409
    code = "idempotency_key_in_flight"
    retryable = True

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message, param="Idempotency-Key", headers=retry_after(retry_after_seconds))


class IdempotencyKeyReused(BadRequest):
    """The idempotency key was used for a request with another path or body."""

    status = 422
    code = "idempotency_key_reused"


class ThreadsUnsupported(BadRequest):
    """A message request has a thread that cannot be stored. Its code tells Anthropic's SDKs to send no thread.

    `unsupported` has the fields that cannot be combined with a thread.
    """

    code = "thread_unsupported_request"

    def __init__(self, message: str, *, param: str, unsupported: Sequence[str] = ()) -> None:
        super().__init__(message, param=param)
        self.unsupported = [*unsupported]

    def body(self) -> dict[str, Any]:
        return {**super().body(), **({"unsupported": self.unsupported} if self.unsupported else {})}


class ThreadNotFound(BadRequest):
    """No usable thread has the message that a request continues. Anthropic's SDKs then send the whole conversation."""

    status = 404
    code = "thread_not_found"


class ThreadAlreadyContinued(BadRequest):
    """The message that a request continues has been continued before."""

    code = "thread_already_continued"


class ThreadContinueInFlight(BadRequest):
    """Another request that continues the same message is in flight."""

    code = "thread_continue_in_flight"


class ThreadFingerprintMismatch(BadRequest):
    """A field that stays the same in all requests of a thread differs from the thread's."""

    code = "thread_fingerprint_mismatch"


class BodyTooLarge(BadRequest):
    """The request body exceeds a size limit."""

    status = 413
    code = "request_too_large"


class RequestTimeout(BadRequest):
    """The request body did not arrive in time.

    The rest of the body may still arrive, so the connection cannot be reused and is closed.
    """

    status = 408
    code = "request_timeout"
    retryable = True

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"connection": "close"})


class TokenCountUnavailable(GatewayError):
    """No deployment of the model can count a prompt's tokens.

    The gateway does not answer with an estimate, since clients would take it for an exact count.
    """

    status = 501
    type = "invalid_request_error"
    code = "not_counted"


class Unauthenticated(GatewayError):
    """The API key is missing, unknown, expired or revoked."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class Forbidden(GatewayError):
    """The key is valid but lacks the permission."""

    status = 403
    type = "invalid_request_error"
    code = "permission_denied"


class LimitReached(GatewayError):
    """A limit on requests, tokens or concurrency is reached.

    `retry_after_seconds` is the time after which the limit has room for the request, if no other request uses it.
    """

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"
    retryable = True

    def __init__(self, message: str, *, retry_after_seconds: float, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, headers={**(headers or {}), **retry_after(retry_after_seconds)})
        self.retry_after_seconds = retry_after_seconds


class BudgetSpent(GatewayError):
    """The budget of the tenant or key is spent. Not retryable: a retry before the period ends fails again."""

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"
    retryable = False


class Overloaded(GatewayError):
    """A queue is full, a queue wait timed out, or the gateway is draining."""

    status = 503
    type = "server_error"
    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message, headers=retry_after(retry_after_seconds))


class StorageUnavailable(GatewayError):
    """The storage does not answer, so the gateway cannot check limits."""

    status = 503
    type = "server_error"
    code = "storage_unavailable"
    retryable = True


class LedgerUnavailable(GatewayError):
    """The ledger cannot be written, so the call could not be billed and is rejected."""

    status = 503
    type = "server_error"
    code = "ledger_unavailable"
    retryable = True


class UpstreamError(GatewayError):
    """No deployment sent a first chunk. `attempts` has the outcome of each attempt."""

    status = 502
    type = "server_error"
    code = "upstream_error"
    retryable = True

    def __init__(self, message: str, *, attempts: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.attempts = [dict(attempt) for attempt in attempts]

    def body(self) -> dict[str, Any]:
        return {**super().body(), "attempts": self.attempts}


class UpstreamTimeout(UpstreamError):
    """No deployment sent a first chunk in time."""

    status = 504
    code = "upstream_timeout"


class UpstreamBusy(UpstreamError):
    """All attempted deployments answered 429 or 503."""

    status = 503
    code = "upstream_busy"


class QuarantinedRequest(GatewayError):
    """Backends crashed while they processed this request, so it is not sent to another one for a while."""

    status = 422
    type = "invalid_request_error"
    code = "poisonous_request"


class HookRejected(GatewayError):
    """A hook of the policy rejected the request or its answer, with a status and a message of its own."""

    status = 400
    type = "invalid_request_error"
    code = "rejected_by_hook"

    def __init__(self, hook: str, message: str, status: int) -> None:
        super().__init__(message)
        self.hook = hook
        self.status = status

    def body(self) -> dict[str, Any]:
        return {**super().body(), "hook": self.hook}


class HookFailed(GatewayError):
    """A hook of the policy failed or took too long, and the policy refuses such requests."""

    status = 500
    type = "server_error"
    code = "hook_failed"


class UpstreamRefused(GatewayError):
    """The upstream rejected the request itself (400, 413 or 422), does not support it (501), or fails at it only (5xx).

    The client receives the upstream's body. A JSON body is passed on unchanged.
    """

    type = "invalid_request_error"
    code = "refused_by_upstream"

    def __init__(self, status: int, content: bytes, content_type: str, *, reason: str = "") -> None:
        """`reason` is that of `ProviderFailure.reason`."""
        super().__init__(f"the upstream returned status {status}")
        self.reason = reason
        self.upstream_status = status
        self.content = content
        self.content_type = content_type


class UpstreamCut(GatewayError):
    """The upstream's reply broke off after its first byte. Sent as an event in the stream, without `[DONE]`."""

    status = 502
    code = "upstream_cut"
    retryable = True


def shutting_down() -> Overloaded:
    """The error for requests that arrive while the gateway drains."""
    return Overloaded("the gateway is shutting down", retry_after_seconds=1.0)


def retry_after(seconds: float) -> dict[str, str]:
    """Return `retry-after-ms` and `retry-after`, which OpenAI's SDKs read; at most `RETRY_AFTER_MAX_SECONDS`."""
    bounded = min(max(seconds, 0.001), RETRY_AFTER_MAX_SECONDS)
    return {"retry-after-ms": str(round(bounded * 1000) or 1), "retry-after": str(max(1, round(bounded)))}
