"""The wire format of KV event batches from vLLM, SGLang and the bundled engine, in all encodings of their releases.

A batch is msgpack: an array `[time, [event, ...], data-parallel rank]`, in some releases a map. An event is a map with
its type under "type" (since June 2026), or an array that begins with its type. Missing fields have their defaults, and
unknown fields are skipped. So are a stored block's tokens, which are most of the bytes: the engine's hashes are enough
to follow its cache. A hash is an integer or bytes.

Only the engine's GPU memory counts. Events of slower tiers (`medium` other than GPU) are ignored. So are all cache
groups of a hybrid model except the first one: a prefix counts as cached if its full-attention blocks are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from gateway.prefix.events.base import BlockHash, BlocksRemoved, BlocksStored

MEMORY = (None, "GPU", "gpu", "device")

_SKIPPED = msgspec.Raw(b"\xc0")


class MalformedBatch(Exception):
    """The bytes are not a batch of events. The message says why."""


class CacheCleared(NamedTuple):
    """All blocks were evicted."""


class EventBatch(NamedTuple):
    """The events of one message, in order."""

    at: float  # seconds since the epoch, by the engine's clock
    events: list[BlocksStored | BlocksRemoved | CacheCleared]


class _StoredMap(msgspec.Struct, tag="BlockStored"):
    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None = None
    token_ids: msgspec.Raw = _SKIPPED
    block_size: int = 0
    lora_id: Any = None
    medium: str | None = None
    lora_name: Any = None
    extra_keys: msgspec.Raw = _SKIPPED
    group_idx: int | None = None
    kv_cache_spec_kind: Any = None
    kv_cache_spec_sliding_window: Any = None
    locality: Any = None
    ownership: Any = None
    session_id: str | None = None


class _StoredArray(_StoredMap, tag="BlockStored", array_like=True):
    pass


class _RemovedMap(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class _RemovedArray(_RemovedMap, tag="BlockRemoved", array_like=True):
    pass


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _ClearedArray(_ClearedMap, tag="AllBlocksCleared", array_like=True):
    pass


class _BatchMap(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]


class _BatchArray(_BatchMap, array_like=True):
    pass


class _TypeMap(msgspec.Struct):
    type: str


class _TypeArray(_TypeMap, array_like=True):
    pass


_KNOWN = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_ARRAYS = frozenset(bytes([first]) for first in (*range(0x90, 0xA0), 0xDC, 0xDD))  # fixarray, array 16, array 32

_batch_map, _batch_array = msgspec.msgpack.Decoder(_BatchMap), msgspec.msgpack.Decoder(_BatchArray)
_type_map, _type_array = msgspec.msgpack.Decoder(_TypeMap), msgspec.msgpack.Decoder(_TypeArray)
_event_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_event_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


def read_batch(payload: bytes) -> EventBatch:
    """Decode a batch, without the events that are ignored. Raises `MalformedBatch`."""
    try:
        batch = (_batch_array if payload[:1] in _ARRAYS else _batch_map).decode(payload)
        events = [event for raw in batch.events if (event := _read_event(bytes(raw))) is not None]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBatch(str(error)) from None
    return EventBatch(batch.ts, events)


def _read_event(packed: bytes) -> BlocksStored | BlocksRemoved | CacheCleared | None:
    is_array = packed[:1] in _ARRAYS
    try:
        event = (_event_array if is_array else _event_map).decode(packed)
    except msgspec.ValidationError:
        if (_type_array if is_array else _type_map).decode(packed).type in _KNOWN:
            raise
        return None  # an event type that this release does not know
    if isinstance(event, _ClearedMap | _ClearedArray):
        return CacheCleared()
    if event.medium not in MEMORY or event.group_idx:
        return None
    if isinstance(event, _RemovedMap | _RemovedArray):
        return BlocksRemoved(event.block_hashes)
    if not event.block_hashes:
        return None
    return BlocksStored(event.block_hashes, event.parent_block_hash, event.block_size, event.session_id or "")
