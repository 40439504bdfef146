"""How many tokens models count for images, sound, video and pages: one `MediaFormula` per model family.

`FAMILIES` lists the families by a pattern of model names; the first match applies. The vendors publish the formulas,
and resizing rules of open models are in their preprocessor configurations. A model that matches no pattern is counted
like most open vision models, in patches of 28 x 28 pixels. Replies correct what a formula gets wrong
(`gateway.prompts.media.calibration`), so a formula need not be exact.

Sizes come from clients and may lie. Every formula is bounded: it never returns more than `ITEM_TOKENS_MAX`.
"""

from __future__ import annotations

import math
import re
from typing import Protocol

import msgspec

ITEM_TOKENS_MAX = 4_000_000  # of one image, sound, video or file: above the context of every model known
LOW_DETAIL_SIDE = 512  # pixels to which OpenAI scales an image of `detail: low`


class ImageFormula(Protocol):
    """Counts the tokens of an image. Width and height are in pixels, at least 1, and otherwise unchecked."""

    def tokens(self, width: int, height: int, detail: str) -> int:
        """Tokens of an image of this size. `detail` is the client's: low, high, original, auto or empty."""


class Fixed(msgspec.Struct, frozen=True):
    """Counts every image the same."""

    per_image: int

    def tokens(self, width: int, height: int, detail: str) -> int:
        return self.per_image


class Tiles(msgspec.Struct, frozen=True):
    """OpenAI's tiles: a base, and a price for each tile of 512 x 512 pixels.

    The image is first scaled down to fit into 2048 x 2048 pixels, and then to a short side of 768 pixels.
    """

    base: int
    per_tile: int

    def tokens(self, width: int, height: int, detail: str) -> int:
        if detail == "low":
            return self.base
        width, height = _scaled(width, height, 2048 / max(width, height))
        width, height = _scaled(width, height, 768 / min(width, height))
        return self.base + self.per_tile * math.ceil(width / 512) * math.ceil(height / 512)


class Patches(msgspec.Struct, frozen=True):
    """Square patches of `edge` pixels. An incomplete patch counts as one. Used by OpenAI's newer models and Anthropic.

    A larger image is scaled down to at most `max_side` pixels per side and `max_patches`. Each patch counts
    `multiplier` tokens. With `row_ends`, each row has one token more.
    """

    edge: int
    max_patches: int
    max_side: int = 65_536
    multiplier: float = 1.0
    low_side: int = 0  # pixels per side with `detail: low`; 0: no such option
    original: Patches | None = None  # with `detail: original`
    row_ends: bool = False

    def tokens(self, width: int, height: int, detail: str) -> int:
        if detail == "original" and self.original is not None:
            return self.original.tokens(width, height, "")
        side = self.low_side if detail == "low" and self.low_side else self.max_side
        width, height = _scaled(width, height, side / max(width, height))
        columns, rows = math.ceil(width / self.edge), math.ceil(height / self.edge)
        if columns * rows > self.max_patches:
            columns, rows = self._fitting(width, height)
        return math.ceil(min(columns * rows, self.max_patches) * self.multiplier) + self.row_ends * rows

    def _fitting(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows after scaling to the most patches, with whole patches along one of the sides."""
        factor = self.edge * math.sqrt(self.max_patches / (width * height))
        columns, rows = width * factor / self.edge, height * factor / self.edge
        shrink = min(max(1, int(columns)) / columns, max(1, int(rows)) / rows)
        if shrink > 1:  # one side is thinner than a patch
            return (1, self.max_patches) if columns < rows else (self.max_patches, 1)
        return math.ceil(round(columns * shrink, 6)), math.ceil(round(rows * shrink, 6))


class RoundedPatches(msgspec.Struct, frozen=True):
    """Qwen-VL's patches: sides are rounded to a multiple of `edge`, within a range of tokens.

    A smaller image is scaled up to `min_tokens`, and a larger one down to `max_tokens`.
    """

    edge: int
    min_tokens: int
    max_tokens: int

    def tokens(self, width: int, height: int, detail: str) -> int:
        # In pixels and in this order of operations, because the models' processors round the same way.
        columns, rows = round(width / self.edge), round(height / self.edge)
        if columns * rows > self.max_tokens:
            shrink = math.sqrt(width * height / (self.max_tokens * self.edge**2))
            columns, rows = (max(1, int(side / shrink / self.edge)) for side in (width, height))
        elif columns * rows < self.min_tokens:
            grow = math.sqrt(self.min_tokens * self.edge**2 / (width * height))
            columns, rows = (math.ceil(side * grow / self.edge) for side in (width, height))
        return min(max(columns * rows, self.min_tokens), self.max_tokens)


class GeminiTiles(msgspec.Struct, frozen=True):
    """Gemini 1.5 to 2.5: an image of at most 384 x 384 pixels is one tile, a larger one is cut into square tiles.

    A tile's side is two thirds of the image's short side, from 256 to 768 pixels.
    """

    per_tile: int
    max_tiles: int = 64

    def tokens(self, width: int, height: int, detail: str) -> int:
        if max(width, height) <= 384:
            return self.per_tile
        side = min(max(256, int(min(width, height) / 1.5)), 768)
        return self.per_tile * min(math.ceil(width / side) * math.ceil(height / side), self.max_tiles)


class DynamicTiles(msgspec.Struct, frozen=True):
    """Tiles of `side` pixels, at most `max_tiles`, and an overview tile if there are several: InternVL, Llama 4."""

    side: int
    per_tile: int
    max_tiles: int

    def tokens(self, width: int, height: int, detail: str) -> int:
        tiles = min(math.ceil(width / self.side) * math.ceil(height / self.side), self.max_tiles)
        return self.per_tile * (tiles + (tiles > 1))


class MediaFormula(msgspec.Struct, frozen=True):
    """How a model family counts media. Media of unknown size count as stated here."""

    image: ImageFormula
    unknown_image: int = 1_024  # tokens of an image whose size is unknown, for example of a URL
    audio_per_second: float = 25.0
    video_per_second: float = 300.0
    video_max: int = ITEM_TOKENS_MAX  # engines that sample a fixed number of frames
    page: int = 1_500  # of a PDF: its text and, for most models, its picture
    unknown_seconds: float = 60.0  # of a sound or a video of unknown length
    unknown_pages: int = 10  # of a file whose pages cannot be counted

    def image_tokens(self, width: int, height: int, detail: str) -> int:
        """Tokens of an image. Its size is unknown if width or height is 0."""
        if width < 1 or height < 1:
            return self.unknown_image
        return _bounded(self.image.tokens(width, height, detail))

    def audio_tokens(self, seconds: float) -> int:
        """Tokens of a sound. Its length is unknown if `seconds` is 0."""
        return _bounded((seconds or self.unknown_seconds) * self.audio_per_second)

    def video_tokens(self, seconds: float) -> int:
        """Tokens of a video. Its length is unknown if `seconds` is 0."""
        return _bounded(min((seconds or self.unknown_seconds) * self.video_per_second, self.video_max))

    def page_tokens(self, pages: int) -> int:
        """Tokens of a PDF or another paged file. Its length is unknown if `pages` is 0."""
        return _bounded((pages or self.unknown_pages) * self.page)


def _bounded(tokens: float) -> int:
    return max(1, math.ceil(min(tokens, ITEM_TOKENS_MAX)))


def _scaled(width: int, height: int, factor: float) -> tuple[int, int]:
    """The size scaled down by a factor, and unchanged if the factor is 1 or more."""
    return (width, height) if factor >= 1 else (max(1, round(width * factor)), max(1, round(height * factor)))


def _openai(image: ImageFormula, unknown_image: int) -> MediaFormula:
    return MediaFormula(image, unknown_image, audio_per_second=10.0)


def _qwen(image: ImageFormula) -> MediaFormula:
    return MediaFormula(image, 1_280, video_max=12_288)  # vLLM samples 32 frames, and pairs of them share tokens


def _openai_patches(multiplier: float) -> MediaFormula:
    return _openai(Patches(32, 1_536, multiplier=multiplier), math.ceil(1_024 * multiplier))


_GPT_5_4 = Patches(32, 2_500, 2_048, low_side=LOW_DETAIL_SIDE, original=Patches(32, 10_000, 6_000))

# A pattern of model names, in lower case, and how these models count. The first match applies.
FAMILIES: tuple[tuple[str, MediaFormula], ...] = (
    (r"4o-mini", _openai(Tiles(2_833, 5_667), 25_501)),
    (r"gpt-4\.1-mini", _openai_patches(1.62)),
    (r"gpt-4\.1-nano", _openai_patches(2.46)),
    (r"\bo4-mini", _openai_patches(1.72)),
    (r"gpt-5(\.\d+)?-mini", _openai_patches(1.2)),  # as measured; OpenAI's guide says 1.62
    (r"gpt-5(\.\d+)?-nano", _openai_patches(1.5)),  # as measured; OpenAI's guide says 2.46
    (r"gpt-5\.([4-9]|\d\d)", _openai(_GPT_5_4, 1_024)),
    (r"gpt-5", _openai(Tiles(70, 140), 630)),
    (r"\bo[13]\b", _openai(Tiles(75, 150), 675)),
    (r"computer-use", _openai(Tiles(65, 129), 581)),
    (r"gpt-4|gpt-audio|gpt-realtime", _openai(Tiles(85, 170), 765)),
    (r"claude-(opus-4-[7-9]|[a-z]+-[5-9])", MediaFormula(Patches(28, 4_784, 2_576), 1_568, page=3_000)),
    (r"claude", MediaFormula(Patches(28, 1_568, 1_568), 1_568, page=3_000)),
    (r"gemini-[3-9]", MediaFormula(Fixed(1_120), 1_120, 32.0, 102.0, page=560)),  # a frame and a second of its sound
    (r"gemini", MediaFormula(GeminiTiles(258), 1_032, 32.0, 295.0, page=258)),
    (r"gemma", MediaFormula(Fixed(256), 256)),
    (r"qwen-?(3|4).*(vl|omni)|qwen-?3\.[5-9]", _qwen(RoundedPatches(32, 64, 16_384))),
    (r"qwen.*(vl|omni)|qvq", _qwen(RoundedPatches(28, 4, 16_384))),
    (r"pixtral", MediaFormula(Patches(16, 4_096, 1_024, row_ends=True))),
    (r"voxtral", MediaFormula(Patches(28, 3_025, 1_540, row_ends=True), audio_per_second=12.5)),
    (r"mistral|magistral", MediaFormula(Patches(28, 3_025, 1_540, row_ends=True))),
    (r"internvl", MediaFormula(DynamicTiles(448, 256, 12), 1_792)),
    (r"llama-?4", MediaFormula(DynamicTiles(336, 144, 16), 1_440)),
)
DEFAULT = MediaFormula(RoundedPatches(28, 4, 4_096))
_BY_PROVIDER = {
    "anthropic": "claude",
    "gemini": "gemini",
}  # the family of a provider's models whose name matches no pattern
_PATTERNS = tuple((re.compile(pattern), formula) for pattern, formula in FAMILIES)


def formula_like(model: str) -> MediaFormula | None:
    """The formula of the first family whose pattern matches a model's name; None if none matches."""
    name = model.lower()
    return next((formula for pattern, formula in _PATTERNS if pattern.search(name)), None)


def formula_for(model: str, provider: str) -> MediaFormula:
    """The formula for a deployment's model, by its name or else by its provider."""
    return formula_like(model) or formula_like(_BY_PROVIDER.get(provider, "")) or DEFAULT
