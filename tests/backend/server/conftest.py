"""Fixtures: a tiny random checkpoint with its own tokenizer and chat template, and real servers that serve it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.processes import clean_environment, running
from tests.launcher import PYTHON, Process

NUM_BLOCKS = 1024
VOCAB_SIZE = 512
MAX_MODEL_LEN = 8192
SPECIAL_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = """{{ bos_token }}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role ' ~ message.role) }}
{%- endif %}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
TEXT = [
    "The quick brown fox jumps over the lazy dog. Hello, world! How are you today?",
    "Größe, naïve café, 東京 and 🙂 need more than one byte for some characters.",
    "system user assistant tool function name arguments parameters type object 0123456789",
] * 20


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    """A byte-level BPE that adds `<s>` at the start, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@dataclass(frozen=True)
class RunningServer:
    process: Process
    url: str
    model: str
    clients: ExitStack

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def client(self, *, strict: bool = True) -> openai.OpenAI:
        """A client that is closed together with the server."""
        client = openai.OpenAI(
            base_url=self.base_url, api_key="none", max_retries=0, _strict_response_validation=strict
        )
        return self.clients.enter_context(client)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.base_url, api_key="none", max_retries=0, _strict_response_validation=True
        )

    def metric(self, name: str, **labels: str) -> float:
        """The value of the only series with this name and these labels."""
        text = httpx2.get(f"{self.url}/metrics").text
        expected = [f'{key}="{value}"' for key, value in labels.items()]
        found = [
            line
            for line in text.splitlines()
            if line.startswith(f"{name}{{") and all(item in line for item in expected)
        ]
        assert len(found) == 1, (name, found)
        return float(found[0].rsplit(" ", 1)[1])


StartServer = Callable[..., AbstractContextManager[RunningServer]]


@pytest.fixture(scope="session")
def start_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Runs `python -m backend` on the tiny checkpoint. At the end SIGTERM stops it, and its exit status must be 0."""

    @contextmanager
    def start(*options: str, model: str | None = None) -> Iterator[RunningServer]:
        command = [*PYTHON, "backend", "--model", model or str(checkpoint), "--port", "0", "--dtype", "float32"]
        command += ["--num-threads", "1", "--num-blocks", str(NUM_BLOCKS), "--wait-for-kernels", *options]
        folder = tmp_path_factory.mktemp("server")
        ready = r"^engine ready on (http://127\.0\.0\.1:\d+) model \S+\n$"
        with running(command, folder, ready, clean_environment()) as started, ExitStack() as clients:
            name = (folder / "stdout").read_text().split()[-1]
            yield RunningServer(started.process, started.url, name, clients)

    return start


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> Iterator[RunningServer]:
    with start_server() as running:
        yield running
