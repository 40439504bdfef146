"""Bytes of single tokens, as in logprobs: concatenated they are the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from backend.engine.errors import ConfigError
from backend.model_files import open_model_files
from backend.server.tokenizer import TextCodec, load_codec

TEXT = "Hello, naïve 東京 🙂 ☃\n  <|im_end|>"


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
