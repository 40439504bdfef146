"""What the Batch API keeps: files, batches, and the results of lines. All frozen; a change is a new value.

A batch goes this way, and no other; each status that it has entered has its time:

  validating -> in_progress -> finalizing -> completed | expired | failed, where its input file is gone
  validating -> failed
  validating | in_progress -> cancelling -> cancelled
"""

from __future__ import annotations

import time
from enum import Enum
from typing import Any

import msgspec

from gateway.core.ids import random_bytes

DAY_SECONDS = 86_400
INPUT_PURPOSE = "batch"


class Status(Enum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OVER = frozenset({Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED})
TIMED = tuple(status for status in Status if status is not Status.VALIDATING)  # that one's time is `created_at`


class File(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    filename: str
    purpose: str  # batch or batch_output
    bytes: int
    created_at: int  # seconds since the epoch, as all times here
    expires_at: int

    def shown(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class LineError(msgspec.Struct, frozen=True):
    """What is wrong with a line of an input file; without a number, with the file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Tokens(msgspec.Struct, frozen=True):
    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
        )


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """`owner` works on it until `leased_until`, unless the lease is extended. Nobody else may write its results."""

    id: str
    tenant: str
    key_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_seconds: int | None = None  # after the output files' creation
    status: Status = Status.VALIDATING
    ending: Status = Status.COMPLETED  # what `finalizing` leads to
    times: dict[str, int] = {}  # by the status that was entered
    model: str | None = None  # where all lines name the same
    total: int = 0
    completed: int = 0
    failed: int = 0
    tokens: Tokens = Tokens()
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    owner: str = ""
    leased_until: float = 0.0

    @property
    def over(self) -> bool:
        return self.status in OVER

    def shown(self) -> dict[str, Any]:
        """OpenAI's batch object. What is not there yet is left out or null, as the published schema has it."""
        shown: dict[str, Any] = {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.value,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "metadata": self.metadata,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": self.tokens.input,
                "input_tokens_details": {"cached_tokens": self.tokens.cached},
                "output_tokens": self.tokens.output,
                "output_tokens_details": {"reasoning_tokens": self.tokens.reasoning},
                "total_tokens": self.tokens.input + self.tokens.output,
            },
        }
        shown |= {f"{status.value}_at": self.times[status.value] for status in TIMED if status.value in self.times}
        optional = {
            "model": self.model,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "errors": {"object": "list", "data": [msgspec.to_builtins(error) for error in self.errors]},
        }
        return shown | {name: value for name, value in optional.items() if value and (name != "errors" or self.errors)}

    # Changes: each is what the batch is next, or None where it is not to be changed so.

    def entered(self, status: Status, now: float, **more: Any) -> Batch:
        times = {**self.times, status.value: int(now)}
        return msgspec.structs.replace(self, status=status, times=times, **more)

    def claimed(self, owner: str, now: float, lease_seconds: float) -> Batch | None:
        """None where it is over, or another's lease still runs."""
        if self.over or (self.owner not in ("", owner) and now < self.leased_until):
            return None
        return msgspec.structs.replace(self, owner=owner, leased_until=now + lease_seconds)

    def extended(self, owner: str, now: float, lease_seconds: float) -> Batch | None:
        """None where it has another owner by now."""
        if self.owner != owner or self.over:
            return None
        return msgspec.structs.replace(self, leased_until=now + lease_seconds)

    def released(self, owner: str) -> Batch | None:
        return msgspec.structs.replace(self, owner="", leased_until=0.0) if self.owner == owner else None

    def cancelling(self, now: float) -> Batch | None:
        """None where it is too late for that, or has been asked already."""
        if self.status not in (Status.VALIDATING, Status.IN_PROGRESS):
            return None
        return self.entered(Status.CANCELLING, now, ending=Status.CANCELLED)


class Result(msgspec.Struct, frozen=True):
    """A line that is done. `receipt` is what has to stand in the ledger for it; empty where nothing was used."""

    line: int
    ok: bool
    content: bytes  # the line of the output or error file, without its end
    receipt: bytes = b""
    tokens: Tokens = Tokens()


def new_id(kind: str, now: float | None = None) -> str:
    """`file-` or `batch_` and 24 hex digits that sort by their time of making."""
    milliseconds = int((time.time() if now is None else now) * 1000)
    return f"{kind}{milliseconds:012x}{random_bytes(6).hex()}"
