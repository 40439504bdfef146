"""Tokenizers from GGUF metadata, compared with transformers and a simple implementation of SentencePiece."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer

from backend.__main__ import DEMO_DIR
from backend.engine.errors import UnsupportedModel
from backend.model_files import open_model_files
from backend.model_files.gguf_header import GgufHeader, MalformedGguf
from backend.model_files.gguf_tokenizer import SPLITS, end_token_ids, make_tokenizer, special_tokens
from backend.parsers.harmony import HarmonyFormat, HarmonyReasoningFormat
from backend.server.model import load_model
from tests.backend.checkpoints import build_model, save
from tests.backend.gguf_writer import as_type, tokenizer_fields, write_gguf

TEXTS = [
    "Hello, world! I'll be there; they'RE not.",
    "x = 1234567 + 89.5\n\n\n  return f(x)\t# é 東京 🙂",
    "   several   spaces  and\r\nline ends \n",
    "e\u0301 is two characters, CamelCaseHTTPServer one word's worth",
    "",
]
TRAINING = [*TEXTS, "the quick brown fox jumps over the lazy dog " * 5, "0 1 2 12 123 1234 12345"] * 3


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    return make_tokenizer(GgufHeader(metadata, {}))


def byte_level_metadata(pre: str, **fields: Any) -> dict[str, Any]:
    """A vocabulary trained on the texts, with a control token at its end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    vocab = tokenizer.get_vocab()
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<|im_end|>"]
    # Every possible merge in the order of the tokens, so many that the order matters.
    known = set(tokens)
    merges = [
        f"{token[:cut]} {token[cut:]}"
        for token in tokens[:-1]
        for cut in range(1, len(token))
        if {token[:cut], token[cut:]} <= known
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        **fields,
    }


@pytest.mark.parametrize(("pre", "theirs"), [("qwen2", Qwen2Tokenizer), ("gpt-2", GPT2Tokenizer)])
def test_byte_level_ids_equal_transformers(pre: str, theirs: Callable[..., PreTrainedTokenizerBase]) -> None:
    metadata = byte_level_metadata(pre)
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    vocab = {token: i for i, token in enumerate(tokens)}
    expected = theirs(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges], unk_token="<|im_end|>")
    ours = tokenizer_of(metadata)
    for text in [*TEXTS, "a<|im_end|>b"]:
        assert ours.encode(text).ids == expected.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == expected.decode(
            expected.encode(text, add_special_tokens=False)
        )


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "45", " XMLHttp", "\n\n"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", " XMLHttp", "\n\n"]),
        ("gpt-2", ["I", "'ll", " pay", " 12345", " XMLHttp", "\n\n"]),
        ("smollm", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", " XMLHttp", "\n\n"]),
        ("gpt-4o", ["I'll", " pay", " ", "123", "45", " XMLHttp", "\n\n"]),
        ("tekken", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", " XMLHttp", "\n\n"]),
    ],
)
def test_text_is_split_as_the_vocabulary_names(pre: str, pieces: list[str]) -> None:
    cut = tokenizer_of(byte_level_metadata(pre)).pre_tokenizer.pre_tokenize_str("I'll pay 12345 XMLHttp\n\n")
    assert ["".join(piece).replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in cut] == pieces


def test_gpt_oss_splits_text_as_its_tokenizer_json() -> None:
    assert SPLITS["gpt-4o"].pattern == (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def test_gpt_oss_is_served_in_harmony_format(tmp_path: Path) -> None:
    marks = ["<|startoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"]
    ends = ["<|endoftext|>", "<|return|>", "<|call|>"]
    metadata = byte_level_metadata("gpt-4o")
    begin = metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    tokens = [*metadata["tokenizer.ggml.tokens"][:begin], *marks, *ends]
    ids = {token: i for i, token in enumerate(tokens)}
    metadata |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * begin + [3] * (len(tokens) - begin),
        "tokenizer.ggml.bos_token_id": ids["<|startoftext|>"],
        "tokenizer.ggml.eos_token_id": ids["<|return|>"],
        "tokenizer.ggml.padding_token_id": ids["<|endoftext|>"],
        "tokenizer.chat_template": "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}",
    }
    checkpoint = save(build_model("gpt-oss", vocab_size=len(tokens)), tmp_path)
    path = write_gguf(checkpoint, tmp_path / "model.gguf", as_type(GGMLQuantizationType.F16), metadata)
    model = load_model(path, "m", "m", max_model_len=64)
    assert isinstance(model.tool_format, HarmonyFormat)
    assert isinstance(model.reasoning_format, HarmonyReasoningFormat)
    assert model.eos_token_ids == {ids[token] for token in ends}
    assert all(model.codec.special_token_id(token) == ids[token] for token in (*marks, *ends))
    assert model.codec.encode("<|start|>user", add_special_tokens=True)[0] == ids["<|start|>"]


def test_ollamas_gpt_oss_splits_text_as_the_published_one_without_naming_it() -> None:
    metadata = byte_level_metadata("default", **{"general.architecture": "gptoss"})
    cut = tokenizer_of(metadata).pre_tokenizer.pre_tokenize_str("I'll pay 12345 XMLHttp")
    assert ["".join(piece) for piece, _ in cut] == ["I'll", "Ġpay", "Ġ", "123", "45", "ĠXMLHttp"]


def test_the_demo_models_tokenizer_is_the_same_from_a_gguf_file() -> None:
    directory = open_model_files(DEMO_DIR)
    metadata = tokenizer_fields(DEMO_DIR, pre="smollm")
    expected, ours = directory.tokenizer(), tokenizer_of(metadata)
    for text in [*TEXTS, "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n"]:
        assert ours.encode(text).ids == expected.encode(text).ids
    assert special_tokens(GgufHeader(metadata, {}))["eos_token"] == "<|im_end|>"
    assert end_token_ids(GgufHeader(metadata, {})) == [0, 2]


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = ["▁", "a", "b", "c", "▁a", "▁b", "ab", "bc", "abc", "▁ab", "▁abc", "ca", "cab", "▁c", "▁ca", "▁cab", "▁▁", "\n"]
USER_TOKEN = "<tool>"


def sentence_piece_metadata(**fields: Any) -> dict[str, Any]:
    scores = [0.0] * len(PIECES) + [-float(5 * i % 17) for i in range(len(WORDS))] + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*PIECES, *WORDS, USER_TOKEN],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(WORDS), 4],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **fields,
    }


def by_hand(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's BPE: repeatedly merges the adjacent pair whose result has the best score, leftmost first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    rank = {token: scores[i] for i, token in enumerate(tokens) if metadata["tokenizer.ggml.token_type"][i] == 1}
    pieces = list(text.replace(" ", "▁"))
    while True:
        joinable = [i for i in range(len(pieces) - 1) if pieces[i] + pieces[i + 1] in rank]
        if not joinable:
            break
        best = max(joinable, key=lambda i: (rank[pieces[i] + pieces[i + 1]], -i))
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    return [
        token_id
        for piece in pieces
        for token_id in (
            [tokens.index(piece)] if piece in rank else [tokens.index(f"<0x{byte:02X}>") for byte in piece.encode()]
        )
    ]


@pytest.mark.parametrize("text", ["a", "abc cab", "cabc  abca", "é ab\nc", "bcabcabcab"])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_merges_the_best_pair_first(text: str, has_prefix: bool) -> None:
    metadata = sentence_piece_metadata(**{"tokenizer.ggml.add_space_prefix": has_prefix})
    tokenizer = tokenizer_of(metadata)
    ids = tokenizer.encode(text).ids
    assert ids == [1, *by_hand(f" {text}" if has_prefix else text, metadata)]
    assert tokenizer.decode(ids) == text


def test_user_defined_tokens_match_in_text_and_decode_as_text() -> None:
    tokenizer = tokenizer_of(sentence_piece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    ids = tokenizer.encode(f"a{USER_TOKEN}b").ids
    assert ids[2] == tokenizer.token_to_id(USER_TOKEN)
    assert tokenizer.decode(ids) == f"a{USER_TOKEN}b"
    assert tokenizer.decode([1, 2]) == ""


@pytest.mark.parametrize(("fields", "begins"), [({}, True), ({"tokenizer.ggml.add_bos_token": False}, False)])
def test_the_file_decides_about_the_bos_token(fields: dict[str, Any], begins: bool) -> None:
    assert (tokenizer_of(sentence_piece_metadata(**fields)).encode("a").ids[0] == 1) is begins


def test_the_file_decides_about_the_eos_token() -> None:
    ids = tokenizer_of(sentence_piece_metadata(**{"tokenizer.ggml.add_eos_token": True})).encode("a").ids
    assert (ids[0], ids[-1]) == (1, 2)


def test_a_file_can_name_several_eos_tokens() -> None:
    tokens = {"tokenizer.ggml.tokens": ["a", "b", "c", "d"], "tokenizer.ggml.eos_token_id": 1}
    assert end_token_ids(GgufHeader(tokens | {"tokenizer.ggml.eos_token_ids": [1, 3]}, {})) == [1, 3]


def test_tokens_that_end_a_turn_end_the_output() -> None:
    tokens = ["a", "<|end|>", "<|return|>", "<|call|>", "<eos>"]
    metadata: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 4}
    for types, ends in (([1, 3, 1, 1, 3], [1, 4]), ([1, 3, 3, 3, 3], [2, 3, 4])):
        assert end_token_ids(GgufHeader(metadata | {"tokenizer.ggml.token_type": types}, {})) == ends


@pytest.mark.parametrize(
    ("metadata", "error", "named"),
    [
        ({}, UnsupportedModel, "model '' is not one of gpt2 and llama"),
        ({"tokenizer.ggml.model": "t5"}, UnsupportedModel, "'t5'"),
        ({"tokenizer.ggml.model": "gpt2"}, MalformedGguf, "tokens is missing"),
        (byte_level_metadata("bloom"), UnsupportedModel, "pre 'bloom' is not one of dbrx"),
        (byte_level_metadata("qwen2", **{"tokenizer.ggml.token_type": [1]}), MalformedGguf, "has 1 entries for"),
        (byte_level_metadata("qwen2", **{"tokenizer.ggml.merges": ["a zz"]}), MalformedGguf, "joins 'a' and 'zz'"),
        (byte_level_metadata("qwen2", **{"tokenizer.ggml.merges": ["a"]}), MalformedGguf, "'a' is not two pieces"),
        (sentence_piece_metadata(**{"tokenizer.ggml.scores": []}), MalformedGguf, "scores has 0 entries"),
    ],
)
def test_invalid_vocabularies_are_named(metadata: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        tokenizer_of(metadata)


def test_every_split_has_a_valid_pattern() -> None:
    for pre in SPLITS:
        assert tokenizer_of(byte_level_metadata(pre)).encode("a 1").ids
