"""Appends the tokens that a grammar forces, without a forward pass for each. The next step computes them all at once.

A forced token is the only one that the grammar allows, so no logits are needed to know it, and the tokens are the same
as with one step for each. grammar_positions.py finds forced tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from backend.engine.outputs import FinishReason
from backend.engine.request import Request

MIN_FORCED = 2  # tokens: a step that computes several of a sequence is no recorded one, which costs a little


def append_forced(
    request: Request, finish_reason: Callable[[Request, int], FinishReason | None]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Appends the forced tokens until one of them ends the request. Returns them, and why the request ends.

    finish_reason: of a request with its newest token.
    """
    forced, reason, num_new = forced_tokens(request), None, 0
    while reason is None and num_new < len(forced):
        request.append(forced[num_new])
        reason = finish_reason(request, forced[num_new])
        num_new += 1
    return forced[:num_new], reason


def forced_tokens(request: Request) -> tuple[int, ...]:
    """The next tokens, if no logits are needed to know and to report them. Empty for less than MIN_FORCED tokens."""
    sampling = request.sampling
    needs_logits = sampling.logprobs is not None or sampling.logit_bias or sampling.bad_words
    if not request.grammar or needs_logits or request.num_output_tokens < sampling.min_tokens:
        return ()
    forced = request.grammar.forced
    return forced if len(forced) >= MIN_FORCED else ()
