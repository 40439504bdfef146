"""What gateways on one storage tell each other of the servers behind them: how much each has under way there, which
prompts have been computed, and which requests a server has died of.

Every `EXCHANGE_SECONDS` a gateway tells what is new and hears what others told. Their load counts beside its own, and
their prompts enter its cache models and its working set as its own do when they are sent. A conversation may so go
through any of them. Prompts are told as fingerprints, 8 bytes for 256 of text, when their answers are over: what is
still being computed must not look as if it could be found.

No call waits for any of this, and nothing breaks without it. A gateway that tells nothing for `SILENT_SECONDS` has no
load; what was not told, or told while the storage was away, costs hits. All must have the same key pepper, of which the
tenants' salts are made: else their fingerprints have nothing in common.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import lru_cache

import msgspec
import xxhash

from gateway.core.errors import StorageUnavailable
from gateway.core.ids import random_bytes
from gateway.deployments.fleet import DeploymentState, Fleet, SentCall
from gateway.prefix.estimate import NO_PEER_LOAD, PeerLoad
from gateway.prefix.events.block_index import FinishedCall
from gateway.prefix.fingerprint import text_bytes_of
from gateway.storage.base import PEER_MESSAGES_PER_READ, PeerMessages

EXCHANGE_SECONDS = 0.1
BEAT_SECONDS = 1.0  # after which a load that has not changed is told again
SILENT_SECONDS = 3.0
RETRY_SECONDS = 1.0  # while the storage is away
OUTBOX_MAX_CALLS = 2048  # calls that are over and not yet told; the oldest are not told at all
NOTICE_MAX_BLOCKS = 8192  # of all prompts in one notice, or of one prompt: 64 KiB

log = logging.getLogger("warmpath")

_Load = tuple[int, int, int]  # server, calls under way, tokens queued


class _Call(msgspec.Struct, array_like=True, frozen=True):
    """One that is over: a `Prompt`, and where it was computed."""

    deployment: int
    fingerprint: tuple[int, ...]
    prompt_tokens_estimate: int
    session: str | None
    may_be_held: bool
    usage: tuple[str, int, int, int] | None  # call id, input, cached and output tokens
    slot: int | None = None  # of a server that has some


class _Notice(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The tag is the format's version."""

    sender: int
    loads: tuple[_Load, ...]  # of servers at which it has any
    calls: tuple[_Call, ...]
    quarantine: tuple[tuple[int, int], ...] = ()  # requests that servers may have died of, and how much is against each


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Notice).decode


def new_outbox() -> deque[SentCall]:
    """For a fleet whose calls are to be told."""
    return deque(maxlen=OUTBOX_MAX_CALLS)


class PeerReports:
    """One gateway's part in it, without an event loop: `now` is told, so that a simulator can do so."""

    def __init__(self, fleet: Fleet, outbox: deque[SentCall]) -> None:
        self._fleet = fleet
        self._outbox = outbox
        self._sender = int.from_bytes(random_bytes(8))
        self._last_loads: list[tuple[str, int, int]] = []
        self._told_at = 0.0
        self._loads: dict[int, tuple[float, tuple[_Load, ...]]] = {}  # by sender, and when it was heard
        self.calls_received = 0
        self.malformed = 0

    @property
    def live_peers(self) -> int:
        """How many other gateways have told their load lately."""
        return len(self._loads)

    def make_notice(self, now: float) -> bytes:
        """What is new since the last one; empty where nothing is."""
        calls: list[_Call] = []
        blocks = 0
        while self._outbox:
            sent = self._outbox[0]
            blocks += len(sent.prompt.chain)
            if blocks > NOTICE_MAX_BLOCKS and calls:
                break
            self._outbox.popleft()
            if 0 < len(sent.prompt.chain) <= NOTICE_MAX_BLOCKS:
                calls.append(_outbox(sent))
        quarantine = self._fleet.quarantine.take_updates()
        busy = [deployment for deployment in self._fleet if deployment.in_flight]
        loads = [
            (deployment.name, deployment.in_flight, deployment.estimate.prefill_tokens_queued) for deployment in busy
        ]
        nothing_new = not calls and not quarantine and loads == self._last_loads
        if nothing_new and not (loads and now - self._told_at >= BEAT_SECONDS):
            return b""
        self._last_loads, self._told_at = loads, now
        return _encode(
            _Notice(self._sender, tuple([_load(deployment, now) for deployment in busy]), tuple(calls), quarantine)
        )

    def receive(self, notice: bytes, now: float) -> None:
        """In the order in which they were told. This gateway's own say nothing."""
        try:
            outbox = _decode(notice)
        except msgspec.MsgspecError:  # by a release that says it otherwise
            self.malformed += 1
            return
        if outbox.sender == self._sender:
            return
        self._loads[outbox.sender] = now, outbox.loads
        self._sum_up()
        for digest, against in outbox.quarantine:
            self._fleet.quarantine.receive(digest, against, now)
        self.calls_received += len(outbox.calls)
        deployments = {_name(deployment): deployment for deployment in self._fleet} if outbox.calls else {}
        for call in outbox.calls:
            if (deployment := deployments.get(call.deployment)) is not None:
                _enter(call, deployment, now)

    def expire_silent(self, now: float) -> None:
        silent = [sender for sender, (at, _) in self._loads.items() if now - at >= SILENT_SECONDS]
        for sender in silent:
            del self._loads[sender]
        if silent:
            self._sum_up()

    def _sum_up(self) -> None:
        self._fleet.working_set.has_peers = bool(self._loads)
        in_flight: dict[int, int] = {}
        queued: dict[int, int] = {}
        for _, loads in self._loads.values():
            for name, calls, tokens in loads:
                in_flight[name] = in_flight.get(name, 0) + calls
                queued[name] = queued.get(name, 0) + tokens
        for deployment in self._fleet:
            name = _name(deployment)
            calls = in_flight.get(name, 0)
            deployment.estimate.set_peer_load(PeerLoad(calls, queued[name]) if calls else NO_PEER_LOAD)


class ReplicaSync:
    """Run as a task beside the gateway."""

    def __init__(self, peers: PeerReports, notices: PeerMessages) -> None:
        self._peers = peers
        self._notices = notices
        self._after = ""
        self._unsent = b""  # what the storage did not take; twice does no harm
        self._storage_is_down = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(RETRY_SECONDS if self._storage_is_down else EXCHANGE_SECONDS)
            await self.exchange()

    async def exchange(self) -> None:
        """Once; more than once where much was told meanwhile."""
        loop = asyncio.get_running_loop()
        more = True
        while more:
            self._unsent = self._unsent or self._peers.make_notice(loop.time())
            try:
                heard, self._after = await self._notices.publish_and_read(self._unsent, self._after)
            except StorageUnavailable as error:
                if not self._storage_is_down:
                    log.warning("other gateways are not heard of: %s", error.message)
                self._storage_is_down, heard = True, []
            else:
                if self._storage_is_down:
                    log.warning("other gateways are heard of again")
                self._storage_is_down, self._unsent = False, b""
            for one in heard:  # a notice is work for a millisecond or so
                self._peers.receive(one, loop.time())
                await asyncio.sleep(0)
            more = len(heard) == PEER_MESSAGES_PER_READ
        self._peers.expire_silent(loop.time())


def _load(deployment: DeploymentState, now: float) -> _Load:
    """This gateway's own."""
    queued = deployment.estimate.queued_tokens(now) - deployment.estimate.peers.queued_tokens
    return _name(deployment), deployment.in_flight, round(queued)


def _outbox(sent: SentCall) -> _Call:
    note = sent.prompt
    chain = tuple(note.chain)
    where = _name(sent.deployment)
    return _Call(where, chain, note.prompt_tokens, sent.session, sent.may_be_held, sent.usage, sent.cache_slot)


def _enter(call: _Call, deployment: DeploymentState, now: float) -> None:
    """As if it had been sent from here, and had been answered."""
    chain = call.fingerprint
    prediction = deployment.cache.predict(chain)
    if deployment.cache_slots is None:
        deployment.cache.add(chain)
    elif call.slot is not None:
        deployment.cache_slots.put(call.slot, chain)
    conversation = deployment.working_set.begin(call, deployment.estimate, now, prediction.remembered)
    if conversation is not None:
        deployment.working_set.end(conversation, now)
    if call.usage is not None:
        call_id, input_tokens, cached_tokens, output_tokens = call.usage
        deployment.token_calibration.learn(chain, prediction.matched, input_tokens, cached_tokens, output_tokens)
        if deployment.blocks is not None:
            text_bytes = text_bytes_of(chain, call.prompt_tokens_estimate)
            deployment.blocks.call_finished(
                FinishedCall(call_id, chain, text_bytes, input_tokens, cached_tokens, output_tokens)
            )


def _name(deployment: DeploymentState) -> int:
    """Equal where gateways mean the same server: their policies may differ while one is rolled out."""
    config = deployment.config
    return _digest(config.name, config.base_url, config.model)


@lru_cache(maxsize=4096)
def _digest(*names: str) -> int:
    return xxhash.xxh3_64_intdigest("\n".join(names).encode())
