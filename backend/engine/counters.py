"""What the scheduler has seen happen since the start."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from backend.engine.request import FinishReason

STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's


@dataclass(slots=True)
class StepTokens:
    """How many tokens steps had, drafts among them."""

    num_steps: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS_BOUNDS) + 1))  # up to each bound; above
    num_tokens: int = 0

    def add(self, num_tokens: int) -> None:
        self.num_steps[bisect_left(STEP_TOKENS_BOUNDS, num_tokens)] += 1
        self.num_tokens += num_tokens


@dataclass(slots=True)
class SchedulerCounters:
    prompt_tokens: int = 0  # of prompts that have been computed to their end, each once, whatever is made of it
    cached_prompt_tokens: int = 0  # of these, as many came from the prefix cache
    generation_tokens: int = 0
    unwanted_tokens: int = 0  # of these, behind the end that whoever reads them found in their text
    prefix_cache_queries: int = 0  # in tokens
    prefix_cache_hits: int = 0  # in tokens
    preemptions: int = 0
    drafts: int = 0  # times that any tokens were drafted for a request
    draft_tokens: int = 0
    accepted_tokens: list[int] = field(default_factory=list)  # by their place among the drafts
    step_tokens: StepTokens = field(default_factory=StepTokens)
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
