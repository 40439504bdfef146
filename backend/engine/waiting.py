"""What requests wait for beside the steps: the mask of a grammar, or an image's embeddings, which may never come."""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.outputs import FinishReason, StepOutput
from backend.engine.request import Request
from backend.engine.scheduler import Scheduler


def wait_for_input(running: Sequence[Request], seconds: float) -> None:
    """Waits after an empty plan until the first running request can advance or the time is over."""
    assert running, "nothing to do: check has_unfinished before calling step"
    for request in running:
        if request.awaits_mask and request.grammar:
            request.grammar.is_ready(seconds)
            return
        if request.images:
            start = request.num_computed_tokens
            request.images.num_computable(start, request.num_uncomputed_tokens, request.priority, seconds)
            return
    # Otherwise, what was missing has arrived since the plan was made.


def end_failed(scheduler: Scheduler) -> list[StepOutput]:
    """Ends the requests with an image that the encoder has failed to encode, and frees their blocks."""
    return [
        scheduler.finish(request, FinishReason.ERROR, error=error)
        for request in (*scheduler.running, *scheduler.waiting)
        if request.images and (error := request.images.error)
    ]
