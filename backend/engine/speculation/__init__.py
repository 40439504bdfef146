"""Guessing the tokens that follow, so that one step of the model can confirm several: the family of drafters.

Begin at speculator.py. What a drafter guesses changes no answer, only how many steps it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.families import load_member

if TYPE_CHECKING:
    from backend.engine.config import ResolvedConfig
    from backend.engine.speculation.base import Drafter

DRAFTERS = {
    "ngram": "backend.engine.speculation.ngram:NgramDrafter",
    "draft_model": "backend.engine.speculation.draft_model:ModelDrafter",
}


def create_drafter(config: ResolvedConfig) -> Drafter | None:
    """None if nothing is to be drafted. Raises what loading a model raises, if the drafter is one."""
    if config.speculation not in DRAFTERS:
        return None
    made: Drafter = load_member(DRAFTERS, config.speculation)(config)
    return made
