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


def create_kv_format(name: str, *, scales_apart: bool = False) -> KvFormat:
    """Returns the KV cache format with this name in `KV_FORMATS`. Raises KeyError for an unknown name.

    scales_apart: as `KvFormat.scales_apart`, if the format has scales.
    """
    kv_format = cast("KvFormat", load_member(KV_FORMATS, name)())
    return kv_format.with_scales_apart() if scales_apart else kv_format
