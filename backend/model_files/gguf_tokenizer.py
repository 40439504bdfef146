"""Builds a tokenizer from a GGUF file's vocabulary: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

GGUF stores the name of the pattern that splits text before merges (`tokenizer.ggml.pre`), but not the pattern itself.
`SPLITS` has the patterns by name. SentencePiece vocabularies store scores instead of merges, and `_merges_by_score`
derives the merges from the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from backend.engine.errors import UnsupportedModel
from backend.model_files.gguf_header import GgufHeader, MalformedGguf

PREFIX = "tokenizer.ggml."
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # values of `token_type`
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Tokens that end an output if the vocabulary has them, even if the metadata omits them. llama.cpp does the same.
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<end_of_turn>", "<|end_of_text|>")
ADDS_BOS = ("llama-bpe", "llama3", "tekken")  # vocabularies that add a bos token by default
# Names in SPLITS for architectures whose files do not name it. In Ollama's gpt-oss, the name is "default".
DEFAULT_SPLITS = {"gptoss": "gpt-4o"}
HARMONY_ENDS = (
    "<|return|>",
    "<|call|>",
)  # if both are present, `<|end|>` separates messages of one output instead of ending it

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Split:
    """Rules that split text before merges. `tokenizer.ggml.pre` in the metadata is their name in `SPLITS`."""

    pattern: str
    single_digits: bool = False  # split off every digit before the pattern applies
    nfc: bool = False
    ignores_merges: bool = False  # a piece that is in the vocabulary is not split


def _cased(digits: str, ending: str = "") -> str:
    """Returns a split pattern in which a word ends before a capital letter."""
    upper, lower, before = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
SPLITS = {
    "dbrx": _Split(_LLAMA3),  # used by OLMo 2
    "gpt-2": _Split(_GPT2),
    "gpt-4o": _Split(_cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")),
    "llama-bpe": _Split(_LLAMA3, ignores_merges=True),
    "llama3": _Split(_LLAMA3, ignores_merges=True),
    "olmo": _Split(_GPT2),
    "qwen2": _Split(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}", nfc=True),
    "refact": _Split(_GPT2, single_digits=True),  # used by Granite
    "smollm": _Split(_GPT2, single_digits=True),
    "starcoder": _Split(_GPT2, single_digits=True),
    "tekken": _Split(_cased(r"\p{N}"), ignores_merges=True),
}


def make_tokenizer(header: GgufHeader) -> Tokenizer:
    """Builds the tokenizer. Raises `UnsupportedModel` or, for inconsistent metadata, `MalformedGguf`."""
    kind = header.get(f"{PREFIX}model", "")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"{PREFIX}model {kind!r} is not one of gpt2 and llama")
    tokens = _tokens(header)
    types = header.items(f"{PREFIX}token_type", int) or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise MalformedGguf(f"{PREFIX}token_type has {len(types)} entries for {len(tokens)} tokens")
    tokenizer = _byte_level(header, tokens) if kind == "gpt2" else _sentence_piece(header, tokens, types)
    # Only control tokens are special. User-defined tokens also match in the text, but decoding shows them.
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token_type == CONTROL, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (CONTROL, USER_DEFINED)
        ]
    )
    _add_bos_and_eos(tokenizer, header, adds_bos=kind == "llama" or header.get(f"{PREFIX}pre", "") in ADDS_BOS)
    return tokenizer


def special_tokens(header: GgufHeader) -> dict[str, str]:
    """Returns the special tokens by role, under transformers' names of the roles."""
    tokens = header.items(f"{PREFIX}tokens", str)
    ids = {role: header.get(f"{PREFIX}{name}_token_id", -1) for role, name in ROLES.items()}
    return {role: tokens[i] for role, i in ids.items() if 0 <= i < len(tokens)}


def end_token_ids(header: GgufHeader) -> list[int]:
    """Returns the ids of all tokens that end an output."""
    tokens, types = header.items(f"{PREFIX}tokens", str), header.items(f"{PREFIX}token_type", int)
    named = {header.get(f"{PREFIX}{name}_token_id", -1) for name in ("eos", "eot", "eom")} - {-1}
    named.update(header.items(f"{PREFIX}eos_token_ids", int))  # Ollama's field
    control = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == CONTROL}
    ends = set(TURN_ENDS) | set(HARMONY_ENDS)
    if control.keys() >= set(HARMONY_ENDS):
        ends -= {"<|end|>"}
    return sorted(named | {control[token] for token in ends & control.keys()})


def _tokens(header: GgufHeader) -> list[str]:
    tokens = header.items(f"{PREFIX}tokens", str)
    if not tokens:
        raise MalformedGguf(f"{PREFIX}tokens is missing")
    return tokens


def _byte_level(header: GgufHeader, tokens: list[str]) -> Tokenizer:
    name = DEFAULT_SPLITS.get(header.get("general.architecture", ""), header.get(f"{PREFIX}pre", ""))
    if name not in SPLITS:
        raise UnsupportedModel(f"{PREFIX}pre {name!r} is not one of {', '.join(SPLITS)}")
    split = SPLITS[name]
    vocab = _vocab(tokens)
    merges = [_merge(pair) for pair in header.items(f"{PREFIX}merges", str)]
    for first, second in merges:
        if not {first, second, first + second} <= vocab.keys():
            raise MalformedGguf(
                f"{PREFIX}merges joins {first!r} and {second!r}, but {PREFIX}tokens lacks one of the pieces"
            )
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=split.ignores_merges))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *([pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []),
            pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merge(pair: str) -> tuple[str, str]:
    cut = pair.find(" ", 1)  # a piece can begin with a space
    if cut < 0:
        raise MalformedGguf(f"{PREFIX}merges: {pair!r} is not two pieces")
    return pair[:cut], pair[cut + 1 :]


def _sentence_piece(header: GgufHeader, tokens: list[str], types: list[int]) -> Tokenizer:
    scores = header.items(f"{PREFIX}scores", float)
    if len(scores) != len(tokens):
        raise MalformedGguf(f"{PREFIX}scores has {len(scores)} entries for {len(tokens)} tokens")
    unknown = special_tokens(header).get("unk_token", tokens[0])
    merges = list(_merges_by_score(tokens, types, scores))
    vocab = _vocab(tokens)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    to_piece = normalizers.Replace(" ", "▁")
    ending: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.get(f"{PREFIX}add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_piece])
        ending.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = to_piece
    tokenizer.decoder = decoders.Sequence(ending)
    return tokenizer


def _merges_by_score(tokens: list[str], types: list[int], scores: list[float]) -> Iterator[tuple[str, str]]:
    """Yields BPE merges that reproduce SentencePiece, which joins the pair whose result has the best score.

    For each piece, in order of falling score, yields every way to split it into two pieces.
    """
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    for i in sorted(range(len(tokens)), key=lambda i: (-scores[i], i)):
        token = tokens[i]
        if types[i] == NORMAL:
            for cut in range(1, len(token)):
                if token[:cut] in pieces and token[cut:] in pieces:
                    yield token[:cut], token[cut:]


def _vocab(tokens: list[str]) -> dict[str, int]:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise MalformedGguf(f"{PREFIX}tokens has a duplicate")
    return vocab


def _add_bos_and_eos(tokenizer: Tokenizer, header: GgufHeader, *, adds_bos: bool) -> None:
    special = special_tokens(header)
    added = {
        "bos_token": header.get(f"{PREFIX}add_bos_token", adds_bos),
        "eos_token": header.get(f"{PREFIX}add_eos_token", False),
    }
    added_tokens = {role: special[role] for role, is_added in added.items() if is_added and role in special}
    if added_tokens:
        template = [added_tokens.get("bos_token"), "$A", added_tokens.get("eos_token")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[part for part in template if part is not None],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in added_tokens.values()],
        )
