"""Errors of the HTTP API, with their HTTP status, OpenAI error code and JSON body.

ApiError
├── InvalidRequest          400  the request is invalid or asks for something unsupported; `param` names the field
│   ├── ContextLengthError  400  prompt and max_tokens do not fit the model's context
│   ├── ModelNotFound       404
│   ├── RequestNotFound     404  no usage record has this x-request-id
│   ├── UnknownUrl          404
│   ├── MethodNotAllowed    405
│   ├── BodyTooSlow         408
│   └── BodyTooLarge        413
├── TenantBusy              429  the tenant's other requests leave no room for this one
│   ├── GrammarsBusy        429  its other grammars do
│   └── ImagesBusy          429  its other images do
├── DeadlineExceeded        504  the client's `x-request-deadline-ms` has passed
├── EngineFailure           500  the engine failed this request or stopped while processing it
└── Unavailable             503  the request was not processed; a retry may succeed
    ├── Overloaded               the waiting queue is full
    ├── EngineDead               the engine has stopped; the process must be restarted
    └── ShuttingDown             the process is shutting down
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import orjson

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ApiError(Exception):
    """Base class of all errors that a client receives. `message` is for people, `code` for programs."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = SERVER_ERROR
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def headers(self) -> Mapping[str, str]:
        """Additional headers of the error response."""
        return {}

    def body(self) -> bytes:
        """Returns OpenAI's error object as JSON. All four keys are required; `param` and `code` may be null."""
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


class InvalidRequest(ApiError):
    """Status 400: the request is invalid or asks for something unsupported."""

    status = 400
    type = INVALID_REQUEST


class ContextLengthError(InvalidRequest):
    """Status 400: the prompt and `max_tokens` exceed the model's context."""

    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    """Status 404: the request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"


class RequestNotFound(InvalidRequest):
    """Status 404: there is no usage record for this request id."""

    status = 404
    code = "request_not_found"


class UnknownUrl(InvalidRequest):
    """Status 404: the path does not exist."""

    status = 404
    code = "unknown_url"


class MethodNotAllowed(InvalidRequest):
    """Status 405: the path does not accept this HTTP method."""

    status = 405
    code = "method_not_allowed"


class BodyTooSlow(InvalidRequest):
    """Status 408: the request's body did not arrive in time."""

    status = 408
    code = "body_timeout"


class BodyTooLarge(InvalidRequest):
    """Status 413: the request's body exceeds the size limit."""

    status = 413
    code = "body_too_large"


class TenantBusy(ApiError):
    """Status 429: the tenant's other requests leave no room for this one. Other tenants are not affected."""

    status = 429
    type = "rate_limit_error"
    code = "tenant_busy"

    @property
    def headers(self) -> Mapping[str, str]:
        return {"retry-after": "0"}  # a gateway need not spare this server: its other tenants are served


class GrammarsBusy(TenantBusy):
    """Status 429: the tenant's other grammars leave no room for this one."""

    code = "grammars_busy"


class ImagesBusy(TenantBusy):
    """Status 429: the tenant's other images leave no room for these."""

    code = "images_busy"


class DeadlineExceeded(ApiError):
    """Status 504: the deadline in `x-request-deadline-ms` has passed. Clients must not retry."""

    status = 504
    code = "deadline_exceeded"

    @property
    def headers(self) -> Mapping[str, str]:
        return {"x-should-retry": "false"}  # the deadline has passed, so a retry is useless


class EngineFailure(ApiError):
    """Status 500: the engine failed this request."""

    code = "engine_error"


class Unavailable(ApiError):
    """Status 503: the request was not processed. Has a `retry-after` header unless `retry_after_seconds` is 0."""

    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_seconds: int = 0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds

    @property
    def headers(self) -> Mapping[str, str]:
        return {"retry-after": str(self.retry_after_seconds)} if self.retry_after_seconds else {}


class Overloaded(Unavailable):
    """Status 503: the waiting queue is full."""

    code = "overloaded"


class EngineDead(Unavailable):
    """Status 503: the engine has stopped. Only a restart of the process starts it again."""

    code = "engine_dead"


class ShuttingDown(Unavailable):
    """Status 503: the process is shutting down."""

    code = "shutting_down"
