import random
from pathlib import Path

import pytest

from backend.demo_model import WEIGHTS, evaluate


def test_the_cases_are_the_same_every_time_and_end_with_a_question() -> None:
    once, again = (evaluate.cases(random.Random(1), 5) for _ in range(2))
    assert once == again
    for pairs in once.values():
        assert len(pairs) == 5
        assert all(conversation.messages[-1]["role"] == "user" and right for conversation, right in pairs)


def test_an_answer_must_match_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, model = evaluate.load(WEIGHTS)
    right = [
        answer for pairs in evaluate.cases(random.Random(evaluate.EVALUATION_SEED), 4).values() for _, answer in pairs
    ]
    outputs = iter([*right[:3], right[3] + "?", *right[4:]])
    monkeypatch.setattr(
        evaluate, "answers", lambda _tokenizer, _model, conversations: [next(outputs) for _ in conversations]
    )
    first, *others = evaluate.scores(tokenizer, model, 4)
    assert (first.right, first.total) == (3, 4)
    assert all(one.right == one.total == 4 for one in others)


def test_the_card_contains_the_measurements(tmp_path: Path) -> None:
    _, model = evaluate.load(WEIGHTS)
    evaluate.write_card(tmp_path, model, 0.125, [evaluate.Score("sum", 3, 4)], "It took a night.")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| sum | 3 of 4 (75.0%) |" in card
    assert "3,050,688" in card
    assert "0.1250 nats" in card
    assert "It took a night." in card
