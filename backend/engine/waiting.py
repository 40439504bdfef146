"""What an engine waits for if no running request can advance: the mask of a grammar, or an image's embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.request import Request


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
