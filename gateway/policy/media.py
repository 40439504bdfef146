"""Policy model of media: how the tokens of images, sound, video and files are counted before a reply reports them."""

from __future__ import annotations

from typing import Annotated, Self

import msgspec
from pydantic import Field, model_validator

from gateway.policy.fields import Count, Frozen, Name
from gateway.policy.media_formulas import FAMILIES, MediaFormula, RoundedPatches, formula_for, formula_like

PATCH_TOKENS = (4, 16_384)  # fewest and most tokens of an image that is counted in patches, if the policy sets neither
TokensPerSecond = Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)]


class Media(Frozen):
    """How the tokens of images, sound, video and files are estimated. Fields that are set override the family's."""

    like: Name | None = Field(
        None,
        description="Count as this model does, as in gpt-4o-mini, claude-opus-4-7 or qwen2.5-vl. Default: by the "
        "deployment's `model`, or else its `provider`; unknown models count patches of 28 x 28 pixels.",
    )
    patch_pixels: Count | None = Field(
        None, description="Count an image in square patches with sides of this many pixels, each one token."
    )
    min_image_tokens: Count | None = Field(
        None, description="With patch_pixels: a smaller image is scaled up to this many tokens. Default: 4."
    )
    max_image_tokens: Count | None = Field(
        None, description="With patch_pixels: a larger image is scaled down to this many tokens. Default: 16384."
    )
    image_tokens: Count | None = Field(None, description="Tokens of an image of unknown size, such as one by URL.")
    audio_tokens_per_second: TokensPerSecond | None = Field(None, description="Tokens of a second of sound.")
    video_tokens_per_second: TokensPerSecond | None = Field(None, description="Tokens of a second of video.")
    max_video_tokens: Count | None = Field(None, description="Most tokens of a video.")
    page_tokens: Count | None = Field(None, description="Tokens of a page of a PDF.")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.like is not None and formula_like(self.like) is None:
            known = ", ".join(pattern for pattern, _ in FAMILIES)
            raise ValueError(f"like: no known model's name matches {self.like!r}; known are {known}")
        fewest, most = self._patch_tokens
        if self.patch_pixels is None and (self.min_image_tokens or self.max_image_tokens):
            raise ValueError("min_image_tokens and max_image_tokens need patch_pixels")
        if fewest > most:
            raise ValueError(f"min_image_tokens ({fewest}) must be at most max_image_tokens ({most})")
        return self

    @property
    def _patch_tokens(self) -> tuple[int, int]:
        fewest, most = PATCH_TOKENS
        return self.min_image_tokens or min(fewest, self.max_image_tokens or fewest), self.max_image_tokens or most

    def formula(self, model: str, provider: str) -> MediaFormula:
        """The formula for a deployment's model: the family's, with the values that this policy sets."""
        family = formula_for(model if self.like is None else self.like, provider)
        changes = {
            "image": self.patch_pixels and RoundedPatches(self.patch_pixels, *self._patch_tokens),
            "unknown_image": self.image_tokens,
            "audio_per_second": self.audio_tokens_per_second,
            "video_per_second": self.video_tokens_per_second,
            "video_max": self.max_video_tokens,
            "page": self.page_tokens,
        }
        return msgspec.structs.replace(family, **{name: value for name, value in changes.items() if value is not None})
