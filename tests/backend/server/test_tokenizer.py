"""Encoding beside other threads, beginnings of texts, and the bytes of single tokens, which add up to the text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from backend.engine.errors import ConfigError
from backend.model_files import open_model_files
from backend.server.tokenizer import TextCodec, load_codec

TEXT = "Hello, naïve 東京 🙂 ☃\n  <|im_end|>"
LONG = "the quick brown fox, 東京 and all of it. " * 20_000  # takes a second

ENCODINGS: dict[str, Callable[[TextCodec], object]] = {
    "text": lambda codec: codec.encode(LONG, add_special_tokens=True),
    "chat": lambda codec: codec.encode_chat(LONG, "salt"),
    "pair": lambda codec: codec.encode_pair("a", LONG),
    "beginning": lambda codec: codec.first_tokens(LONG, 5),
    "decoding": lambda codec: codec.decode([100, 101, 102] * 1_000_000),
}


@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
def test_other_threads_go_on_while_a_long_text_is_encoded_or_decoded(
    checkpoint: Path, encode: Callable[[TextCodec], object]
) -> None:
    codec = load_codec(open_model_files(checkpoint))
    encoding, turns = threading.Thread(target=encode, args=[codec]), 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10  # one or two if the encoding thread holds Python's lock


@pytest.mark.parametrize("count", [0, 1, 2, 5, 8, 1000])
def test_the_beginning_of_a_text_ends_with_its_last_token(checkpoint: Path, count: int) -> None:
    codec = load_codec(open_model_files(checkpoint))
    offsets = codec.tokenizer.encode(TEXT, add_special_tokens=False).offsets[:count]
    assert codec.first_tokens(TEXT, count) == (TEXT[: offsets[-1][1]] if offsets else "")


def test_the_bytes_of_byte_level_tokens_add_up(checkpoint: Path) -> None:
    codec = load_codec(open_model_files(checkpoint))
    token_ids = codec.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(codec.token_bytes, token_ids)) == TEXT.encode()
    assert any("\ufffd" in codec.token_text(token_id) for token_id in token_ids)


def test_the_bytes_of_sentencepiece_tokens_add_up() -> None:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    codec = TextCodec(tokenizer, {})
    token_ids = codec.encode("a ab é", add_special_tokens=False)
    assert [codec.token_text(token_id) for token_id in token_ids[:3]] == [" a", " a", "b"]
    assert b"".join(map(codec.token_bytes, token_ids)) == " a ab é".encode()


def test_a_directory_without_a_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_codec(open_model_files(tmp_path))
