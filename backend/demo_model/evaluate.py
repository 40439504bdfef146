"""Measures a trained directory: greedy answers to phrasings that training never saw, exact match, by kind.

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
LOSS_SEED = 10_007  # no seed that training uses
EVALUATION_SEED = 20_011


@dataclass(frozen=True)
class Score:
    kind: str
    right: int
    asked: int


def load(directory: Path) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.train(False)
    return PreTrainedTokenizerFast.from_pretrained(directory), model


@torch.inference_mode()
def answers(
    tokenizer: PreTrainedTokenizerFast, model: Qwen3ForCausalLM, conversations: list[corpus.Conversation]
) -> list[str]:
    """What the model says next in each conversation, without the end token."""
    said: list[str] = []
    tokenizer.padding_side = "left"
    for start in range(0, len(conversations), BATCH_SIZE):
        prompts = [
            tokenizer.apply_chat_template(
                list(one.messages), tools=list(one.tools) or None, tokenize=False, add_generation_prompt=True
            )
            for one in conversations[start : start + BATCH_SIZE]
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)  # type: ignore[misc]
        said += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


def question(text: str, system: str | None = None) -> corpus.Conversation:
    before = ({"role": "system", "content": system},) if system else ()
    return corpus.Conversation("question", (*before, {"role": "user", "content": text}))


Case = tuple[corpus.Conversation, str]  # up to the last question, and the one right answer to it


def asked(one: corpus.Exchange, system: str | None = None) -> Case:
    return question(one.question, system), one.answer


def followed_up(rng: random.Random) -> Case:
    first = corpus.about_term(rng, True, "definition")
    second = corpus.follow_up(rng, first)
    messages = (*corpus.turn(first), *question(second.question).messages)
    return corpus.Conversation("follow-up", messages), second.answer


def tool_call(rng: random.Random) -> Case:
    while True:
        whole = corpus.tool_conversation(rng)
        at = next((i for i, message in enumerate(whole.messages) if message.get("tool_calls")), None)
        if at is not None:
            call = whole.messages[at]["tool_calls"][0]["function"]
            expected = corpus.tool_call_text(call["name"], call["arguments"])
            return corpus.Conversation("tools", whole.messages[:at], whole.tools), expected


def cases(rng: random.Random, count: int) -> dict[str, list[Case]]:
    makers: dict[str, Callable[[], Case]] = {
        "definition": lambda: asked(corpus.about_term(rng, True, "definition")),
        "definition, behind a system prompt of 400 to 1500 tokens": lambda: asked(
            corpus.about_term(rng, True, "definition"), phrasing.filler(rng, rng.randint(35, 85))
        ),
        "purpose": lambda: asked(corpus.about_term(rng, True, "purpose")),
        "short definition": lambda: asked(corpus.about_term(rng, True, "short")),
        "greeting": lambda: asked(asked_of_kind(rng, {"greeting"})),
        "identity": lambda: asked(asked_of_kind(rng, {"identity"})),
        "how-to, difference, long answer": lambda: asked(asked_of_kind(rng, {"howto", "difference", "long"})),
        "follow-up": lambda: followed_up(rng),
        "sum": lambda: asked(corpus.sum_of(rng, True)),
        "refusal": lambda: asked(corpus.unknown(rng, True)),
        "tool call": lambda: tool_call(rng),
    }
    return {kind: [make() for _ in range(count)] for kind, make in makers.items()}


def asked_of_kind(rng: random.Random, kinds: set[str]) -> corpus.Exchange:
    while True:
        one = corpus.asked(rng, held_out=True)
        if one.kind in kinds:
            return one


def scores(tokenizer: PreTrainedTokenizerFast, model: Qwen3ForCausalLM, count: int, show: int = 0) -> Iterator[Score]:
    for kind, pairs in cases(random.Random(EVALUATION_SEED), count).items():
        said = answers(tokenizer, model, [conversation for conversation, _ in pairs])
        wrong = [(c, right, got) for (c, right), got in zip(pairs, said, strict=True) if got != right]
        for conversation, right, got in wrong[:show]:
            print(f"  {conversation.messages[-1]['content'][-120:]!r}\n    right: {right!r}\n    said:  {got!r}")
        yield Score(kind, len(pairs) - len(wrong), len(pairs))


@torch.inference_mode()
def held_out_loss(tokenizer: PreTrainedTokenizerFast, model: Qwen3ForCausalLM, batch_count: int = 8) -> float:
    """Mean cross-entropy in nats per assistant token on freshly drawn conversations (not the held-out phrasings)."""
    source = train.packs(tokenizer, LOSS_SEED)
    losses = [train.loss_of(model, *next(source)) for _ in range(batch_count)]
    return float(torch.stack(losses).mean())


def write_card(directory: Path, model: Qwen3ForCausalLM, loss: float, measured: list[Score], training: str) -> None:
    card = CARD.read_text(encoding="utf-8").format(
        parameters=f"{model.num_parameters():,}",
        terms=len(corpus.topics().terms),
        asks=len(corpus.topics().asks),
        training=training,
        scores="\n".join(
            f"| {one.kind} | {one.right} of {one.asked} ({one.right / one.asked:.1%}) |" for one in measured
        ),
        loss=loss,
    )
    (directory / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--questions", type=int, default=200, help="questions per kind")
    parser.add_argument("--show", type=int, default=0, help="print so many wrong answers per kind")
    parser.add_argument("--write-card", metavar="TRAINING", help="write README.md, with this sentence on the training")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer, model = load(arguments.directory)
    loss = held_out_loss(tokenizer, model)
    print(f"loss on fresh conversations: {loss:.4f} nats per token of an answer")
    measured = []
    for score in scores(tokenizer, model, arguments.questions, arguments.show):
        print(f"{score.kind}: {score.right} of {score.asked} right ({score.right / score.asked:.1%})", flush=True)
        measured.append(score)
    if arguments.write_card:
        write_card(arguments.directory, model, loss, measured, arguments.write_card)


if __name__ == "__main__":
    main()
