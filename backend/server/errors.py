"""Every way in which the server refuses or fails a request, and the one place that renders it.

ApiError
├── InvalidRequest          400  the body says something we cannot or will not do; `param` names the field
│   └── ContextLengthError  400  prompt and max_tokens together do not fit the model's context
├── ModelNotFound           404
├── UnknownUrl              404
├── MethodNotAllowed        405
├── BodyTooSlow             408
├── BodyTooLarge            413
├── DeadlineExceeded        504  the client's own `x-request-deadline-ms` is over
├── EngineFailure           500  the engine failed this request, or died under it
└── Unavailable             503  nothing was done, and another try may succeed
    ├── Overloaded               the waiting queue is full
    ├── EngineDead               the engine is gone until the process is restarted
    └── ShuttingDown             the process is about to end
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import orjson

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ApiError(Exception):
    status: ClassVar[int] = 500
    type: ClassVar[str] = SERVER_ERROR
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def headers(self) -> Mapping[str, str]:
        return {}

    def body(self) -> bytes:
        """OpenAI's error object. Its four keys are all required, null where there is nothing to say."""
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


class InvalidRequest(ApiError):
    status = 400
    type = INVALID_REQUEST


class ContextLengthError(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    status = 404
    code = "model_not_found"


class RequestNotFound(InvalidRequest):
    status = 404
    code = "request_not_found"


class UnknownUrl(InvalidRequest):
    status = 404
    code = "unknown_url"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class BodyTooSlow(InvalidRequest):
    status = 408
    code = "body_timeout"


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "body_too_large"


class DeadlineExceeded(ApiError):
    status = 504
    code = "deadline_exceeded"

    @property
    def headers(self) -> Mapping[str, str]:
        return {"x-should-retry": "false"}  # whoever has no time left has none for another try


class EngineFailure(ApiError):
    code = "engine_error"


class Unavailable(ApiError):
    """503. `retry_after_seconds` of 0 says nothing about when to come back."""

    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_seconds: int = 0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds

    @property
    def headers(self) -> Mapping[str, str]:
        return {"retry-after": str(self.retry_after_seconds)} if self.retry_after_seconds else {}


class Overloaded(Unavailable):
    code = "overloaded"


class EngineDead(Unavailable):
    code = "engine_dead"


class ShuttingDown(Unavailable):
    code = "shutting_down"
