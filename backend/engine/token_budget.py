"""One step's tokens, and who may have how many of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.engine.request import Request

BACKGROUND_PROMPTS_SHARE = 0.25  # of a step's tokens, beside somebody more urgent who is at his output


@dataclass(slots=True)
class TokenBudget:
    """The tokens of one step that are still to be given out.

    Beside more urgent output, prompts of background work are read in small pieces; beside a more urgent prompt, which
    is somebody's time to the first token, not at all. Single tokens of background work hold a step up very little.
    """

    tokens: int
    background_prompts: int = field(init=False)  # of these tokens, how many may be of background work's prompts
    beside_output: int = field(init=False)

    def __post_init__(self) -> None:
        self.background_prompts = self.tokens
        self.beside_output = max(1, int(self.tokens * BACKGROUND_PROMPTS_SHARE))

    def admits(self, request: Request) -> bool:
        return not request.is_background or self.background_prompts > 0

    def share(self, request: Request) -> int:
        """How many tokens a request may advance by. It spends them all, or none."""
        wanted = min(request.num_uncomputed_tokens, self.tokens)
        is_held_back = request.is_background and request.num_uncomputed_tokens > 1
        return min(wanted, self.background_prompts) if is_held_back else wanted

    def spend(self, request: Request, num_tokens: int) -> None:
        self.tokens -= num_tokens
        is_prompt = request.num_uncomputed_tokens > 1
        if not request.is_background:
            self.background_prompts = 0 if is_prompt else min(self.background_prompts, self.beside_output)
        elif is_prompt:
            self.background_prompts -= num_tokens
