"""Encoding by segments gives the same ids as encoding the whole text, with every kind of tokenizer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from backend.server.segment_encoder import SegmentEncoder, boundary_tokens

DEMO = Path("backend/demo_model/weights/tokenizer.json")
OPEN, CLOSE, LEFT, LOUD, PART = "<|open|>", "<|close|>", "<|left|>", "<|loud|>", "x<|op"
WORDS = ["hello", " ", "  ", "\n", "Hello, naïve 東京 🙂", "a", " a b", "<|", "|>", "x", "", "é", "open", "don't "]


def trained(tokenizer: Tokenizer) -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(WORDS * 4, trainer)
    return tokenizer


def byte_level(*, prefix_space: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    return trained(tokenizer)


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return trained(tokenizer)


def prepending() -> Tokenizer:
    """A tokenizer like Llama 2's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return trained(tokenizer)


def lowering() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return trained(tokenizer)


KINDS = {
    "bytes": byte_level(prefix_space=False),
    "bytes with a space before": byte_level(prefix_space=True),
    "metaspace first": metaspace("first"),
    "metaspace always": metaspace("always"),
    "prepend": prepending(),
    "lower": lowering(),
}
ADDED = {
    "plain": [AddedToken(OPEN, special=True), AddedToken(CLOSE, special=True, rstrip=True)],
    "all kinds": [
        AddedToken(OPEN, special=True),
        AddedToken(CLOSE, special=True),
        AddedToken(LEFT, special=True, lstrip=True),
        AddedToken(LOUD, special=True, normalized=True),
        AddedToken("hello", special=True, single_word=True),
        AddedToken("open", special=False),
    ],
    "one that begins within another": [AddedToken(OPEN, special=True), AddedToken(PART, special=True)],
}


def with_added(kind: str, added: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(KINDS[kind].to_str())
    tokenizer.add_special_tokens([token for token in ADDED[added] if token.special])
    tokenizer.add_tokens([token for token in ADDED[added] if not token.special])
    return tokenizer


TOKENIZERS = {(kind, added): with_added(kind, added) for kind in KINDS for added in ADDED}
TEXTS = st.lists(st.sampled_from([*WORDS, OPEN, CLOSE, LEFT, LOUD, PART, OPEN, CLOSE]), max_size=16).map("".join)


@settings(max_examples=150, derandomize=True)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
@pytest.mark.parametrize("which", TOKENIZERS)
def test_segments_have_the_ids_of_the_whole_text(which: tuple[str, str], texts: list[str]) -> None:
    tokenizer = TOKENIZERS[which]
    encoder = SegmentEncoder(tokenizer, max_characters=200)
    for text in (*texts, *texts):
        assert encoder.encode(text, "") == tokenizer.encode(text, add_special_tokens=False).ids
    assert encoder.num_characters <= 200


def test_boundary_tokens() -> None:
    found = {name: boundary_tokens(ADDED[name]) for name in ADDED}
    assert found == {
        "plain": [CLOSE, OPEN],
        "all kinds": [CLOSE, OPEN],
        "one that begins within another": [PART],
    }


class CountingTokenizer:
    """A tokenizer that counts the characters that it encodes."""

    def __init__(self) -> None:
        self._inner = Tokenizer.from_file(str(DEMO))
        self.num_characters = 0

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self._inner.get_added_tokens_decoder()

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> object:
        self.num_characters += sum(map(len, texts))
        return self._inner.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def chat(turns: int) -> str:
    return "".join(f"<|im_start|>user\nQuestion number {turn}?<|im_end|>\n" for turn in range(turns))


def test_the_next_turn_encodes_only_new_segments_of_its_salt() -> None:
    tokenizer = CountingTokenizer()
    encoder = SegmentEncoder(tokenizer)  # type: ignore[arg-type]
    encoder.encode(chat(50), "a")
    assert tokenizer.num_characters == len(chat(50))
    tokenizer.num_characters = 0
    again = encoder.encode(chat(51), "a")
    assert again == Tokenizer.from_file(str(DEMO)).encode(chat(51), add_special_tokens=False).ids
    short = 51 * len("<|im_end|>\n")  # shorter than MIN_CHARACTERS, so not cached
    assert len(chat(51)) - len(chat(50)) <= tokenizer.num_characters <= len(chat(51)) - len(chat(50)) + short
    tokenizer.num_characters = 0
    encoder.encode(chat(50), "b")
    assert tokenizer.num_characters == len(chat(50))


def test_threads_share_one_encoder() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO))
    encoder = SegmentEncoder(tokenizer, max_characters=2000)
    texts = [chat(turns) for turns in range(60)] * 4
    with ThreadPoolExecutor(4) as pool:
        encoded = list(pool.map(lambda text: encoder.encode(text, ""), texts))
    assert encoded == [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert encoder.num_characters <= 2000
