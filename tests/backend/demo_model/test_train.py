import itertools
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from backend.demo_model import WEIGHTS, corpus, evaluate, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return evaluate.load(WEIGHTS)[0]


def test_only_assistant_tokens_have_labels(tokenizer: PreTrainedTokenizerFast) -> None:
    for one in itertools.islice(corpus.conversations(2), 200):
        (ids, labels), *_ = train.labelled(tokenizer, iter([one]))
        # Labels are shifted: the one at position t is the token at t + 1.
        assert all(label in (train.IGNORED, ids[t + 1]) for t, label in enumerate(labels[:-1]))
        spoken = tokenizer.decode([label for label in labels if label != train.IGNORED])
        expected = ""
        for message in one.messages:
            if message["role"] == "assistant":
                calls = [call["function"] for call in message.get("tool_calls", [])]
                expected += message["content"]
                expected += "\n".join(corpus.tool_call_text(call["name"], call["arguments"]) for call in calls)
                expected += train.IM_END
        assert spoken == expected


@pytest.mark.parametrize("kind", [train.lessons, train.packs])
def test_batches_are_the_same_for_the_same_seed(kind: type, tokenizer: PreTrainedTokenizerFast) -> None:
    once, again = (list(itertools.islice(kind(tokenizer, 5), 3)) for _ in range(2))
    for (inputs, labels), (same_inputs, same_labels) in zip(once, again, strict=True):
        assert torch.equal(inputs, same_inputs)
        assert torch.equal(labels, same_labels)
        assert inputs.shape == labels.shape
        assert train.TOKENS_PER_STEP - train.LESSON_LENGTH < inputs.numel() <= train.TOKENS_PER_STEP
        assert (labels != train.IGNORED).any()


def test_packs_lose_no_token(tokenizer: PreTrainedTokenizerFast) -> None:
    packed = torch.cat([inputs.flatten() for inputs, _ in itertools.islice(train.packs(tokenizer, 5), 3)]).tolist()
    source = train.labelled(tokenizer, corpus.conversations(5))
    straight = list(itertools.islice(itertools.chain.from_iterable(ids for ids, _ in source), len(packed)))
    assert packed == straight


def test_the_learning_rate_warms_up_and_decays_to_zero() -> None:
    rates = [train.rate_at(step, step / 1000) for step in range(1001)]
    peak = rates.index(max(rates))
    assert 0 < rates[0] < rates[peak] <= 1
    assert peak <= train.WARMUP_STEPS
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0)


def test_a_step_changes_every_weight_and_clears_the_gradients() -> None:
    torch.manual_seed(0)
    model = train.untrained_model()
    weights = train.MasterWeights(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    inputs = torch.arange(64).view(1, 64)
    torch.autograd.backward(train.loss_of(model, inputs, inputs))
    weights.step(1.0)
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_writes_a_directory_that_loads_and_resumes(tmp_path: Path) -> None:
    train.train(tmp_path / "first", minutes=0)
    tokenizer, model = evaluate.load(tmp_path / "first")
    assert evaluate.held_out_loss(tokenizer, model, batch_count=1) < 8
    train.train(tmp_path / "second", minutes=0, resume=tmp_path / "first")
    weights = "model.safetensors"
    assert (tmp_path / "first" / weights).read_bytes() == (tmp_path / "second" / weights).read_bytes()
