"""How keys and values are kept in the cache, by what `--kv-cache-dtype` calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from backend.families import load_member

if TYPE_CHECKING:
    from backend.kv_cache.base import KvForm

KV_FORMS = {
    "auto": "backend.kv_cache.plain:PlainForm",
    "int8": "backend.kv_cache.scaled:Int8Form",
    "fp8_e4m3": "backend.kv_cache.scaled:Fp8Form",
}


def create_kv_form(name: str) -> KvForm:
    return cast("KvForm", load_member(KV_FORMS, name)())
