"""Steps that a device computes while the host continues: which tokens they compute, and where their results will be.

Several such steps can be in flight: the current one, a second one for parts of the plan that the first one does not
have, and the next one. A device computes them in the order in which they were launched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backend.engine.graph_sampling import StepResults
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.prompt_outputs import NO_OUTPUT

MAX_UNREAD = 3  # launched steps whose results have not been read


class HostResults:
    """The buffers on the host to which launched steps copy their tokens: one for each step that may be unread."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._buffers = [torch.zeros(max_tokens, dtype=torch.int64, pin_memory=is_cuda) for _ in range(MAX_UNREAD)]

    def next(self) -> Tensor:
        """The buffer for the next step: the one that was used longest ago."""
        self._buffers.append(self._buffers.pop(0))
        return self._buffers[-1]


class LaunchedStep:
    """A step that was launched on the device. Its tokens are copied to `host` as soon as they are sampled.

    rows: for each part of the plan, the place of its token among `chosen`; meaningless for parts that sample no token.
    chosen: [N] int64, a part of `StepInputs.tokens` that begins at `offset`. `host` is not written again before
    `outputs` has been called, nor is the memory of `results`: what there is besides tokens.
    """

    def __init__(
        self,
        plan: Sequence[ScheduledRequest],
        rows: list[int],
        chosen: Tensor,
        offset: int,
        host: Tensor,
        results: StepResults | None = None,
    ) -> None:
        self.requests = [scheduled.request for scheduled in plan]
        self.starts = [scheduled.start for scheduled in plan]  # the position of the first token of each part
        self.lens = [scheduled.num_tokens for scheduled in plan]
        self.tables = [request.block_table for request in self.requests]  # these lists grow, but never change otherwise
        self.samples = [scheduled.catches_up for scheduled in plan]
        self.rows = rows
        self._offset, self._results = offset, results
        self._host = host[: len(chosen)]
        self._host.copy_(chosen, non_blocking=True)
        self._done = torch.cuda.Event() if chosen.is_cuda else None
        if self._done:
            self._done.record()

    def places(self) -> dict[str, int]:
        """The place of each request in the plan that was launched, by request id."""
        return {request.request_id: place for place, request in enumerate(self.requests)}

    def sampled_places(self) -> dict[str, int]:
        """The place in `StepInputs.tokens` of each request's token, by request id, until a later step overwrites it."""
        pairs = zip(self.requests, self.rows, self.samples, strict=True)
        return {request.request_id: self._offset + row for request, row, samples in pairs if samples}

    def covers(self, scheduled: ScheduledRequest, place: int | None) -> bool:
        """Whether the step computes exactly these tokens, at this place, and stores their keys and values in their
        slots."""
        if place is None:
            return False
        request = scheduled.request
        return (
            self.requests[place] is request
            and self.starts[place] == scheduled.start
            and self.lens[place] == scheduled.num_tokens
            and self.tables[place] is request.block_table  # otherwise it was preempted and resumed in other blocks
        )

    def computes(self, plan: Sequence[ScheduledRequest]) -> bool:
        """Whether the step computes exactly this plan, in its order."""
        return len(plan) == len(self.requests) and all(
            self.covers(scheduled, place) for place, scheduled in enumerate(plan)
        )

    def outputs(self) -> list[RunnerOutput]:
        """The results, in the order of the plan that was launched. Waits for the device."""
        if self._done:
            self._done.synchronize()
        token_ids: list[int] = self._host.tolist()
        if self._results:
            outputs = self._results.outputs([token_ids[row] for row in self.rows], self.rows)
            return [output if samples else NO_OUTPUT for output, samples in zip(outputs, self.samples, strict=True)]
        return [
            RunnerOutput((token_ids[row],)) if samples else NO_OUTPUT
            for row, samples in zip(self.rows, self.samples, strict=True)
        ]
