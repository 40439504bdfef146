"""A tokenizer with one token per byte, and a compiler of its grammars, as fixtures."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from backend.engine.grammar import GrammarCompiler
from tests.backend.checkpoints import VOCAB_SIZE

EOS = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per byte, as many as fit beside the special tokens, so that a random model can generate any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE({"<pad>": 0, "<s>": 1, "</s>": EOS} | {c: i for i, c in enumerate(alphabet[:253], 3)}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<s>", "</s>"])
    return made


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_str(), VOCAB_SIZE, [EOS])
