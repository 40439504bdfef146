"""Trains the demo model from nothing: tokenizer, then a small Qwen3, on conversations from `corpus`.

python -m backend.demo_model.train --out DIR --minutes N

The loss counts only what the assistant says. Conversations are packed end to end and attend across their borders, which
is what teaches the model to answer the same at position 20 and at position 1500.
"""

import argparse
import itertools
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from . import corpus

TEMPLATE = Path(__file__).parent / "chat_template.jinja"
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 2048
CONTEXT = 2048
SHORT_SEQUENCE = 256
LONG_SHARE = 0.1  # of steps, on sequences as long as the context
TOKENS_PER_STEP = 4_096
PEAK_LEARNING_RATE = 2.5e-3
WARMUP_STEPS = 200
MAX_GRADIENT_NORM = 1.0
IGNORED = -100

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
    """Byte-level BPE in which every digit is a token of its own, so that sums line up."""
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
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
    )


def spoken_by_assistant(ids: list[int], opening: list[int], end: int) -> list[int]:
    """`ids` with everything replaced by IGNORED but the assistant's words and the token that ends them."""
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
    text = tokenizer.apply_chat_template(list(one.messages), tools=list(one.tools) or None, tokenize=False)
    assert isinstance(text, str)
    return text


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (inputs, labels), int64 [B, T] each, B * T = TOKENS_PER_STEP, labels already shifted by one."""
    opening = tokenizer.encode(f"{IM_START}assistant\n")
    [end] = tokenizer.encode(IM_END)
    source = corpus.conversations(seed)
    shape = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    labels: list[int] = []
    while True:
        length = CONTEXT if torch.rand((), generator=shape) < LONG_SHARE else SHORT_SEQUENCE
        rows = TOKENS_PER_STEP // length
        while len(ids) <= TOKENS_PER_STEP:
            texts = [rendered(tokenizer, one) for one in itertools.islice(source, 64)]
            for encoded in tokenizer(texts)["input_ids"]:
                ids += encoded
                labels += spoken_by_assistant(encoded, opening, end)
        yield (
            torch.tensor(ids[:TOKENS_PER_STEP]).view(rows, length),
            torch.tensor(labels[1 : TOKENS_PER_STEP + 1]).view(rows, length),
        )
        del ids[:TOKENS_PER_STEP], labels[:TOKENS_PER_STEP]


def loss_of(model: Qwen3ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    hidden = model.model.forward(input_ids=inputs, use_cache=False).last_hidden_state  # [B, T, D]
    counted = labels != IGNORED
    return F.cross_entropy(model.lm_head(hidden[counted]).float(), labels[counted])


def untrained_model() -> Qwen3ForCausalLM:
    """In bfloat16, with torch's own RMSNorm in place of one that goes through float32: twice as fast on a CPU."""
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(CONFIG).to(torch.bfloat16)  # type: ignore[arg-type]
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Qwen3RMSNorm):
                setattr(
                    module, name, torch.nn.RMSNorm(len(child.weight), eps=CONFIG.rms_norm_eps, dtype=torch.bfloat16)
                )
    return model


class MasterWeights:
    """AdamW over a float32 copy of bfloat16 parameters: their own steps are too coarse to add small updates to."""

    def __init__(self, parameters: Iterator[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.masters = [p.detach().float() for p in self.parameters]
        matrices = [m for m in self.masters if m.ndim >= 2]
        vectors = [m for m in self.masters if m.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.97), fused=True)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_GRADIENT_NORM)
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


def learning_rate(step: int, progress: float) -> float:
    """Linear warm-up, then a cosine to zero over `progress` in [0, 1]."""
    return PEAK_LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the Hugging Face directory."""
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


def train(out: Path, minutes: float, seed: int, save_every_minutes: float) -> None:
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(seed)
    model = untrained_model()
    weights = MasterWeights(model.parameters())
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    started = saved = time.monotonic()
    for step, (inputs, labels) in enumerate(batches(tokenizer, seed)):
        minutes_spent = (time.monotonic() - started) / 60
        loss = loss_of(model, inputs, labels)
        torch.autograd.backward(loss)
        weights.step(learning_rate(step, minutes_spent / minutes))
        if step % 100 == 0:
            tokens = (step + 1) * TOKENS_PER_STEP / 1e6
            print(f"{minutes_spent:5.1f} min  step {step}  {tokens:.2f} M tokens  loss {loss.item():.4f}", flush=True)
        if minutes_spent >= minutes:
            break
        if time.monotonic() - saved > save_every_minutes * 60:
            save(model, tokenizer, out)
            saved = time.monotonic()
    save(model, tokenizer, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--minutes", type=float, default=40, help="how long to train")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every-minutes", type=float, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.out, arguments.minutes, arguments.seed, arguments.save_every_minutes)


if __name__ == "__main__":
    main()
