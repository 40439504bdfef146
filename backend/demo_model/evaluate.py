"""Evaluates a trained model: exact match of greedy answers to held-out phrasings, by kind of question.

python -m backend.demo_model.evaluate DIR [--questions N] [--show N] [--write-card TRAINING]
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from . import corpus, phrasing, train

CARD = Path(__file__).parent / "model_card.md"
BATCH_SIZE = 64
MAX_NEW_TOKENS = 320
LOSS_SEED = 10_007  # differs from all seeds of training
EVALUATION_SEED = 20_011


@dataclass(frozen=True)
class Score:
    """Right answers of one kind of question."""

    kind: str
    right: int
    total: int


def load(directory: Path) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    """Loads tokenizer and model, in float32."""
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.train(False)
    return PreTrainedTokenizerFast.from_pretrained(directory), model


@torch.inference_mode()
def answers(
    tokenizer: PreTrainedTokenizerFast, model: Qwen3ForCausalLM, conversations: list[corpus.Conversation]
) -> list[str]:
    """The model's next message in each conversation, without the end token."""
    outputs: list[str] = []
    tokenizer.padding_side = "left"
    for start in range(0, len(conversations), BATCH_SIZE):
        prompts = [
            tokenizer.apply_chat_template(
                list(one.messages), tools=list(one.tools) or None, tokenize=False, add_generation_prompt=True
            )
            for one in conversations[start : start + BATCH_SIZE]
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        outputs += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return outputs


def question(text: str, system: str | None = None) -> corpus.Conversation:
    """A conversation of one question, with an optional system prompt."""
    before = ({"role": "system", "content": system},) if system else ()
    return corpus.Conversation("question", (*before, {"role": "user", "content": text}))


Case = tuple[corpus.Conversation, str]  # a conversation up to the last question, and the right answer


def single_question(one: corpus.QuestionAnswer, system: str | None = None) -> Case:
    """The test case of one question and its answer."""
    return question(one.question, system), one.answer


def follow_up_question(rng: random.Random) -> Case:
    """A question about a term, its answer, and a follow-up."""
    first = corpus.term_question(rng, True, "definition")
    second = corpus.follow_up(rng, first)
    messages = (*corpus.turn(first), *question(second.question).messages)
    return corpus.Conversation("follow-up", messages), second.answer


def tool_call(rng: random.Random) -> Case:
    """A conversation up to the point where the model must call a tool."""
    while True:
        whole = corpus.tool_conversation(rng)
        at = next((i for i, message in enumerate(whole.messages) if message.get("tool_calls")), None)
        if at is not None:
            call = whole.messages[at]["tool_calls"][0]["function"]
            expected = corpus.tool_call_text(call["name"], call["arguments"])
            return corpus.Conversation("tools", whole.messages[:at], whole.tools), expected


def cases(rng: random.Random, count: int) -> dict[str, list[Case]]:
    """`count` test cases of each kind."""
    makers: dict[str, Callable[[], Case]] = {
        "definition": lambda: single_question(corpus.term_question(rng, True, "definition")),
        "definition, after a system prompt of 400 to 1500 tokens": lambda: single_question(
            corpus.term_question(rng, True, "definition"), phrasing.filler(rng, rng.randint(35, 85))
        ),
        "purpose": lambda: single_question(corpus.term_question(rng, True, "purpose")),
        "short definition": lambda: single_question(corpus.term_question(rng, True, "short")),
        "greeting": lambda: single_question(fixed_question_of_kind(rng, {"greeting"})),
        "identity": lambda: single_question(fixed_question_of_kind(rng, {"identity"})),
        "how-to, difference, long answer": lambda: single_question(
            fixed_question_of_kind(rng, {"howto", "difference", "long"})
        ),
        "follow-up": lambda: follow_up_question(rng),
        "sum": lambda: single_question(corpus.sum_question(rng, True)),
        "refusal": lambda: single_question(corpus.off_topic_question(rng, True)),
        "tool call": lambda: tool_call(rng),
    }
    return {kind: [make() for _ in range(count)] for kind, make in makers.items()}


def fixed_question_of_kind(rng: random.Random, kinds: set[str]) -> corpus.QuestionAnswer:
    """A held-out question of one of the kinds."""
    while True:
        one = corpus.fixed_question(rng, held_out=True)
        if one.kind in kinds:
            return one


def scores(tokenizer: PreTrainedTokenizerFast, model: Qwen3ForCausalLM, count: int, show: int = 0) -> Iterator[Score]:
    """Scores each kind of question and prints up to `show` wrong answers of each."""
    for kind, pairs in cases(random.Random(EVALUATION_SEED), count).items():
        outputs = answers(tokenizer, model, [conversation for conversation, _ in pairs])
        wrong = [(c, right, got) for (c, right), got in zip(pairs, outputs, strict=True) if got != right]
        for conversation, right, got in wrong[:show]:
            print(f"  {conversation.messages[-1]['content'][-120:]!r}\n    right: {right!r}\n    model: {got!r}")
        yield Score(kind, len(pairs) - len(wrong), len(pairs))


@torch.inference_mode()
def held_out_loss(tokenizer: PreTrainedTokenizerFast, model: Qwen3ForCausalLM, batch_count: int = 8) -> float:
    """Mean cross-entropy in nats per assistant token on new conversations (not on held-out phrasings)."""
    source = train.packs(tokenizer, LOSS_SEED)
    losses = [train.loss_of(model, *next(source)) for _ in range(batch_count)]
    return float(torch.stack(losses).mean())


def write_card(directory: Path, model: Qwen3ForCausalLM, loss: float, measured: list[Score], training: str) -> None:
    """Writes the model card, README.md, from the template model_card.md."""
    card = CARD.read_text(encoding="utf-8").format(
        parameters=f"{model.num_parameters():,}",
        terms=len(corpus.topics().terms),
        asks=len(corpus.topics().fixed_answers),
        training=training,
        scores="\n".join(
            f"| {one.kind} | {one.right} of {one.total} ({one.right / one.total:.1%}) |" for one in measured
        ),
        loss=loss,
    )
    (directory / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--questions", type=int, default=200, help="questions per kind")
    parser.add_argument("--show", type=int, default=0, help="number of wrong answers to print per kind")
    parser.add_argument(
        "--write-card", metavar="TRAINING", help="write README.md with this description of the training"
    )
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer, model = load(arguments.directory)
    loss = held_out_loss(tokenizer, model)
    print(f"loss on new conversations: {loss:.4f} nats per assistant token")
    measured = []
    for score in scores(tokenizer, model, arguments.questions, arguments.show):
        print(f"{score.kind}: {score.right} of {score.total} right ({score.right / score.total:.1%})", flush=True)
        measured.append(score)
    if arguments.write_card:
        write_card(arguments.directory, model, loss, measured, arguments.write_card)


if __name__ == "__main__":
    main()
