"""The token budget of one step, and how much of it each request may take."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.engine.request import Request

BACKGROUND_PROMPT_SHARE = 0.25  # of a step's tokens, if the step also decodes a more urgent request


@dataclass(slots=True)
class TokenBudget:
    """The tokens of one step that are not assigned yet.

    Without background work (`priority` above 0), this is a plain counter. Background prompts take small chunks while a
    more urgent request decodes, so that its inter-token latency stays low. While a more urgent prompt is computed, they
    take none, so that its time to first token stays low. Single background tokens hardly slow a step down and are
    always admitted.
    """

    tokens: int
    background_prompts: int = field(init=False)  # how many of `tokens` may go to prompts of background work
    beside_decode: int = field(init=False)  # the limit on `background_prompts` once a more urgent request decodes

    def __post_init__(self) -> None:
        self.background_prompts = self.tokens
        self.beside_decode = max(1, int(self.tokens * BACKGROUND_PROMPT_SHARE))

    def admits(self, request: Request) -> bool:
        """Whether a waiting request may start in this step."""
        return not request.is_background or self.background_prompts > 0

    def share(self, request: Request, num_uncomputed: int) -> int:
        """How many tokens a request with so many uncomputed ones may advance by. 0: it sits this step out."""
        wanted = min(num_uncomputed, self.tokens)
        is_limited = request.is_background and num_uncomputed > 1
        return min(wanted, self.background_prompts) if is_limited else wanted

    def spend(self, request: Request, num_uncomputed: int, num_tokens: int) -> None:
        """Takes the tokens that `share` granted."""
        self.tokens -= num_tokens
        is_prompt = num_uncomputed > 1
        if not request.is_background:
            self.background_prompts = 0 if is_prompt else min(self.background_prompts, self.beside_decode)
        elif is_prompt:
            self.background_prompts -= num_tokens
