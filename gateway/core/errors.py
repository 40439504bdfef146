"""Every way in which a call can end without its answer, as one tree.

* GatewayError
  x InternalError              500 internal_error: a bug here
  x BadRequest                 400 invalid_request_error: JSON, types, parameters
    + ModelNotFound            404 model_not_found
    + UnknownUrl               404 unknown_url
    + MethodNotAllowed         405 method_not_allowed
    + NotFound                 404 not_found: a file, a batch, a key, a response
    + PreviousResponseNotFound 400 previous_response_not_found: there is nothing to go on from
    + Conflict                 409 conflict: its state does not allow that
    + BodyTooLarge             413 request_too_large
    + RequestTimeout           408 request_timeout: the body did not arrive
  x TokenCountUnavailable                 501 not_counted: no server of the model tells how long a prompt is
  x Unauthenticated            401 invalid_api_key
  x Forbidden                  403 permission_denied
  x LimitReached               429 rate_limit_exceeded, with the time to wait
    + BudgetSpent              429 insufficient_quota, not to be retried
  x Overloaded                 503 overloaded: a queue is full, a wait is over, a server drains
  x StorageUnavailable         503 storage_unavailable: limits can not be checked
  x LedgerUnavailable          503 ledger_unavailable: what is done could not be billed, so it is not done
  x UpstreamError              502 upstream_error: no deployment gave a first chunk
    + UpstreamTimeout          504 upstream_timeout
    + UpstreamBusy             503 upstream_busy: all of them answered 429 or 503
    + UpstreamRefused          the upstream's own status: it refuses the request itself, so no other is tried
  x UpstreamCut                a reply that broke after its first byte; travels in the stream, never as a status

One place renders them, `replies`, in the words of `render_error` or of the translator of a door of another wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

RETRY_AFTER_MAX_SECONDS = 120.0  # OpenAI's SDKs do not retry at all beyond this


class GatewayError(Exception):
    """A refusal or failure that its caller is told about.

    `retryable` says whether the same call may succeed later; it is sent as `x-should-retry`, which the SDKs obey.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers: dict[str, str] = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The value of `error` on the wire: always these four keys, and more where a subclass knows more."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


class InternalError(GatewayError):
    """A bug in the gateway. What went wrong is in its log, under the call's id."""


class BadRequest(GatewayError):
    status = 400
    type = "invalid_request_error"
    code: ClassVar[str | None] = None


class ModelNotFound(BadRequest):
    status = 404
    code = "model_not_found"


class UnknownUrl(BadRequest):
    status = 404
    code = "unknown_url"


class MethodNotAllowed(BadRequest):
    status = 405
    code = "method_not_allowed"


class NotFound(BadRequest):
    status = 404
    code = "not_found"


class PreviousResponseNotFound(BadRequest):
    """OpenAI has the status 400 for it, and not 404: what is asked for is another response."""

    code = "previous_response_not_found"


class Conflict(BadRequest):
    status = 409
    code = "conflict"


class BodyTooLarge(BadRequest):
    status = 413
    code = "request_too_large"


class RequestTimeout(BadRequest):
    """Its rest may still come, so that the connection is of no more use."""

    status = 408
    code = "request_timeout"
    retryable = True

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"connection": "close"})


class TokenCountUnavailable(GatewayError):
    """Better than a guess that looks like a count."""

    status = 501
    type = "invalid_request_error"
    code = "not_counted"


class Unauthenticated(GatewayError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class Forbidden(GatewayError):
    status = 403
    type = "invalid_request_error"
    code = "permission_denied"


class LimitReached(GatewayError):
    """`retry_after_seconds` is when the same amount would be granted if nobody else asked."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"
    retryable = True

    def __init__(self, message: str, *, retry_after_seconds: float, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, headers={**(headers or {}), **retry_after(retry_after_seconds)})
        self.retry_after_seconds = retry_after_seconds


class BudgetSpent(GatewayError):
    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"
    retryable = False


class Overloaded(GatewayError):
    status = 503
    type = "server_error"
    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message, headers=retry_after(retry_after_seconds))


class StorageUnavailable(GatewayError):
    status = 503
    type = "server_error"
    code = "storage_unavailable"
    retryable = True


class LedgerUnavailable(GatewayError):
    status = 503
    type = "server_error"
    code = "ledger_unavailable"
    retryable = True


class UpstreamError(GatewayError):
    """No deployment gave a first chunk. `attempts` says what each one did."""

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
    status = 504
    code = "upstream_timeout"


class UpstreamBusy(UpstreamError):
    """Whoever was asked has too much to do."""

    status = 503
    code = "upstream_busy"


class QuarantinedRequest(GatewayError):
    """Whoever works on it dies: nobody is asked any more."""

    status = 422
    type = "invalid_request_error"
    code = "poisonous_request"


class UpstreamRefused(GatewayError):
    """The upstream judged the request itself (400, 404, 413, 422): its answer is the client's answer, unchanged
    where it is JSON."""

    type = "invalid_request_error"
    code = "refused_by_upstream"

    def __init__(self, status: int, content: bytes, content_type: str) -> None:
        super().__init__(f"the upstream answered {status}")
        self.upstream_status = status
        self.content = content
        self.content_type = content_type


class UpstreamCut(GatewayError):
    """The reply broke after its first byte: told in the stream, and no `[DONE]` follows."""

    status = 502
    code = "upstream_cut"
    retryable = True


def shutting_down() -> Overloaded:
    return Overloaded("the gateway is shutting down", retry_after_seconds=1.0)


def retry_after(seconds: float) -> dict[str, str]:
    """The two headers that OpenAI's SDKs read, milliseconds first; never beyond what they honour."""
    bounded = min(max(seconds, 0.001), RETRY_AFTER_MAX_SECONDS)
    return {"retry-after-ms": str(round(bounded * 1000) or 1), "retry-after": str(max(1, round(bounded)))}
