"""Predicting an engine's own token counts from the usage of earlier prompts."""

from __future__ import annotations

import pytest

from gateway.prefix import token_calibration
from gateway.prefix.fingerprint import BLOCK_BYTES, BLOCK_TOKENS, fingerprint
from gateway.prefix.token_calibration import TokenCalibration

PER_BLOCK = 90  # in this engine's tokens


def estimated(text: str) -> int:
    return len(text) // 4


def chain_of(text: str) -> tuple[int, ...]:
    return fingerprint([text.encode()], 0)


def words(name: str, blocks: float) -> str:
    length = int(blocks * BLOCK_BYTES)
    return "".join(f"{name}{i}," for i in range(length))[:length]


class Engine:
    """Counts the tokens of a text, including the earlier answer if the text repeats it."""

    def __init__(self) -> None:
        self.counts = TokenCalibration()

    def answered(self, text: str, *, tokens: int, matched: int = 0, cached: int = 0, output: int = 1) -> None:
        self.counts.learn(chain_of(text), matched, tokens, cached, output)

    def predicted(self, text: str, matched: int) -> int:
        return self.counts.predict_cached_tokens(chain_of(text), matched, estimated(text))


def test_the_default_applies_before_anything_is_learned() -> None:
    assert Engine().predicted(words("a", 10), 4) == 4 * BLOCK_TOKENS


def test_the_tokens_of_a_block_are_learned() -> None:
    engine = Engine()
    for name in "abcdefghijklmnopqrstuvwxyz" * 5:
        engine.answered(words(name, 10), tokens=10 * PER_BLOCK)
    assert engine.predicted(words("new", 10), 10) == pytest.approx(10 * PER_BLOCK, rel=0.01)


def test_tokens_are_exact_where_an_earlier_prompt_ended() -> None:
    engine = Engine()
    first = words("a", 10.5)
    engine.answered(first, tokens=1234)
    whole = first + words("b", 5)
    assert engine.predicted(whole, 10) == 1234
    assert engine.predicted(whole, 12) == 1234 + int(2 * engine.counts.tokens_per_block)
    assert engine.predicted(whole, 9) == int(9 / 10 * 1234)  # after a partial eviction
    assert engine.predicted(whole, 0) == 0


def test_tokens_are_interpolated_between_two_anchors() -> None:
    engine = Engine()
    engine.answered(first := words("a", 10), tokens=1000)
    engine.answered(second := first + words("b", 10), tokens=5000)
    assert engine.predicted(second + words("c", 4), 15) == 3000
    assert engine.predicted(first, 5) == 500


def test_the_search_for_an_anchor_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_calibration, "SEARCH_BLOCKS", 3)
    engine = Engine()
    first = words("a", 10)
    engine.answered(first, tokens=1234)
    whole = first + words("b", 5)
    assert engine.predicted(whole, 12) == 1234 + int(2 * engine.counts.tokens_per_block)
    assert engine.predicted(whole, 13) == int(13 * engine.counts.tokens_per_block)


@pytest.mark.parametrize(("kept", "share"), [(1.0, 1.0), (0.0, 0.0), (0.5, 0.5)])
def test_the_reuse_of_answers_is_learned(kept: float, share: float) -> None:
    engine = Engine()
    for name in "abcdefghijklmnopqrst":
        engine.answered(words(name, 10), tokens=900, output=200)
        turn = words(name, 10) + words("next", 5)
        engine.answered(turn, matched=10, tokens=1400, cached=900 + int(200 * kept))
    assert engine.counts.answer_reuse == pytest.approx(share, abs=0.02)
    engine.answered(words("new", 10), tokens=900, output=200)
    assert engine.predicted(words("new", 10) + words("next", 5), 10) == pytest.approx(900 + 200 * share, abs=6)


def test_an_eviction_does_not_change_the_reuse_of_answers() -> None:
    engine = Engine()
    engine.answered(words("a", 10), tokens=900, output=200)
    engine.answered(words("a", 10) + words("b", 2), matched=10, tokens=1100, cached=1100)
    reuse = engine.counts.answer_reuse
    engine.answered(words("a", 10) + words("c", 2), matched=10, tokens=1100, cached=400)
    assert engine.counts.answer_reuse == reuse > 0


def test_a_prediction_does_not_exceed_the_prompt() -> None:
    engine = Engine()
    for name in "abcdefghij":
        engine.answered(words(name, 10), tokens=640, output=500)
        engine.answered(words(name, 10) + words("x", 9), matched=10, tokens=1216, cached=1140)
    engine.answered(words("new", 10), tokens=640, output=500)
    assert engine.counts.answer_reuse > 0.8
    short = words("new", 10) + words("y", 1)
    assert engine.predicted(short, 10) <= 11.5 * engine.counts.tokens_per_block


def test_predictions_are_whole_blocks_once_the_block_size_is_known() -> None:
    engine = Engine()
    engine.answered(words("a", 10), tokens=1234)
    whole = words("a", 10) + words("b", 5)
    for cached in (256, 256, 512, 1408):
        engine.answered(words(f"{cached}", 20), tokens=3000, cached=cached)
        assert engine.predicted(whole, 10) == 1234
    engine.answered(words("d", 20), tokens=3000, cached=128)
    assert engine.predicted(whole, 10) == 1152


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_calibration, "ANCHORS_MAX", 2)
    engine = Engine()
    for name, tokens in (("a", 1000), ("b", 2000), ("c", 4000)):
        engine.answered(words(name, 10), tokens=tokens)
    assert [engine.predicted(words(name, 10), 10) for name in "bc"] == [2000, 4000]
    assert engine.predicted(words("a", 10), 10) != 1000


def test_a_prompt_without_blocks_teaches_nothing() -> None:
    counts = TokenCalibration()
    counts.learn((), 0, 10, 0, 5)
    counts.learn((1,), 0, 0, 0, 5)
    assert counts.tokens_per_block == BLOCK_TOKENS
