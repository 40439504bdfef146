from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from backend.engine.detokenizer import Detokenizer

SPECIAL = 0


def byte_level() -> Tokenizer:
    """A few merges over all bytes, as in GPT-2: a character may take several tokens, and a token several characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the end. the END ###stop stopper"] * 3, trainer)
    return tokenizer


def sentencepiece(*ending: decoders.Decoder) -> Tokenizer:
    """Bytes 0 to 255 are tokens 1 to 256."""
    byte_tokens = {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocabulary = {"<unk>": 0, **byte_tokens, "▁hi": 257, "a": 258, "▁": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ending]
    )
    return tokenizer


TOKENIZER = byte_level()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


@given(st.text(max_size=30))
@example("naïve 🎉 日本語 \N{ZERO WIDTH JOINER}")
def test_streamed_text_is_the_text(text: str) -> None:
    pieces = stream(Detokenizer(TOKENIZER), encode(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_an_incomplete_character_waits_for_its_last_byte() -> None:
    first, second, third, last = encode("🎉")
    assert stream(Detokenizer(TOKENIZER), [first, second, third, last]) == ["", "", "", "🎉", ""]
    assert stream(Detokenizer(TOKENIZER), [*encode("a"), first, second]) == ["a", "", "", "\ufffd"]


def test_special_tokens_are_skipped_by_default() -> None:
    token_ids = [*encode("a"), SPECIAL, *encode("b")]
    assert "".join(stream(Detokenizer(TOKENIZER), token_ids)) == "ab"
    assert "".join(stream(Detokenizer(TOKENIZER, skip_special_tokens=False), token_ids)) == "a<eos>b"


@given(st.text("ab#é🎉", max_size=24), st.lists(st.text("ab#é", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_where_the_first_complete_stop_string_begins(text: str, stop: list[str]) -> None:
    ends = sorted((text.find(s) + len(s), text.find(s)) for s in stop if s in text)
    detokenizer = Detokenizer(TOKENIZER, stop)
    pieces = stream(detokenizer, encode(text))
    assert "".join(pieces) == (text[: ends[0][1]] if ends else text)
    assert detokenizer.stopped == bool(ends)
    # Released text is never taken back, so it is always a prefix of the final text.
    assert all("".join(pieces).startswith("".join(pieces[:i])) for i in range(len(pieces)))


def test_only_text_that_may_begin_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["###"])
    assert [detokenizer.push(encode(c)) for c in "a#b##"] == ["a", "", "#b", "", ""]
    assert detokenizer.flush() == "##"
    assert not detokenizer.stopped


def test_the_stop_string_is_reported_and_no_text_follows_it() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["END", "stop"])
    assert detokenizer.push(encode("the END and stop")) == "the "
    assert detokenizer.stop_string == "END"
    assert detokenizer.push(encode("more")) == ""
    assert detokenizer.flush() == ""


@given(
    st.text("ab#é🎉", max_size=24),
    st.lists(st.text("ab#é", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 12),
)
@example("abab", ["ab", "abc"], 2)
def test_stop_strings_count_only_after_min_tokens(text: str, stop: list[str], min_tokens: int) -> None:
    token_ids = encode(text)
    free = len(TOKENIZER.decode(token_ids[:min_tokens]).removesuffix("\ufffd"))  # complete characters by then
    found = [(at + len(s), at) for s in stop for at in range(len(text)) if text.startswith(s, at)]
    end, start = min((each for each in found if each[0] > free), default=(0, len(text)))
    detokenizer = Detokenizer(TOKENIZER, stop, min_tokens=min_tokens)
    pieces = stream(detokenizer, token_ids)
    assert "".join(pieces) == text[:start]
    assert detokenizer.stopped == bool(end)


@pytest.mark.parametrize("token_ids", [[], [SPECIAL]])
def test_no_text_is_empty_text(token_ids: list[int]) -> None:
    assert stream(Detokenizer(TOKENIZER), token_ids)[-1] == ""


def test_malformed_bytes_do_not_end_the_stream() -> None:
    """A model may sample any bytes. With byte fallback, some make the library's stream fail; ours continues."""
    tokenizer = sentencepiece()
    malformed = [47, 166, 91, 210, 259, 255, 84, 129]
    assert "".join(stream(Detokenizer(tokenizer), [*malformed, 257, 258])).endswith(" hia")


def test_text_that_continues_a_prompt_keeps_its_first_space() -> None:
    """Decoders made for SentencePiece, such as Llama 2's, remove the space at the start of a text."""
    tokenizer = sentencepiece(decoders.Strip(" ", 1, 0))
    assert stream(Detokenizer(tokenizer), [257, 257]) == ["hi", " hi", ""]
    for prompt in ([257], [258] * 99, [257, *(byte + 1 for byte in "é🎉".encode())]):
        assert stream(Detokenizer(tokenizer, prompt_token_ids=prompt), [257, 257]) == [" hi", " hi", ""]
    # If the prompt ends inside a character, its text is not repeated, and that character cannot be shown.
    cut = [257, *(byte + 1 for byte in "🎉".encode()[:2])]
    assert "hi" not in "".join(stream(Detokenizer(tokenizer, prompt_token_ids=cut), [0x8E + 1, 0x89 + 1]))
