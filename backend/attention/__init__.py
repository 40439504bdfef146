"""Attention over the paged KV cache: a family of implementations behind one interface, chosen by name.

It may import `backend.kv_cache`, `backend.native` and `triton_runtime`, but neither models nor the engine.
Begin at base.py, then sdpa.py, which runs everywhere and is the reference for the others.
"""

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


def create_attention(name: str, scale: float, kv_format: KvFormat = PLAIN) -> Attention:
    """scale: multiplied with the scores, usually 1 / sqrt(head_dim). kv_format: that of the caches it will read."""
    return cast("Attention", load_member(ATTENTIONS, name)(scale, kv_format))
