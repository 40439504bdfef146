"""Outputs that continue a text: the spaces between prompt and output are those that their tokens encode."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from tests.backend.server.conftest import RunningServer, StartServer

pytestmark = pytest.mark.e2e

GREEDY: Any = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def server(
    start_server: StartServer, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """The tiny model with a vocabulary like Llama 2's, whose decoder strips the space of the first word."""
    directory = shutil.copytree(checkpoint, tmp_path_factory.mktemp("models") / "sentencepiece")
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *(f"▁w{i}" for i in range(251))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    with start_server(model=str(directory)) as running:
        yield running


def decoded(server: RunningServer, token_ids: list[int]) -> str:
    return str(httpx2.post(f"{server.url}/detokenize", json={"tokens": token_ids}).json()["prompt"])


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_keeps_its_leading_space(server: RunningServer, stream: bool) -> None:
    prompt = [261, 262, 263]
    bias = {str(token_id): 100 for token_id in range(270, 280)}  # forces words
    extra = {"return_token_ids": True}
    client = server.client(strict=False)
    reply: Any = client.completions.create(
        model=server.model, prompt=prompt, logit_bias=bias, extra_body=extra, stream=stream, **GREEDY
    )
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    token_ids = [token_id for choice in choices for token_id in choice.model_extra["token_ids"]]
    text = "".join(choice.text for choice in choices)
    assert len(token_ids) == 8
    assert text.startswith(" w")
    assert decoded(server, prompt) + text == decoded(server, [*prompt, *token_ids])


def test_a_chat_has_no_leading_space_unless_it_continues_a_message(server: RunningServer) -> None:
    def content(messages: Any, **extra: Any) -> str:
        bias = {str(token_id): 100 for token_id in range(270, 280)}
        reply = server.client().chat.completions.create(
            model=server.model, messages=messages, logit_bias=bias, extra_body=extra, **GREEDY
        )
        return reply.choices[0].message.content or ""

    question = {"role": "user", "content": "Hello"}
    assert content([question]).startswith("w")
    begun = [question, {"role": "assistant", "content": "Well"}]
    assert content(begun, add_generation_prompt=False, continue_final_message=True).startswith(" w")
