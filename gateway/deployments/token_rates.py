"""How many tokens a deployment counts for text: learned from its replies, for the bills of calls that it never counts.

A call that ends early often has no usage. Its bill is then an estimate from the text: the prompt's by the gateway's
rule of thumb, the answer's by its bytes. Each exact reply shows how far these are from the deployment's own counts. The
rates are sums with decay, so long texts count more than short ones, and a changed model is learned within a few dozen
replies.
"""

from __future__ import annotations

import math

BYTES_PER_TOKEN = 4  # in English text: the rate before any reply
DECAY = 0.98  # of what earlier replies taught, per reply
SAMPLED_FIRST = 16  # replies whose text is measured at the start; measuring parses it
SAMPLED_EACH = 16  # then every so many replies
MIN_RATE, MAX_RATE = 1 / 64, 4.0  # tokens per byte; a token has a byte at least, and special tokens add some
MIN_PROMPT_FACTOR, MAX_PROMPT_FACTOR = 0.25, 4.0


class TokenRates:
    """The rates of one deployment. Owned by the event loop."""

    __slots__ = ("_counted", "_estimated", "_output_bytes", "_output_tokens", "_replies")

    def __init__(self) -> None:
        self._estimated = self._counted = 0.0  # tokens of prompts, by the gateway and by the deployment
        self._output_bytes = self._output_tokens = 0.0
        self._replies = 0

    def prompt_tokens(self, estimate: int) -> int:
        """A prompt's tokens by the deployment's tokenizer, from the gateway's estimate. At least 1 if that is."""
        if not self._estimated:
            return estimate
        return math.ceil(estimate * _between(MIN_PROMPT_FACTOR, self._counted / self._estimated, MAX_PROMPT_FACTOR))

    @property
    def tokens_per_byte(self) -> float:
        """Tokens per byte (UTF-8) of an answer's text."""
        if not self._output_bytes:
            return 1 / BYTES_PER_TOKEN
        return _between(MIN_RATE, self._output_tokens / self._output_bytes, MAX_RATE)

    def learn_prompt(self, estimate: int, counted: int) -> None:
        """Learn from the count of a prompt that has only text."""
        self._estimated = self._estimated * DECAY + estimate
        self._counted = self._counted * DECAY + counted

    def wants_output(self) -> bool:
        """Whether the text of the reply that has just ended is to be measured. Counts the reply."""
        self._replies += 1
        return self._replies <= SAMPLED_FIRST or self._replies % SAMPLED_EACH == 0

    def learn_output(self, text_bytes: int, counted: int) -> None:
        """Learn from the token count of an answer whose text was received completely."""
        self._output_bytes = self._output_bytes * DECAY + text_bytes
        self._output_tokens = self._output_tokens * DECAY + counted


def _between(least: float, value: float, most: float) -> float:
    """The value, or the bound that it exceeds. Faster than `min` and `max`."""
    return least if value < least else most if value > most else value
