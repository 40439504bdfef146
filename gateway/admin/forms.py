"""Reads JSON bodies of the admin API as forms, with errors that name the field."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from gateway.core.errors import BadRequest, BodyTooLarge
from gateway.policy.file import findings

MAX_BODY_BYTES = 64 * 1024

Form = TypeVar("Form", bound=BaseModel)


async def read_form(request: Request, form: type[Form]) -> Form:
    """Parse the body as this form; an empty body is `{}`. Raises `BadRequest`, which names the field."""
    body = await read_body(request, MAX_BODY_BYTES)
    try:
        return form.model_validate_json(body or b"{}")
    except ValidationError as error:
        found = [(".".join(map(str, path)), message) for path, message in findings(error, form)]
        text = "; ".join(f"{field}: {message}" if field else message for field, message in found)
        raise BadRequest(text, param=found[0][0] or None) from None


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body. Raises `BodyTooLarge`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise BodyTooLarge(f"the body is longer than {max_bytes} bytes")
    return bytes(body)
