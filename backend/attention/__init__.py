"""Attention over the paged cache, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from backend.families import load_member
from backend.kv_cache.plain import PLAIN

if TYPE_CHECKING:
    from backend.attention.base import Attention
    from backend.kv_cache.base import KvForm

ATTENTIONS = {
    "native": "backend.attention.native:NativeAttention",
    "sdpa": "backend.attention.sdpa:SdpaAttention",
    "triton": "backend.attention.triton:TritonAttention",
}

READ_EVERY_FORM = ("sdpa", "triton")  # of the cache; the others read it as the model computes it


def create_attention(name: str, scale: float, form: KvForm = PLAIN) -> Attention:
    member = load_member(ATTENTIONS, name)
    return cast("Attention", member(scale, form) if name in READ_EVERY_FORM else member(scale))
