"""Corrects the formulas for media by the usage that replies report.

For each tenant and model, a factor per kind of media is learned. Media of unknown size have factors of their own,
because their formula is only a default. A reply reports the tokens of the whole prompt, so those of its text are
subtracted as estimated: by bytes, times the mean factor of the model's prompts without media. A prompt teaches only if
most of its tokens are media; of several kinds, each takes its share of the error.

    factor *= limited(observed / expected) ** (WEIGHT * the kind's share of the expected tokens)

The correction is bounded: by a reply (`STEP_MAX`), and in all (`FACTOR_MAX`). Tenants do not affect each other.
"""

from __future__ import annotations

from collections import OrderedDict

from gateway.types import Call, PromptMedia

WEIGHT = 0.3  # of the newest reply
STEP_MAX = 2.0  # ratio that one reply can show at most, in both directions
FACTOR_MAX = 16.0  # of a learned factor, and its inverse
TEXT_WEIGHT = 0.1  # of the newest reply, in the factor of text
TEXT_FACTOR_MAX = 4.0
MEDIA_MIN_SHARE = 0.5  # of a prompt's tokens, for its reply to teach
LEARNED_MAX = 4_096  # pairs of tenant and model; the least recently used are forgotten


class _Learned:
    """The factors of one tenant and model."""

    __slots__ = ("media", "text")

    def __init__(self) -> None:
        self.text = 1.0  # tokens per estimated token of text
        self.media: dict[str, float] = {}  # tokens per token of the formula, by kind


class MediaCalibration:
    """Learned factors of all tenants and models. Owned by the event loop."""

    def __init__(self) -> None:
        self._learned: OrderedDict[tuple[str, str], _Learned] = OrderedDict()

    def corrected_tokens(self, tenant: str, model: str, media: PromptMedia) -> int:
        """The tokens of a prompt's media: those of the formula, times what was learned."""
        learned = self._learned.get((tenant, model))
        return media.formula_tokens if learned is None else round(sum(_expected(learned, media).values()))

    def learns_from(self, call: Call) -> bool:
        """Whether the reply of a call may teach anything: only while some calls have media."""
        return call.media is not None or bool(self._learned)

    def learn(self, call: Call, input_tokens: int) -> None:
        """Learn from a reply that reported the prompt's tokens, counted by the call's own model."""
        key = (call.principal.tenant_name, call.model_name)
        learned = self._learned.get(key)
        if call.media is None:
            if learned is not None:
                ratio = _limited(input_tokens / max(1, call.prompt_tokens_estimate), TEXT_FACTOR_MAX)
                learned.text += TEXT_WEIGHT * (ratio - learned.text)
            return
        if learned is None:
            learned = self._learned[key] = _Learned()
            if len(self._learned) > LEARNED_MAX:
                self._learned.popitem(last=False)
        self._learned.move_to_end(key)
        self._learn_media(learned, call, call.media, input_tokens)

    def _learn_media(self, learned: _Learned, call: Call, media: PromptMedia, input_tokens: int) -> None:
        by_kind = _expected(learned, media)
        expected = sum(by_kind.values())
        text_tokens = learned.text * (call.prompt_tokens_estimate - media.formula_tokens)
        if expected < MEDIA_MIN_SHARE * (expected + text_tokens):
            return
        ratio = _limited((input_tokens - text_tokens) / expected, STEP_MAX)
        for kind, tokens in by_kind.items():
            factor = learned.media.get(kind, 1.0) * ratio ** (WEIGHT * tokens / expected)
            learned.media[kind] = _limited(factor, FACTOR_MAX)


def _expected(learned: _Learned, media: PromptMedia) -> dict[str, float]:
    return {kind: tokens * learned.media.get(kind, 1.0) for kind, tokens in media.by_kind}


def _limited(ratio: float, most: float) -> float:
    return min(max(ratio, 1 / most), most)
