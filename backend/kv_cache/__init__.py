"""How keys and values are stored in the KV cache: a family of formats, named as by `--kv-cache-dtype`.

It imports nothing of `backend` but `families`. Begin at base.py.
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
    """The format with this name in `KV_FORMATS`."""
    return cast("KvFormat", load_member(KV_FORMATS, name)())
