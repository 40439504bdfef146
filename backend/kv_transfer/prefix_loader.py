"""Loads the missing blocks of a request's prompt from another engine, before the request is submitted.

    load        event loop; waits for the thread, for `seconds` at most
    _load       a thread: asks the engine which blocks are missing, the peer for these, and adds each batch to the cache

The engine computes whatever is missing, so `load` raises nothing: after any fault, the request continues with the
blocks that have arrived, and `Transfer.outcome` says what happened. At the time limit, `load` closes the connection and
returns at once, whatever the thread waits for. The engine's thread never waits: it copies one batch at a time between
two steps. Memory is bounded by two batches for each of LOADS_MAX threads.
"""

from __future__ import annotations

import asyncio
import enum
import http.client
import logging
import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from backend.engine.async_engine import AsyncEngine
from backend.engine.block_transfer import BlockTransfer
from backend.engine.errors import EngineError
from backend.engine.request import Request
from backend.kv_transfer.block_layout import BlockLayout
from backend.kv_transfer.block_stream import BlockReader, StreamFault
from backend.kv_transfer.peers import Peer, PeerRule, is_allowed

PATH = "/kv_blocks"
KEPT_HEADER = "x-kv-blocks-kept"  # of the request: how many of the first blocks the peer keeps; without it, all
LOADS_MAX = 4  # at once; further ones wait within their time limit
PAUSE_SECONDS = 10.0  # after a peer failed, in which no request waits for it

logger = logging.getLogger(__name__)


class Outcome(enum.Enum):
    """How a load ended."""

    COMPLETE = "complete"  # all missing blocks have been loaded
    PARTIAL = "partial"  # the peer had only the first ones, or none
    NOT_NEEDED = "not_needed"  # all blocks were in the cache, or there was no room for the others
    NO_ROOM = "no_room"  # the cache filled up meanwhile
    NOT_ALLOWED = "not_allowed"  # the peer is not one of those that the operator has named
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"  # no connection, or it broke
    PAUSED = "paused"  # a load from the peer failed a moment ago, so no request was sent
    REFUSED = "refused"  # the peer answered with an error
    OTHER_LAYOUT = "other_layout"  # the peer serves another model, or stores blocks in another form
    CORRUPT = "corrupt"  # a checksum did not match
    MALFORMED = "malformed"  # the response is in no known format
    ENGINE_STOPPED = "engine_stopped"


PEERS_FAULTS = (Outcome.UNREACHABLE, Outcome.OTHER_LAYOUT, Outcome.CORRUPT, Outcome.MALFORMED)


@dataclass(slots=True)
class Transfer:
    """One load: its progress while it runs, then its result."""

    peer: Peer
    num_blocks: int = 0
    num_bytes: int = 0
    outcome: Outcome = Outcome.TIMEOUT  # until another one is known


class _Stopped(Exception):
    """The load has been given up."""


class _Connection:
    """The HTTP connection of one load. `stop` wakes a thread that waits in it; may be called from any thread."""

    def __init__(self, peer: Peer, timeout_seconds: float) -> None:
        self._http = http.client.HTTPConnection(peer.host, peer.port, timeout=timeout_seconds)
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self.has_begun = False
        self._stopped = False

    def request(self, hashes: Sequence[bytes], request_id: str, kept: int | None) -> None:
        """Sends the request and reads the head of the response. Raises StreamFault if that has an error status."""
        self.raise_if_stopped()
        self.has_begun = True
        self._http.connect()
        self._socket = self._http.sock
        self.raise_if_stopped()  # `stop` may have missed the socket
        headers = {"content-type": "application/octet-stream", "x-request-id": request_id}
        if kept is not None:
            headers[KEPT_HEADER] = str(kept)
        self._http.request("POST", PATH, b"".join(hashes), headers)
        self._response = self._http.getresponse()
        if self._response.status != http.client.OK:
            raise StreamFault(Outcome.REFUSED.value, f"it answered with status {self._response.status}")

    def read_into(self, buffer: memoryview) -> None:
        assert self._response is not None
        while buffer:
            self.raise_if_stopped()
            size = self._response.readinto(buffer)
            if not size:
                raise ConnectionResetError("the response ended too early")
            buffer = buffer[size:]

    def raise_if_stopped(self) -> None:
        if self._stopped:
            raise _Stopped

    def stop(self) -> None:
        self._stopped = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._http.close()


class PrefixLoader:
    """Loads blocks from peers. Belongs to one event loop."""

    def __init__(
        self,
        engine: AsyncEngine,
        blocks: BlockTransfer,
        layout: BlockLayout,
        allowed: Sequence[PeerRule],
        seconds_max: float,
    ) -> None:
        self._engine = engine
        self._blocks = blocks
        self._layout = layout
        self._allowed = allowed
        self._seconds_max = seconds_max
        self._threads = ThreadPoolExecutor(LOADS_MAX, thread_name_prefix="kv load")
        self._paused_until: dict[Peer, float] = {}  # in seconds of the event loop's clock

    def close(self) -> None:
        """Starts no further load. Does not wait for those that run."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def load(self, request: Request, peer: Peer, seconds: float, kept_tokens: int | None = None) -> Transfer:
        """Loads the blocks of the prompt that the cache lacks, for at most `seconds`. Raises nothing but cancellation.

        `request` must not have been submitted yet. The peer drops what it has sent, except for the first `kept_tokens`
        of the prompt; None: it drops nothing.
        """
        transfer = Transfer(peer)
        is_paused = asyncio.get_running_loop().time() < self._paused_until.get(peer, 0.0)
        if not is_allowed(peer, self._allowed):
            transfer.outcome = Outcome.NOT_ALLOWED
            if not is_paused:  # otherwise the log has it already
                logger.warning("KV blocks are not loaded from %s: --kv-transfer-peers does not name it", peer)
                self._pause(peer)
            return transfer
        if is_paused:
            transfer.outcome = Outcome.PAUSED
            return transfer
        limit = max(0.0, min(seconds, self._seconds_max))
        connection = _Connection(peer, limit or self._seconds_max)
        try:
            async with asyncio.timeout(limit):
                work = self._threads.submit(self._load, request, transfer, connection, kept_tokens)
                transfer.outcome = await asyncio.wrap_future(work)
        except TimeoutError:
            transfer.outcome = Outcome.TIMEOUT
        finally:
            connection.stop()
        is_silent = transfer.outcome is Outcome.TIMEOUT and connection.has_begun and limit >= self._seconds_max
        if transfer.outcome in PEERS_FAULTS or (is_silent and not transfer.num_blocks):
            self._pause(peer)
        result = replace(transfer)  # the counts of the other one may still grow, if the thread was given up
        request.num_transferred_tokens = result.num_blocks * self._layout.block_size
        return result

    def _pause(self, peer: Peer) -> None:
        """Keeps other requests from waiting for the peer without success."""
        now = asyncio.get_running_loop().time()
        paused = {each: until for each, until in self._paused_until.items() if until > now}
        self._paused_until = paused | {peer: now + PAUSE_SECONDS}

    def _load(self, request: Request, transfer: Transfer, connection: _Connection, kept_tokens: int | None) -> Outcome:
        """Runs on a thread, and adds to the counts of `transfer`. `load` may not wait for its result."""
        try:
            with closing(connection):
                return self._load_missing(request, transfer, connection, kept_tokens)
        except StreamFault as fault:
            logger.warning("KV blocks cannot be loaded from %s: %s", transfer.peer, fault)
            return Outcome(fault.kind)
        except (_Stopped, TimeoutError):
            return Outcome.TIMEOUT
        except (OSError, http.client.HTTPException) as error:
            logger.info("KV blocks cannot be loaded from %s: %s", transfer.peer, error)
            return Outcome.UNREACHABLE
        except EngineError:
            return Outcome.ENGINE_STOPPED

    def _load_missing(
        self, request: Request, transfer: Transfer, connection: _Connection, kept_tokens: int | None
    ) -> Outcome:
        missing = self._engine.call(partial(self._blocks.find_missing, request)).result()
        hashes = missing.hashes
        if not hashes:
            return Outcome.NOT_NEEDED
        kept = None
        if kept_tokens is not None:
            kept = max(0, -(-kept_tokens // self._layout.block_size) - missing.first)
        connection.request(hashes, request.request_id, kept)
        reader = BlockReader(connection.read_into, self._layout)
        reader.read_header()
        num_read, written = 0, _nothing_written()
        try:
            while (content := reader.read_batch(hashes[num_read:])) is not None:
                if not written.result():  # the engine's thread has copied the batch while this one was read
                    return Outcome.NO_ROOM
                connection.raise_if_stopped()
                written = self._write(request, transfer, missing.first + num_read, content)
                num_read += len(content)
        finally:
            wait([written])  # and is counted, whatever happened to the next one
        if not written.result():
            return Outcome.NO_ROOM
        return Outcome.COMPLETE if num_read == len(hashes) else Outcome.PARTIAL

    def _write(self, request: Request, transfer: Transfer, first: int, content: Tensor) -> Future[bool]:
        written = self._engine.call(partial(self._blocks.write, request, first, content))
        written.add_done_callback(partial(_count, transfer, content))
        return written


def _nothing_written() -> Future[bool]:
    done: Future[bool] = Future()
    done.set_result(True)
    return done


def _count(transfer: Transfer, content: Tensor, written: Future[bool]) -> None:
    if not written.exception() and written.result():
        transfer.num_blocks += len(content)
        transfer.num_bytes += content.nbytes
