"""Log formatters: write one line per event, as JSON or as text.

A line contains only the fields in `FIELDS`, so that keys and prompts cannot leak into logs. Callers pass fields as
`extra={"call_id": ..., "trace_id": ...}`; there is no ambient context.
"""

from __future__ import annotations

import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import TextIO

import orjson

FIELDS = (
    "trace_id", "call_id", "event_id", "tenant", "key_id", "method", "path", "status", "model", "deployment", "class",
    "outcome", "error_code", "cache", "duration_ms", "ttft_ms", "input_tokens", "cached_tokens", "output_tokens",
    "policy_hash", "attempt", "equal_text", "client_seconds", "mirror_seconds", "client_ttft_seconds",
    "mirror_ttft_seconds", "client_output_tokens", "mirror_output_tokens",
)  # fmt: skip
FIELD_MAX_CHARS = 300
MESSAGE_MAX_CHARS = 4000

GATEWAY_LOGGERS = ("gateway", "warmpath")

access = logging.getLogger("gateway.access")


class JsonFormatter(logging.Formatter):
    """Formats events as JSON: time, level, logger, message, those of FIELDS that are set, and an exception's stack."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:MESSAGE_MAX_CHARS],
            **_fields(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = type(record.exc_info[1]).__name__
            line["stack"] = _stack(record.exc_info[1])
        return orjson.dumps(line, default=str).decode()


class TextFormatter(logging.Formatter):
    """Text lines with the same content: `12:00:00.123 warning gateway.billing.ledger: message  key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        text = f"{_time(record)[11:23]} {record.levelname.lower()} {record.name}: "
        text += record.getMessage()[:MESSAGE_MAX_CHARS] + (f" {fields}" if fields else "")
        if record.exc_info and record.exc_info[1] is not None:
            stack = "".join(f"\n  {frame}" for frame in _stack(record.exc_info[1]))
            text += f"\n{type(record.exc_info[1]).__name__}{stack}"
        return text


def configure_logging(level: str, *, json: bool, access_log: bool = False, stream: TextIO | None = None) -> None:
    """Send all logs to `stream` (default: stderr). `level` applies to the gateway; libraries log from WARNING on.

    Raises `ValueError` for an unknown level.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    for name in GATEWAY_LOGGERS:
        logging.getLogger(name).setLevel(level.upper())
    access.setLevel(logging.INFO if access_log else logging.WARNING)
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    root.handlers[:] = [handler]  # replaces handlers of libraries, which would print lines in other formats


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _fields(record: logging.LogRecord) -> dict[str, str | int | float | bool]:
    given = {name: record.__dict__.get(name) for name in FIELDS}
    return {
        name: value if isinstance(value, int | float) else str(value)[:FIELD_MAX_CHARS]
        for name, value in given.items()
        if value is not None
    }


def _stack(error: BaseException) -> list[str]:
    """List files, lines and functions, innermost last. Omits the exception's message, which may quote client input."""
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
