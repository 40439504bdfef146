"""Policy model of the Batch API: how lines run, and the bounds on files and batches."""

from __future__ import annotations

from pydantic import Field

from gateway.policy.fields import Count, Frozen, Name, Seconds


class Batches(Frozen):
    """How /v1/batches runs its lines."""

    latency_class: Name = Field("batch", alias="class", description="Latency class of every line.")
    concurrency: Count = Field(
        16, description="Lines that one gateway runs at the same time, over all batches. Read at the start only."
    )
    attempts: Count = Field(
        4, description="Attempts per line if its deployment fails. Waiting for capacity is not an attempt."
    )
    max_lines: Count = Field(50_000, description="Maximum lines of one input file.")
    max_open: Count = Field(100, description="Maximum unfinished batches of one tenant.")
    max_stored_bytes: Count = Field(
        10_000_000_000, description="Maximum bytes of one tenant's files, results included."
    )
    keep: Seconds = Field(
        2_592_000.0, description="How long batches, and files without an expiry date of their own, are stored."
    )
