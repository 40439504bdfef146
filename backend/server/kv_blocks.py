"""POST /kv_blocks: sends blocks of the prefix cache to another engine, by their hashes.

`backend/kv_transfer/block_stream.py` defines the format of the request and the response. With the header
`x-kv-blocks-kept`, the blocks move: all but the first so many of those that were sent are dropped. A hash is
unguessable without the tokens and the salt that it covers, so a caller gets, and drops, only what it could compute
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from backend.kv_transfer.block_stream import (
    END,
    HASH_BYTES,
    blocks_per_batch,
    encode_entries,
    encode_header,
    split_hashes,
)
from backend.kv_transfer.prefix_loader import KEPT_HEADER
from backend.server.asgi import ClientDisconnected, Endpoint, HttpExchange
from backend.server.components import ServerComponents
from backend.server.errors import InvalidRequest, Unavailable
from backend.server.kv_transfer import KvTransfer

STREAMS_MAX = 8  # at once, each with two batches in memory
STREAM_SECONDS_MAX = 120.0  # a receiver that reads more slowly is disconnected
PIECE_BYTES = 1 << 20  # per write, so that other responses do not wait for the copy of a batch


class KvBlocksEndpoint(Endpoint):
    """Sends the blocks that are cached, up to the first one that is not."""

    def __init__(self, components: ServerComponents, transfer: KvTransfer, closing: asyncio.Future[None]) -> None:
        self._engine = components.engine
        self._threads = components.preparing.threads
        self._blocks = transfer.blocks
        self._layout = transfer.layout
        self._metrics = transfer.metrics
        # Of the longest prompt. More would be repeated hashes, whose lookup would delay the engine's steps.
        self._hashes_max = components.model.max_model_len // transfer.layout.block_size
        self._num_streams = 0
        self.closing = closing

    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        if not body or len(body) % HASH_BYTES:
            raise InvalidRequest(f"The body must be hashes of {HASH_BYTES} bytes each.")
        if len(body) > self._hashes_max * HASH_BYTES:
            raise InvalidRequest(f"The body has more than {self._hashes_max} hashes, those of the longest prompt.")
        kept = exchange.headers.get(KEPT_HEADER)
        if kept is not None and not (kept.isascii() and kept.isdigit() and len(kept) < 10):
            raise InvalidRequest(f"The header {KEPT_HEADER} must be a number of blocks.")
        if self._num_streams >= STREAMS_MAX:
            raise Unavailable(f"{STREAMS_MAX} engines load blocks already.")
        self._num_streams += 1
        try:
            async with asyncio.timeout(STREAM_SECONDS_MAX):
                hashes = split_hashes(body)
                sent = await self._send(exchange, hashes)
                if kept is not None:
                    self._engine.call(partial(self._blocks.drop, hashes[int(kept) : sent]))
        except TimeoutError as error:
            raise ClientDisconnected from error  # ends the connection, since the response cannot be completed
        finally:
            self._num_streams -= 1

    async def _send(self, exchange: HttpExchange, hashes: Sequence[bytes]) -> int:
        """Sends the blocks, and returns how many of them are cached."""
        size = blocks_per_batch(self._layout)
        batches = [hashes[i : i + size] for i in range(0, len(hashes), size)]
        exchange.response_headers["content-type"] = "application/octet-stream"
        await exchange.stream(encode_header(self._layout))
        self._engine.call(partial(self._blocks.touch, hashes))
        following = self._read(batches[0])
        sent = 0
        for number, batch in enumerate(batches, 1):
            content = await asyncio.wrap_future(following)
            is_last = len(content) < len(batch) or number == len(batches)
            if not is_last:  # is copied while this one is sent
                following = self._read(batches[number])
            if len(content):
                await self._send_batch(exchange, batch, content)
                sent += len(content)
            if is_last:
                break
        await exchange.stream(END)
        await exchange.end_stream()
        return sent

    async def _send_batch(self, exchange: HttpExchange, hashes: Sequence[bytes], content: Tensor) -> None:
        entries = await asyncio.wrap_future(self._threads.submit(encode_entries, hashes, content))
        await exchange.stream(entries)
        view = content.numpy().data.cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            await exchange.stream(bytes(view[start : start + PIECE_BYTES]))
        self._metrics.count_sent(len(content), len(view))

    def _read(self, hashes: Sequence[bytes]) -> Future[Tensor]:
        if self._blocks.can_read_beside_steps:
            return self._threads.submit(self._blocks.read_beside_steps, hashes)
        return self._engine.call(partial(self._blocks.read, hashes))
