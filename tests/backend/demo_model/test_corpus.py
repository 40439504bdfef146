import itertools
import random
from collections import Counter

import pytest

from backend.demo_model import corpus, phrasing


def sample(seed: int, count: int) -> list[corpus.Conversation]:
    return list(itertools.islice(corpus.conversations(seed), count))


def test_the_same_seed_makes_the_same_conversations() -> None:
    assert sample(3, 200) == sample(3, 200)
    assert sample(3, 200) != sample(4, 200)


def test_every_kind_has_its_share() -> None:
    kinds = Counter(one.kind for one in sample(0, 5000))
    assert set(kinds) >= {"definition", "purpose", "short", "howto", "difference", "identity", "greeting", "long"}
    assert min(kinds.values()) > 5000 * 0.005
    assert max(kinds.values()) < 5000 * 0.4
    answered = Counter(
        message["content"]
        for one in sample(0, 5000)
        for message in one.messages
        if message["role"] == "assistant" and message["content"]
    )
    assert all(answered[term.what] > 0 for term in corpus.topics().terms)
    assert all(answered[ask.answer] > 0 for ask in corpus.topics().fixed_answers)


def test_every_name_and_question_has_one_answer() -> None:
    names = Counter(name.lower() for term in corpus.topics().terms for name, _ in term.names)
    questions = Counter(question for ask in corpus.topics().fixed_answers for question in ask.questions)
    assert [name for name, count in names.items() if count > 1] == []
    assert [question for question, count in questions.items() if count > 1] == []


def test_conversations_alternate_and_end_with_the_assistant() -> None:
    follows = {"system": {"user"}, "user": {"assistant"}, "assistant": {"user", "tool"}, "tool": {"assistant"}}
    for one in sample(1, 2000):
        roles = [message["role"] for message in one.messages]
        assert roles[0] in {"system", "user"}
        assert roles[-1] == "assistant"
        assert all(after in follows[before] for before, after in itertools.pairwise(roles))


@pytest.mark.parametrize("held_out", [False, True])
def test_sums_are_right_and_on_the_requested_side_of_the_split(held_out: bool) -> None:
    rng = random.Random(5)
    for _ in range(2000):
        a, sign, b, _, result = corpus.sum_question(rng, held_out).answer.rstrip(".").split()
        assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(result)
        assert (sign != "*" and corpus.is_held_out(a, sign, b)) == held_out


def test_held_out_phrasings_are_never_in_the_training_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phrasing, "as_typed", lambda _, question: question)
    rng = random.Random(6)
    held_out = {corpus.term_question(rng, True, "definition").question for _ in range(300)}
    trained = {corpus.term_question(rng, False, "definition").question for _ in range(20_000)}
    assert len(held_out) > 200
    assert held_out.isdisjoint(trained)


def test_the_plainest_phrasing_is_never_held_out() -> None:
    rng = random.Random(7)
    assert all(corpus.fixed_question(rng, held_out=True).question.strip() != "Hello" for _ in range(2000))


def test_tool_calls_use_an_offered_tool() -> None:
    rng = random.Random(8)
    for _ in range(500):
        one = corpus.tool_conversation(rng)
        offered = {tool["function"]["name"]: set(tool["function"]["parameters"]["properties"]) for tool in one.tools}
        for message in one.messages:
            for call in message.get("tool_calls", []):
                assert set(call["function"]["arguments"]) == offered[call["function"]["name"]]
