"""Attention over the paged cache, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from backend.families import load_member

if TYPE_CHECKING:
    from backend.attention.base import Attention

ATTENTIONS = {
    "native": "backend.attention.native:NativeAttention",
    "sdpa": "backend.attention.sdpa:SdpaAttention",
}


def create_attention(name: str, scale: float) -> Attention:
    return cast("Attention", load_member(ATTENTIONS, name)(scale))
