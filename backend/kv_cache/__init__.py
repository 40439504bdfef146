"""Storage formats of keys and values in the KV cache, under the names that `--kv-cache-dtype` takes.

This package imports only `families` from `backend`. Begin at base.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from backend.families import load_member

if TYPE_CHECKING:
    from backend.kv_cache.base import KvFormat

KV_FORMATS = {
    "auto": "backend.kv_cache.plain:PlainFormat",
    "int8": "backend.kv_cache.scaled:Int8Format",
    "fp8_e4m3": "backend.kv_cache.scaled:Fp8Format",
}


def create_kv_format(name: str) -> KvFormat:
    """Returns the KV cache format with this name in `KV_FORMATS`. Raises KeyError for an unknown name."""
    return cast("KvFormat", load_member(KV_FORMATS, name)())
