"""The Batch API: how its lines are called, and how much of it there may be."""

from __future__ import annotations

from pydantic import Field

from gateway.policy.fields import Count, Frozen, Name, Seconds


class Batches(Frozen):
    """How /v1/batches works through its lines."""

    latency_class: Name = Field("batch", alias="class", description="The latency class of every line.")
    concurrency: Count = Field(
        16, description="Lines that one gateway has in flight, of all batches together; as it is at its start."
    )
    attempts: Count = Field(4, description="How often a line is tried whose server fails; waiting for room is no try.")
    max_lines: Count = Field(50_000, description="Lines of one file.")
    max_open: Count = Field(100, description="Batches of one tenant that are not over.")
    max_stored_bytes: Count = Field(10_000_000_000, description="Of one tenant's files together, results included.")
    keep: Seconds = Field(2_592_000.0, description="How long files without a date of their own, and batches, are kept.")
