"""Records of the Batch API: files, batches, and the results of lines. All are frozen; a change creates a new value.

A batch has only these transitions, and records the time of each status that it enters:

  validating -> in_progress -> finalizing -> completed | expired | failed (if its input file was deleted)
  validating -> failed
  validating | in_progress -> cancelling -> cancelled

Stores save `File` and `Batch` as msgpack maps: renaming a field would make stored records unreadable.
"""

from __future__ import annotations

import time
from enum import Enum
from typing import Any

import msgspec

from gateway.core.ids import random_bytes

DAY_SECONDS = 86_400
INPUT_PURPOSE = "batch"


class BatchStatus(Enum):
    """OpenAI's statuses of a batch. The module's docstring lists the transitions."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})
# Statuses with a separate time field. The time of `validating` is `created_at`.
TIMED = tuple(status for status in BatchStatus if status is not BatchStatus.VALIDATING)


class File(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded input file, or an output or error file of a batch. Its content is stored under the same id."""

    id: str
    tenant: str
    filename: str
    purpose: str  # `batch` or `batch_output`
    bytes: int
    created_at: int  # seconds since the epoch, like all times in this module
    expires_at: int

    def to_json(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
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
    """An error in one line of an input file, or in the whole file if `line` is None."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class TokenTotals(msgspec.Struct, frozen=True):
    """Tokens used by the lines of a batch. `cached` is a part of `input`, and `reasoning` a part of `output`."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: TokenTotals) -> TokenTotals:
        return TokenTotals(
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
        )


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch and its lease. Until `leased_until`, only the gateway `owner` may run the batch and write its results.

    The owner extends its lease while it runs the batch. The methods that return a `Batch` are the allowed changes. Each
    returns the changed batch, or None if the change is not allowed now.
    """

    id: str
    tenant: str
    key_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_seconds: int | None = None  # lifetime of the output files, from their creation
    status: BatchStatus = BatchStatus.VALIDATING
    ending: BatchStatus = BatchStatus.COMPLETED  # the status that follows `finalizing` or `cancelling`
    times: dict[str, int] = {}  # seconds since the epoch, by the name of the status that was entered
    model: str | None = None  # only if all lines name the same model
    total: int = 0
    completed: int = 0
    failed: int = 0
    tokens: TokenTotals = TokenTotals()
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    owner: str = ""
    leased_until: float = 0.0

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def to_json(self) -> dict[str, Any]:
        """Return OpenAI's batch object. Fields without a value are omitted or null, as the published schema says."""
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

    # Changes

    def entered(self, status: BatchStatus, now: float, **more: Any) -> Batch:
        """Enter a status at `now`, and replace the fields in `more`."""
        times = {**self.times, status.value: int(now)}
        return msgspec.structs.replace(self, status=status, times=times, **more)

    def claimed(self, owner: str, now: float, lease_seconds: float) -> Batch | None:
        """Take the lease. Returns None if the batch has ended, or if another owner's lease is still valid."""
        if self.has_ended or (self.owner not in ("", owner) and now < self.leased_until):
            return None
        return msgspec.structs.replace(self, owner=owner, leased_until=now + lease_seconds)

    def extended(self, owner: str, now: float, lease_seconds: float) -> Batch | None:
        """Extend the lease. Returns None if the batch has ended or has another owner."""
        if self.owner != owner or self.has_ended:
            return None
        return msgspec.structs.replace(self, leased_until=now + lease_seconds)

    def released(self, owner: str) -> Batch | None:
        """Release the lease, so any gateway can claim the batch at once. Returns None if it has another owner."""
        return msgspec.structs.replace(self, owner="", leased_until=0.0) if self.owner == owner else None

    def cancelling(self, now: float) -> Batch | None:
        """Begin cancellation. Returns None if the batch is being finalized or cancelled, or has ended."""
        if self.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            return None
        return self.entered(BatchStatus.CANCELLING, now, ending=BatchStatus.CANCELLED)


class LineResult(msgspec.Struct, frozen=True):
    """The result of one finished line. `receipt` is the encoded receipt for the ledger; empty if nothing was used."""

    line: int
    ok: bool
    content: bytes  # the line for the output or error file, without the newline
    receipt: bytes = b""
    tokens: TokenTotals = TokenTotals()


def new_id(kind: str, now: float | None = None) -> str:
    """Return `kind` (`file-` or `batch_`) with 24 hex digits that sort by creation time; `now` is in epoch seconds."""
    milliseconds = int((time.time() if now is None else now) * 1000)
    return f"{kind}{milliseconds:012x}{random_bytes(6).hex()}"
