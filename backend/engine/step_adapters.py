"""Which rows of a step use LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from backend.engine.plan import ScheduledRequest
from backend.layers.lora import AdapterRows


class StepAdapters(NamedTuple):
    """The rows of a step that use LoRA adapters."""

    tokens: AdapterRows  # of all tokens
    outputs: AdapterRows | None  # of the output rows

    @staticmethod
    def of(
        plan: Sequence[ScheduledRequest], query_lens: Sequence[int], output_lens: Sequence[int], device: torch.device
    ) -> StepAdapters | None:
        """None if no request of the plan uses an adapter."""
        adapters = [scheduled.request.adapter for scheduled in plan]
        tokens = AdapterRows.of(adapters, query_lens, device) if any(adapters) else None
        return StepAdapters(tokens, AdapterRows.of(adapters, output_lens, device)) if tokens else None
