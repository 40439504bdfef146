"""What the scheduler has counted since the start, for metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from backend.engine.outputs import FinishReason
from backend.engine.plan import count_accepted
from backend.engine.request import Request

STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's


@dataclass(slots=True)
class StepTokens:
    """Histogram of the number of tokens per step, drafts included."""

    num_steps: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS_BOUNDS) + 1))  # by bound; then above
    num_tokens: int = 0

    def add(self, num_tokens: int) -> None:
        self.num_steps[bisect_left(STEP_TOKENS_BOUNDS, num_tokens)] += 1
        self.num_tokens += num_tokens


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    prompt_tokens: int = 0  # of prompts that have been computed completely; each prompt counts once, whatever its `n`
    cached_prompt_tokens: int = 0  # of these, how many came from the prefix cache
    transferred_prompt_tokens: int = 0  # of these, how many came from another engine
    generation_tokens: int = 0
    unwanted_tokens: int = 0  # of these, how many were generated after a stop string that the server found in the text
    prefix_cache_queries: int = 0  # in tokens
    prefix_cache_hits: int = 0  # in tokens
    preemptions: int = 0
    drafts: int = 0  # how often any tokens were drafted for a request
    draft_tokens: int = 0
    accepted_tokens: list[int] = field(default_factory=list)  # by position among the drafts
    step_tokens: StepTokens = field(default_factory=StepTokens)
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def count_prompt(self, request: Request) -> None:
        """Counts the prompt of a request, unless another choice of the same prompt has been counted."""
        if not request.prompt_tally.is_counted:
            request.prompt_tally.is_counted = True
            self.prompt_tokens += request.num_prompt_tokens
            self.cached_prompt_tokens += request.num_cached_tokens
            self.transferred_prompt_tokens += min(request.num_cached_tokens, request.num_transferred_tokens)

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Counts the drafts of one request in one step."""
        self.drafts += 1
        self.draft_tokens += num_drafts
        self.accepted_tokens += [0] * (num_drafts - len(self.accepted_tokens))
        for position in range(num_accepted):
            self.accepted_tokens[position] += 1

    def count_accepted(self, drafts: Sequence[int], token_ids: Sequence[int]) -> int:
        """Counts the drafts of one request, if any, and returns how many of them are accepted (`plan.py`)."""
        if not drafts:
            return 0
        num_accepted = count_accepted(drafts, token_ids)
        self.count_drafts(len(drafts), num_accepted)
        return num_accepted
