"""`SentCall` follows one call at one deployment, and feeds what its response shows into the deployment's estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gateway.prefix.conversation import Conversation
from gateway.prefix.events.block_index import FinishedCall
from gateway.prefix.fingerprint import BLOCK_TOKENS, text_bytes_of
from gateway.prefix.in_flight import InFlightPrompt
from gateway.prefix.working_set import RoutedPrompt, WorkingSet

if TYPE_CHECKING:
    from gateway.deployments.state import DeploymentState


LOADED_SHARE_MIN = 0.25  # of the cached tokens that are expected: with fewer, a load has failed


class MovedBlocks(NamedTuple):
    """What a deployment drops because a call's deployment loads it: of `matched` blocks all but the first `kept`."""

    source: DeploymentState
    matched: int
    kept: int


class SentCall:
    """A call at a deployment, from the sending of its request to its end. Updates the deployment's estimates."""

    __slots__ = (
        "_conversation",
        "_load_failed",
        "_matched",
        "_working_set",
        "blocks_from",
        "cache_slot",
        "deployment",
        "may_be_held",
        "moved",
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
        self._load_failed: bool | None = None  # None: it loads nothing, or the reply does not tell
        self.moved: MovedBlocks | None = None
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

    def expect_loaded(self, source: DeploymentState, matched: int, *, moves: bool) -> int | None:
        """The deployment will load the prompt's first `matched` blocks from `source`, as far as it lacks them.

        If the prompt continues a conversation and `moves` is true, `source` drops what only this conversation has, so
        that the two caches have one copy. Returns how many engine tokens it keeps then, since others may share them.
        """
        prompt, calibration = self.prompt, source.token_calibration  # which knows the prompt
        chain, tokens = prompt.chain, prompt.prompt_tokens
        self.blocks_from, self._matched = source.name, matched
        self.predicted_cached_tokens = calibration.predict_cached_tokens(chain, matched, tokens)
        self.deployment.estimate.expect_cached(prompt, matched * BLOCK_TOKENS)
        own_part = source.cache.predict(chain).own_part if moves and source.role is None else None
        if own_part is None:
            return None
        kept = own_part + 1 if own_part else 0  # what is shared may end within the next block
        source.cache.give_up(chain[:matched], kept)
        self.moved = MovedBlocks(source, matched, kept)
        return calibration.predict_cached_tokens(chain, kept, tokens)

    def first_chunk(self, now: float) -> None:
        """The first chunk arrived: the prompt has been computed."""
        self.deployment.estimate.first_chunk(self.prompt, now)

    def learn_cached(self, input_tokens: int, cached_tokens: int) -> None:
        """The response reported how many tokens of its prompt were cached.

        Both counts are in the engine's own tokens. Loaded tokens are among them, and tell nothing about the cache.
        """
        if self.blocks_from is not None:
            if cached_tokens or self.deployment.estimate.reports_cached:
                self._load_failed = cached_tokens < LOADED_SHARE_MIN * self.predicted_cached_tokens
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
        if self._load_failed is not None:
            self.deployment.note_load(now, failed=self._load_failed)
        self.deployment.estimate.end(self.prompt, now, answered=answered, output_tokens=output_tokens)
        if self._conversation is not None:
            self._working_set.end(self._conversation, now)
        if self.cache_slot is not None and self.deployment.cache_slots is not None:
            self.deployment.cache_slots.release(self.cache_slot)
        if answered and self.deployment.outbox is not None:
            self.deployment.outbox.append(self)
