"""Encodes text to token ids and decodes token ids, with the same ids as transformers for the same model directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from backend.model_files.base import ModelFiles
from backend.server.segment_encoder import SegmentEncoder, encode_text

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TextCodec:
    """A model's tokenizer and the special tokens that its configuration names. Thread-safe."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    _segments: SegmentEncoder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_segments", SegmentEncoder(self.tokenizer))

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary. The model's vocabulary can be larger."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def special_token_id(self, text: str) -> int | None:
        """Returns the id of the special token with this text, or None if there is none. Decoding omits such tokens."""
        token_id = self.tokenizer.token_to_id(text)
        added = self.tokenizer.get_added_tokens_decoder()
        return token_id if token_id in added and added[token_id].special else None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes a text, optionally with the special tokens that the tokenizer adds (such as bos).

        As in all methods for long texts, a batch of one is encoded, since this does not stop other threads.
        """
        return encode_text(self.tokenizer, text, add_special_tokens=add_special_tokens)

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Encodes two texts as the tokenizer joins a pair, with the special tokens that it adds."""
        return encode_text(self.tokenizer, (first, second), add_special_tokens=True)

    def first_tokens(self, text: str, count: int) -> str:
        """Returns the beginning of a text that its first `count` tokens cover."""
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=False)
        if len(encoding) <= count or not count:
            return text if count else ""
        last = encoding.token_to_chars(count - 1)
        assert last is not None, "all tokens are the text's own"
        return text[: last[1]]

    def encode_chat(self, text: str, salt: str) -> list[int]:
        """Encodes the text of a chat. Adds no special tokens, because the chat template has written them.

        The ids of segments that were encoded before with the same `salt` come from a cache.
        """
        return self._segments.encode(text, salt)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes token ids to text."""
        (text,) = self.tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)  # see encode
        return str(text)

    def token_piece(self, token_id: int) -> str:
        """Returns a token as the vocabulary writes it."""
        return self.tokenizer.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """Returns the text of a token. A partial character becomes U+FFFD; `token_bytes` returns its bytes."""
        text = str(self.tokenizer.decode([token_id], skip_special_tokens=False))
        # SentencePiece decoders strip the space of the first token, and here every token is the first.
        return f" {text}" if self.token_piece(token_id).startswith("▁") and not text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, even if they are only a part of a character."""
        piece = self.tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])  # byte fallback of SentencePiece vocabularies
        text = self.token_text(token_id)
        if "\ufffd" not in text:
            return text.encode()
        try:
            return bytes(_BYTE_OF[character] for character in piece)
        except KeyError:
            return text.encode()


def load_codec(files: ModelFiles) -> TextCodec:
    """Reads the tokenizer of a model. Raises `ConfigError` or `WeightsError` if it is missing or cannot be read."""
    stored = files.tokenizer_config()
    special = {name: _text(stored[name]) for name in NAMED_SPECIAL_TOKENS if stored.get(name) is not None}
    return TextCodec(files.tokenizer(), special)


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _byte_of_character() -> dict[str, int]:
    """Returns the inverse of GPT-2's byte-to-character table. Byte-level BPE vocabularies use that table."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()
