"""Attention over the paged KV cache: three implementations of one interface, chosen by name.

This package may import `backend.kv_cache`, `backend.native` and `backend.triton_runtime`, but neither models nor the
engine. Begin at base.py, then read sdpa.py, which runs on every device and is the reference for the others.
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
    """Returns the attention implementation with this name in `ATTENTIONS`. Raises KeyError for an unknown name.

    scale: factor of the attention scores, usually 1 / sqrt(head_dim). kv_format: format of the KV caches.
    """
    return cast("Attention", load_member(ATTENTIONS, name)(scale, kv_format))
