"""Trains the demo model from scratch: a tokenizer, then a small Qwen3, on conversations from `corpus`.

    python -m backend.demo_model.train --out A --minutes 13 --lesson-share 0.95
    python -m backend.demo_model.train --out B --minutes 34 --resume A
    python -m backend.demo_model.train --out DIR --minutes 18 --resume B --lesson-share 0.25 --peak 0.5

The loss counts only the assistant's tokens. There are two kinds of batches. A lesson is one question and the start of
its answer in a short row: cheap, and sufficient to learn which answer belongs to which question. A pack is complete
conversations one after another, with attention across their borders, which teaches the model to answer at position
1500 as at position 20. A first run of almost only lessons teaches the domain quickly.
"""

import argparse
import itertools
import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from . import corpus

TEMPLATE = Path(__file__).parent / "chat_template.jinja"
# Unlimited (inputs, labels), int64 [B, T] each with about TOKENS_PER_STEP tokens. Labels are shifted by one.
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 2048
CONTEXT = 2048
TOKENS_PER_STEP = 4096
LESSON_LENGTH = 48
SHORT_PACK = 256
LONG_PACK_SHARE = 0.15  # of packs that are as long as the context; the others are SHORT_PACK tokens
ADAMW_RATE, MUON_RATE = 3e-3, 5e-3
WARMUP_STEPS = 100
MAX_GRADIENT_NORM = 1.0
IGNORED = -100  # label that torch's cross entropy ignores

CONFIG = Qwen3Config(
    vocab_size=VOCAB_SIZE,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=0,
    dtype="bfloat16",
)


def train_tokenizer(seed: int, conversations: int = 20_000) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a separate token, so that the digits of sums align."""
    sample = itertools.islice(corpus.conversations(seed), conversations)
    texts = (str(message["content"]) for one in sample for message in one.messages)
    tools = (json.dumps(tool) for one in itertools.islice(corpus.conversations(seed), 2_000) for tool in one.tools)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        itertools.chain(texts, tools),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[AddedToken(t, special=True, normalized=False) for t in (END_OF_TEXT, IM_START, IM_END)],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
    )


def spoken_by_assistant(ids: list[int], opening: list[int], end: int) -> list[int]:
    """`ids` with IGNORED everywhere except in the assistant's messages and their end tokens."""
    labels = [IGNORED] * len(ids)
    at = 0
    while at < len(ids):
        if ids[at : at + len(opening)] != opening:
            at += 1
            continue
        at += len(opening)
        stop = ids.index(end, at) + 1
        labels[at:stop] = ids[at:stop]
        at = stop
    return labels


def rendered(tokenizer: PreTrainedTokenizerFast, one: corpus.Conversation) -> str:
    """A conversation as the chat template renders it."""
    text = tokenizer.apply_chat_template(list(one.messages), tools=list(one.tools) or None, tokenize=False)
    assert isinstance(text, str)
    return text


def labelled(
    tokenizer: PreTrainedTokenizerFast, source: Iterator[corpus.Conversation]
) -> Iterator[tuple[list[int], list[int]]]:
    """(ids, labels) of each conversation, labels already shifted by one."""
    opening = tokenizer.encode(f"{IM_START}assistant\n")
    [end] = tokenizer.encode(IM_END)
    for one in source:
        ids = tokenizer.encode(rendered(tokenizer, one))
        yield ids, [*spoken_by_assistant(ids, opening, end)[1:], IGNORED]


def lessons(tokenizer: PreTrainedTokenizerFast, seed: int) -> Batches:
    """Batches of lessons, each cut or padded to LESSON_LENGTH."""
    source = labelled(tokenizer, corpus.lessons(seed))
    [padding] = tokenizer.encode(END_OF_TEXT)
    rows = TOKENS_PER_STEP // LESSON_LENGTH
    while True:
        cut = [(ids[:LESSON_LENGTH], labels[:LESSON_LENGTH]) for ids, labels in itertools.islice(source, rows)]
        yield (
            torch.tensor([ids + [padding] * (LESSON_LENGTH - len(ids)) for ids, _ in cut]),
            torch.tensor([labels + [IGNORED] * (LESSON_LENGTH - len(labels)) for _, labels in cut]),
        )


def packs(tokenizer: PreTrainedTokenizerFast, seed: int) -> Batches:
    """Batches of concatenated conversations. No token is lost between batches."""
    source = labelled(tokenizer, corpus.conversations(seed))
    lengths = random.Random(seed)
    ids: list[int] = []
    labels: list[int] = []
    while True:
        length = CONTEXT if lengths.random() < LONG_PACK_SHARE else SHORT_PACK
        while len(ids) < TOKENS_PER_STEP:
            more_ids, more_labels = next(source)
            ids += more_ids
            labels += more_labels
        cut = torch.tensor(ids[:TOKENS_PER_STEP]), torch.tensor(labels[:TOKENS_PER_STEP])
        yield cut[0].view(-1, length), cut[1].view(-1, length)
        del ids[:TOKENS_PER_STEP], labels[:TOKENS_PER_STEP]


def loss_of(model: Qwen3ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the labels that are not IGNORED. The head computes only their logits."""
    hidden = model.model.forward(input_ids=inputs, use_cache=False).last_hidden_state  # [B, T, D]
    counted = labels != IGNORED
    return F.cross_entropy(model.lm_head(hidden[counted]).float(), labels[counted])


def untrained_model() -> Qwen3ForCausalLM:
    """An initialised model in bfloat16, with torch's RMSNorm: twice as fast on a CPU as transformers'."""
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(CONFIG).to(torch.bfloat16)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Qwen3RMSNorm):
                setattr(
                    module, name, torch.nn.RMSNorm(len(child.weight), eps=CONFIG.rms_norm_eps, dtype=torch.bfloat16)
                )
    return model


class MasterWeights:
    """Float32 copies of the bfloat16 parameters, which are too coarse for small updates.

    Muon optimises the matrices inside the layers, AdamW the embedding and the norms.
    """

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.parameters = list(model.parameters())
        self.masters = [p.detach().float() for p in self.parameters]
        embedding = self.masters[0]
        inner = [m for m in self.masters if m.ndim == 2 and m is not embedding]
        outer = [embedding, *(m for m in self.masters if m.ndim == 1)]
        muon = torch.optim.Muon(inner, lr=MUON_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(outer, lr=ADAMW_RATE, betas=(0.9, 0.97), weight_decay=0.0, fused=True)
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [(muon, MUON_RATE), (adamw, ADAMW_RATE)]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Applies and clears the parameters' gradients. `rate` in [0, 1] scales the learning rates."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_GRADIENT_NORM)
        for optimizer, peak in self.optimizers:
            optimizer.param_groups[0]["lr"] = peak * rate
            optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


def rate_at(step: int, progress: float) -> float:
    """Learning rate factor: linear warm-up, then a cosine to zero over `progress` in [0, 1]."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * progress))


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes model and tokenizer in transformers' layout."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    shutil.copyfile(TEMPLATE, out / "chat_template.jinja")
    settings = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = TEMPLATE.read_text(encoding="utf-8")  # for loaders that look only here
    (out / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    generation = {"do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0, "max_new_tokens": 512}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def train(
    out: Path,
    minutes: float,
    seed: int = 7,
    lesson_share: float = 0.35,
    peak: float = 1.0,
    resume: Path | None = None,
    save_every_minutes: float = 5,
) -> None:
    """Trains for `minutes` and saves to `out` at the end and every `save_every_minutes`.

    `lesson_share` is the share of steps that are lessons. `peak` scales the learning rates. `resume` is the directory
    of an earlier run.
    """
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(resume) if resume else train_tokenizer(seed)
    model = untrained_model()
    if resume:
        model.load_state_dict(load_file(resume / "model.safetensors"), strict=False)  # the tied lm_head is not stored
    weights = MasterWeights(model)
    print(f"{model.num_parameters():,} parameters", flush=True)
    short, whole, coin = lessons(tokenizer, seed), packs(tokenizer, seed), random.Random(seed)
    started = saved = time.monotonic()
    for step in itertools.count():
        minutes_spent = (time.monotonic() - started) / 60
        if minutes_spent >= minutes:
            break
        progress = minutes_spent / minutes
        loss = loss_of(model, *next(short if coin.random() < lesson_share else whole))
        torch.autograd.backward(loss)
        weights.step(peak * rate_at(step, progress))
        if step % 50 == 0:
            print(f"{minutes_spent:5.1f} min  step {step}  loss {loss.item():.4f}", flush=True)
        if time.monotonic() - saved > save_every_minutes * 60:
            save(model, tokenizer, out)
            saved = time.monotonic()
    save(model, tokenizer, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="output directory")
    parser.add_argument("--minutes", type=float, default=40, help="training time in minutes")
    parser.add_argument("--lesson-share", type=float, default=0.35, help="share of steps that are lessons")
    parser.add_argument(
        "--peak", type=float, default=1.0, help="scales the learning rates, for a run that refines weights"
    )
    parser.add_argument("--resume", type=Path, help="directory of an earlier run to continue from")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every-minutes", type=float, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(
        options.out,
        options.minutes,
        options.seed,
        options.lesson_share,
        options.peak,
        options.resume,
        options.save_every_minutes,
    )


if __name__ == "__main__":
    main()
