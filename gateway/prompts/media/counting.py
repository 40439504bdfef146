"""Turns the media of a prompt into tokens, and into text for the fingerprint.

The unit of a fingerprint is the token of four bytes of text. An image of 1,105 tokens therefore becomes 4,420 bytes of
text, which repeat the image's digest. Every block in it depends on the digest, and text behind the image is as far from
the beginning as it is for the engine. So equal images are equal prefixes, and a different image breaks the prefix.

The fingerprint uses the formula's count, never the learned correction: the same prompt has the same fingerprint in its
next turn and at every gateway. If the deployments of a model have several formulas, the highest count is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from gateway.policy.media_formulas import ITEM_TOKENS_MAX, MediaFormula
from gateway.prefix.fingerprint import BYTES_PER_TOKEN
from gateway.prompts.media.parts import MediaItem, MediaKind
from gateway.types import PromptMedia

FILL_TOKENS_MAX = 1_000_000  # of media in a prompt's fingerprint; further media stand there as their digest only
Piece = bytes | tuple[bytes | MediaItem, ...]
"""The text of one message or tool, or its text and media in order."""

IMAGE_TOKENS_BOUND = 65_536  # above what any known model counts for an image
AUDIO_TOKENS_PER_SECOND_BOUND = 100
VIDEO_TOKENS_PER_SECOND_BOUND = 4_096
PAGE_TOKENS_BOUND = 16_384


class CountedPieces(msgspec.Struct, frozen=True):
    """A prompt's pieces as text, and the tokens of its media. `media` is None if there is none."""

    texts: Sequence[bytes]
    tokens: int  # of text and media, in tokens of the fingerprint
    media: PromptMedia | None = None


def count_pieces(pieces: Sequence[Piece], formulas: Sequence[MediaFormula]) -> CountedPieces:
    """Count a prompt's tokens, and replace its media by text of as many tokens."""
    if tuple not in map(type, pieces):  # the usual case; a generator would take ten times as long
        texts: Sequence[bytes] = pieces  # type: ignore[assignment]
        return CountedPieces(texts, sum(map(len, texts)) // BYTES_PER_TOKEN)
    texts, text_bytes, bound, left = [], 0, 0, FILL_TOKENS_MAX
    by_kind: dict[str, int] = {}
    for piece in pieces:
        if isinstance(piece, bytes):
            texts.append(piece)
            text_bytes += len(piece)
            continue
        parts: list[bytes] = []
        for part in piece:
            if isinstance(part, bytes):
                parts.append(part)
                text_bytes += len(part)
                continue
            tokens = max(item_tokens(part, formula) for formula in formulas)
            filled = min(tokens, left)
            left -= filled
            parts += (part.name, _fill(part.digest, filled))
            text_bytes += len(part.name)
            kind = part.kind if part.has_size else f"unknown_{part.kind}"
            by_kind[kind] = by_kind.get(kind, 0) + tokens
            bound += item_bound(part)
        texts.append(b"".join(parts))
    text_tokens, media_tokens = text_bytes // BYTES_PER_TOKEN, sum(by_kind.values())
    return CountedPieces(texts, text_tokens + media_tokens, PromptMedia(tuple(by_kind.items()), bound))


def item_tokens(item: MediaItem, formula: MediaFormula) -> int:
    """Tokens of one item by a formula. Media of unknown size count as the formula states."""
    match item.kind:
        case MediaKind.IMAGE:
            return formula.image_tokens(item.width, item.height, item.detail)
        case MediaKind.AUDIO:
            return formula.audio_tokens(item.seconds)
        case MediaKind.VIDEO:
            return formula.video_tokens(item.seconds)
        case MediaKind.FILE:
            return formula.page_tokens(item.pages)
        case MediaKind.TEXT_FILE:
            return item.size_bytes // BYTES_PER_TOKEN


def item_bound(item: MediaItem) -> int:
    """An upper bound on the tokens that any model counts for an item, of whatever family."""
    match item.kind:
        case MediaKind.IMAGE:
            return IMAGE_TOKENS_BOUND
        case MediaKind.AUDIO if item.seconds:
            return _bounded(item.seconds * AUDIO_TOKENS_PER_SECOND_BOUND)
        case MediaKind.VIDEO if item.seconds:
            return _bounded(item.seconds * VIDEO_TOKENS_PER_SECOND_BOUND)
        case MediaKind.FILE if item.pages:
            return _bounded(item.pages * PAGE_TOKENS_BOUND)
        case MediaKind.TEXT_FILE:
            return _bounded(item.size_bytes)  # a token has at least one byte
    return ITEM_TOKENS_MAX


def _bounded(tokens: float) -> int:
    """At least an image's bound, since short recordings and files have a minimum, too."""
    return min(max(int(tokens), IMAGE_TOKENS_BOUND), ITEM_TOKENS_MAX)


def _fill(digest: bytes, tokens: int) -> bytes:
    """Text of so many tokens that depends on the digest."""
    size = tokens * BYTES_PER_TOKEN
    return digest if not size else (digest * (size // len(digest) + 1))[:size]


def piece_text(piece: Piece) -> bytes:
    """A piece as text in which media stand as their digest, for comparisons that need no counts."""
    return piece if isinstance(piece, bytes) else b"".join(_texts(piece))


def _texts(parts: Iterable[bytes | MediaItem]) -> Iterable[bytes]:
    return (part if isinstance(part, bytes) else part.name + part.digest for part in parts)
