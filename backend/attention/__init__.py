"""Attention over the paged cache, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from backend.families import load_member
from backend.kv_cache.plain import PLAIN

if TYPE_CHECKING:
    from backend.attention.base import Attention
    from backend.kv_cache.base import KvFormat

ATTENTIONS = {
    "native": "backend.attention.native:NativeAttention",
    "sdpa": "backend.attention.sdpa:SdpaAttention",
    "triton": "backend.attention.triton:TritonAttention",
}


def create_attention(name: str, scale: float, form: KvFormat = PLAIN) -> Attention:
    return cast("Attention", load_member(ATTENTIONS, name)(scale, form))
