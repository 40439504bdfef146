"""Speculative decoding: drafters predict the next tokens, so that one step of the model can confirm several of them.

It may import the engine's request, plan, scheduler and model, but not its config.py. Begin at speculator.py: drafts
never change a request's tokens, only how many steps they take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.families import load_member

if TYPE_CHECKING:
    from backend.engine.resolved_config import ResolvedConfig
    from backend.engine.speculation.base import Drafter

DRAFTERS = {
    "ngram": "backend.engine.speculation.ngram:NgramDrafter",
    "draft_model": "backend.engine.speculation.draft_model:ModelDrafter",
}


def create_drafter(config: ResolvedConfig) -> Drafter | None:
    """The configured drafter, or None if speculation is off. For a draft model, raises the errors of loading it."""
    if config.speculation not in DRAFTERS:
        return None
    drafter: Drafter = load_member(DRAFTERS, config.speculation)(config)
    return drafter
