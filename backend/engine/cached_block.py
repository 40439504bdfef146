"""The identity of a full block in the prefix cache: its content, its hash, and who is notified about it.

A block's hash covers its tokens and, through the hash of its parent, everything before it. The tokens of one block do
not determine their keys and values; the whole prefix does. The hash is SHA-256, because the isolation between salts
and the correctness of every cache hit rest on equality of digests alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from backend.engine.adapter import Adapter
from backend.engine.request import Request

ROOT_HASH = bytes(32)  # the parent of a first block; with an adapter, the hash covers `Adapter.root_hash` instead


def hash_block(parent: bytes, token_ids: Sequence[int], cache_salt: str = "", images: bytes = b"") -> bytes:
    """The digest of a full block: its parent's digest, its tokens as little-endian int32, and a first block's salt.

    images: what `PromptImages.hashed` has of a block with tokens of images. All of these are the same token.
    """
    content = parent + struct.pack(f"<{len(token_ids)}i", *token_ids)
    if images:
        content = sha256(b"images " + images + content).digest()
    return sha256(content + cache_salt.encode()).digest()


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """The content of a full block. `cache_salt` is set in the first block of a sequence only."""

    block_hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    cache_salt: str = ""
    session_id: str = ""  # of the request that computed it: for listeners, not part of the hash
    adapter: Adapter | None = None  # of the request that computed it
    images: tuple[str, ...] = ()  # digests of the images that have tokens in it, in hexadecimal


class BlockListener(Protocol):
    """Notified of every change to the set of cached blocks, in order. Called on the engine's thread."""

    def stored(self, block: CachedBlock) -> None:
        """A block can now be found."""

    def removed(self, block_hash: bytes) -> None:
        """A block was evicted from the pool and from the second tier, if there is one."""

    def cleared(self) -> None:
        """All blocks were removed at once."""

    def end_step(self) -> None:
        """Ends one batch of events. Called before the outputs of the step are delivered."""


def extend_hashes(request: Request, num_blocks: int, block_size: int) -> None:
    """Computes the hashes of the request's first `num_blocks` full blocks, as far as they are missing."""
    hashes = request.block_hashes
    for i in range(len(hashes), num_blocks):
        root = request.adapter.root_hash if request.adapter else ROOT_HASH
        start = i * block_size
        images = request.images.hashed(start, start + block_size) if request.images else b""
        hashes.append(hash_block(hashes[-1] if i else root, *_hashed_content(request, i, block_size), images))


def content_of(request: Request, index: int, block_size: int) -> CachedBlock:
    """The request's full block number `index`, whose hash has been computed."""
    parent = request.block_hashes[index - 1] if index else ROOT_HASH
    token_ids, cache_salt = _hashed_content(request, index, block_size)
    start = index * block_size
    placed = request.images.overlapping(start, start + block_size) if request.images else ()
    images = tuple(each.image.digest.hex() for each in placed)
    block_hash, session_id = request.block_hashes[index], request.session_id
    return CachedBlock(block_hash, parent, token_ids, cache_salt, session_id, request.adapter, images)


def _hashed_content(request: Request, index: int, block_size: int) -> tuple[tuple[int, ...], str]:
    """What the block's own part of the hash covers: its tokens, and the salt in the first block."""
    token_ids = tuple(request.token_ids[index * block_size : (index + 1) * block_size])
    return token_ids, "" if index else request.cache_salt
