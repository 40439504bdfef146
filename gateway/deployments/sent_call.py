"""`SentCall` follows one call at one deployment, and feeds what its response shows into the deployment's estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.prefix.conversation import Conversation
from gateway.prefix.events.block_index import FinishedCall
from gateway.prefix.fingerprint import BLOCK_TOKENS, text_bytes_of
from gateway.prefix.in_flight import InFlightPrompt
from gateway.prefix.working_set import RoutedPrompt, WorkingSet

if TYPE_CHECKING:
    from gateway.deployments.state import DeploymentState


class SentCall:
    """A call at a deployment, from the sending of its request to its end. Updates the deployment's estimates."""

    __slots__ = (
        "_conversation",
        "_matched",
        "_working_set",
        "blocks_from",
        "cache_slot",
        "deployment",
        "may_be_held",
        "predicted_cached_tokens",
        "prompt",
        "session",
        "usage",
    )  # fmt: skip

    def __init__(
        self,
        deployment: DeploymentState,
        call: RoutedPrompt,
        prompt: InFlightPrompt,
        working_set: WorkingSet,
        conversation: Conversation | None,
    ) -> None:
        self.deployment = deployment
        self.prompt = prompt
        self.cache_slot = None if deployment.cache_slots is None else deployment.cache_slots.occupy()
        self.session = call.session
        self.may_be_held = call.may_be_held
        self.blocks_from: str | None = None  # the deployment from which it loads the beginning of the prompt
        self.usage: tuple[str, int, int, int] | None = None  # call id; input, cached and output tokens
        self._matched = matched = prompt.prediction.matched
        # Computed now, because an equal prompt may finish first and change the calibration.
        self.predicted_cached_tokens = deployment.token_calibration.predict_cached_tokens(
            prompt.chain, matched, prompt.prompt_tokens
        )
        self._working_set = working_set
        self._conversation = conversation

    @property
    def tenant_name(self) -> str:
        """The tenant, if the call belongs to a conversation of the working set; else empty."""
        return "" if self._conversation is None else self._conversation.tenant

    def expect_loaded(self, source: DeploymentState, matched: int) -> None:
        """The deployment will load the prompt's first `matched` blocks from `source`, as far as it lacks them."""
        prompt, calibration = self.prompt, source.token_calibration  # which knows the prompt
        self.blocks_from, self._matched = source.name, matched
        self.predicted_cached_tokens = calibration.predict_cached_tokens(prompt.chain, matched, prompt.prompt_tokens)
        self.deployment.estimate.expect_cached(prompt, matched * BLOCK_TOKENS)

    def first_chunk(self, now: float) -> None:
        """The first chunk arrived: the prompt has been computed."""
        self.deployment.estimate.first_chunk(self.prompt, now)

    def learn_cached(self, input_tokens: int, cached_tokens: int) -> None:
        """The response reported how many tokens of its prompt were cached.

        Both counts are in the engine's own tokens. Loaded tokens are among them, and tell nothing about the cache.
        """
        if self.blocks_from is not None:
            return
        blocks = self.deployment.blocks
        evictions_reported = blocks is not None and blocks.reports_all_evictions
        self.deployment.estimate.learn_cached(
            self.prompt, input_tokens, cached_tokens, evictions_reported=evictions_reported
        )

    def learn_usage(self, call_id: str, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Learn the engine's token counts from the response's usage, and attribute KV blocks to the call."""
        chain, matched, estimated_tokens = self.prompt.chain, self._matched, self.prompt.prompt_tokens
        self.deployment.token_calibration.learn(chain, matched, input_tokens, cached_tokens, output_tokens)
        if self.deployment.blocks is not None:
            text_bytes = text_bytes_of(chain, estimated_tokens)
            self.deployment.blocks.call_finished(
                FinishedCall(call_id, chain, text_bytes, input_tokens, cached_tokens, output_tokens)
            )
        self.usage = call_id, input_tokens, cached_tokens, output_tokens

    def end(self, now: float, *, answered: bool = True) -> None:
        """The response is complete, or will not arrive (`answered=False`). Call it once."""
        output_tokens = 0 if self.usage is None else self.usage[3]
        self.deployment.estimate.end(self.prompt, now, answered=answered, output_tokens=output_tokens)
        if self._conversation is not None:
            self._working_set.end(self._conversation, now)
        if self.cache_slot is not None and self.deployment.cache_slots is not None:
            self.deployment.cache_slots.release(self.cache_slot)
        if answered and self.deployment.outbox is not None:
            self.deployment.outbox.append(self)
