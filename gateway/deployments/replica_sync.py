"""Replica sync: gateways on one storage exchange their load, the prompts that were computed, and quarantined requests.

Every `EXCHANGE_SECONDS` a gateway publishes its changes and reads those of its peers. A peer's load counts beside the
own load. A peer's prompts enter the cache models and the working set as own prompts do. So a conversation may pass
through any of the gateways. Prompts are sent as fingerprints, 8 bytes for 256 bytes of text, when their responses are
complete: a prompt that is still being computed must not look cached.

`PeerReports` makes and applies the messages, without input or output. `ReplicaSync` exchanges them through the storage.

No call waits for any of this, and nothing fails without it. The load of a peer that is silent for `SILENT_SECONDS`
expires. Changes that could not be published cost cache hits. All gateways need the same key pepper, from which the
tenants' salts are derived: otherwise their fingerprints do not match.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

import msgspec

from gateway.core.errors import StorageUnavailable
from gateway.core.ids import random_bytes
from gateway.deployments.fleet import Fleet
from gateway.deployments.sent_call import SentCall
from gateway.deployments.state import DeploymentState
from gateway.prefix.events.block_index import FinishedCall
from gateway.prefix.fingerprint import text_bytes_of
from gateway.prefix.in_flight import NO_PEER_LOAD, PeerLoad
from gateway.storage.base import PEER_MESSAGES_PER_READ, PeerMessages

EXCHANGE_SECONDS = 0.1
LOAD_REPEAT_SECONDS = 1.0  # after which an unchanged load is published again
SILENT_SECONDS = 3.0
RETRY_SECONDS = 1.0  # between two exchanges while the storage is unavailable
OUTBOX_MAX_CALLS = 2048  # finished calls that wait to be published; the oldest are dropped
MESSAGE_MAX_BLOCKS = 8192  # of all prompts in one message, or of one prompt: 64 KiB

log = logging.getLogger("warmpath")

_Load = tuple[int, int, int]  # deployment id, calls in flight, tokens queued


class _PeerCall(msgspec.Struct, array_like=True, frozen=True):
    """A finished call on the wire: a `RoutedPrompt`, and the deployment that computed it."""

    deployment: int
    fingerprint: tuple[int, ...]
    prompt_tokens_estimate: int
    session: str | None
    may_be_held: bool
    usage: tuple[str, int, int, int] | None  # call id, input, cached and output tokens
    slot: int | None = None  # the llama.cpp slot, if the deployment has slots
    tenant_name: str = ""  # of a conversation in the working set; else empty
    moved: tuple[int, int, int] | None = None  # from which deployment, how many blocks, and how many of them stay


class _PeerMessage(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """One message, in msgpack. The tag is the version of the format."""

    sender: int
    loads: tuple[_Load, ...]  # of the deployments at which the sender has calls in flight
    calls: tuple[_PeerCall, ...]
    strikes: tuple[tuple[int, int], ...] = ()  # of releases before `crashes`; always empty
    crashes: tuple[tuple[int, int], ...] = ()  # pairs of request fingerprint and deployment id; 0: it succeeded


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_PeerMessage).decode


def new_outbox() -> deque[SentCall]:
    """A queue for the finished calls of a fleet that has peers."""
    return deque(maxlen=OUTBOX_MAX_CALLS)


class PeerReports:
    """Makes and applies the messages of one gateway. Uses no event loop: the simulator passes virtual time as `now`."""

    def __init__(self, fleet: Fleet, outbox: deque[SentCall]) -> None:
        """`outbox` receives the fleet's finished calls (see `new_outbox`)."""
        self._fleet = fleet
        self._outbox = outbox
        self._sender = int.from_bytes(random_bytes(8))
        self._last_loads: list[tuple[str, int, int]] = []
        self._sent_at = 0.0
        self._loads: dict[int, tuple[float, tuple[_Load, ...]]] = {}  # by sender: when received, and its loads
        self.calls_received = 0
        self.malformed = 0

    @property
    def live_peers(self) -> int:
        """How many peers have published their load recently."""
        return len(self._loads)

    def make_message(self, now: float) -> bytes:
        """What changed since the last message; empty if nothing did. Call it again while the outbox is not empty."""
        calls: list[_PeerCall] = []
        blocks = 0
        while self._outbox:
            sent = self._outbox[0]
            blocks += len(sent.prompt.chain)
            if blocks > MESSAGE_MAX_BLOCKS and calls:
                break
            self._outbox.popleft()
            if 0 < len(sent.prompt.chain) <= MESSAGE_MAX_BLOCKS:
                calls.append(_peer_call(sent))
        crashes = self._fleet.quarantine.take_updates()
        busy = [deployment for deployment in self._fleet if deployment.in_flight]
        loads = [(deployment.name, deployment.in_flight, deployment.estimate.queue.tokens) for deployment in busy]
        # An unchanged load is repeated only so that it does not expire at the peers.
        nothing_new = not calls and not crashes and loads == self._last_loads
        if nothing_new and not (loads and now - self._sent_at >= LOAD_REPEAT_SECONDS):
            return b""
        self._last_loads, self._sent_at = loads, now
        return _encode(
            _PeerMessage(
                self._sender,
                tuple([_own_load(deployment, now) for deployment in busy]),
                tuple(calls),
                crashes=crashes,
            )
        )

    def receive(self, message: bytes, now: float) -> None:
        """Apply a message, in the order of publication. Ignores own messages and counts malformed ones."""
        try:
            decoded = _decode(message)
        except msgspec.MsgspecError:  # from a release with another format
            self.malformed += 1
            return
        if decoded.sender == self._sender:
            return
        self._loads[decoded.sender] = now, decoded.loads
        self._update_peer_load(now)
        for fingerprint, deployment_id in decoded.crashes:
            self._fleet.quarantine.receive(fingerprint, deployment_id, now)
        self.calls_received += len(decoded.calls)
        deployments = {deployment.shared_id: deployment for deployment in self._fleet} if decoded.calls else {}
        for call in decoded.calls:
            if (deployment := deployments.get(call.deployment)) is not None:
                _apply_call(call, deployment, now)
            if call.moved is not None and (source := deployments.get(call.moved[0])) is not None:
                source.cache.give_up(call.fingerprint[: call.moved[1]], call.moved[2])

    def expire_silent(self, now: float) -> None:
        """Drop the load of peers that have published nothing for `SILENT_SECONDS`."""
        silent = [sender for sender, (at, _) in self._loads.items() if now - at >= SILENT_SECONDS]
        for sender in silent:
            del self._loads[sender]
        if silent:
            self._update_peer_load(now)

    def _update_peer_load(self, now: float) -> None:
        self._fleet.working_set.has_peers = bool(self._loads)
        in_flight: dict[int, int] = {}
        queued: dict[int, int] = {}
        for _, loads in self._loads.values():
            for deployment_id, calls, tokens in loads:
                in_flight[deployment_id] = in_flight.get(deployment_id, 0) + calls
                queued[deployment_id] = queued.get(deployment_id, 0) + tokens
        for deployment in self._fleet:
            deployment_id = deployment.shared_id
            calls = in_flight.get(deployment_id, 0)
            load = PeerLoad(calls, queued[deployment_id]) if calls else NO_PEER_LOAD
            deployment.estimate.set_peer_load(load, now)


class ReplicaSync:
    """Exchanges messages with the peers through the storage. Run it as a task."""

    def __init__(self, peers: PeerReports, messages: PeerMessages) -> None:
        self._peers = peers
        self._messages = messages
        self._after = ""  # the position in the storage's messages up to which they were read
        self._unsent = b""  # a message whose publication failed; publishing it twice does no harm
        self._storage_is_down = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(RETRY_SECONDS if self._storage_is_down else EXCHANGE_SECONDS)
            await self.exchange()

    async def exchange(self) -> None:
        """Publish and read once; again while there are more messages to read."""
        loop = asyncio.get_running_loop()
        more = True
        while more:
            self._unsent = self._unsent or self._peers.make_message(loop.time())
            try:
                received, self._after = await self._messages.publish_and_read(self._unsent, self._after)
            except StorageUnavailable as error:
                if not self._storage_is_down:
                    log.warning("replica sync paused: %s", error.message)
                self._storage_is_down, received = True, []
            else:
                if self._storage_is_down:
                    log.warning("replica sync resumed")
                self._storage_is_down, self._unsent = False, b""
            for message in received:  # each takes about a millisecond, so the event loop gets a turn in between
                self._peers.receive(message, loop.time())
                await asyncio.sleep(0)
            more = len(received) == PEER_MESSAGES_PER_READ
        self._peers.expire_silent(loop.time())


def _own_load(deployment: DeploymentState, now: float) -> _Load:
    """This gateway's own load at a deployment, without its peers'."""
    queued = deployment.estimate.queued_tokens(now) - deployment.estimate.peers.queued_tokens
    return deployment.shared_id, deployment.in_flight, round(queued)


def _peer_call(sent: SentCall) -> _PeerCall:
    prompt = sent.prompt
    chain = tuple(prompt.chain)
    deployment_id = sent.deployment.shared_id
    moved = None if sent.moved is None else (sent.moved.source.shared_id, sent.moved.matched, sent.moved.kept)
    return _PeerCall(
        deployment_id, chain, prompt.prompt_tokens, sent.session, sent.may_be_held, sent.usage, sent.cache_slot,
        sent.tenant_name, moved,
    )  # fmt: skip


def _apply_call(call: _PeerCall, deployment: DeploymentState, now: float) -> None:
    """Apply a peer's call as if this gateway had sent it and received its response."""
    chain = call.fingerprint
    prediction = deployment.cache.predict(chain)
    deployment.estimate.note_use(chain, prediction)
    if deployment.cache_slots is None:
        deployment.cache.add(chain)
        deployment.cache.touch(chain)  # the call has ended, so its blocks are computed
    elif call.slot is not None:
        deployment.cache_slots.record(call.slot, chain)
    conversation = deployment.working_set.begin(call, deployment.estimate, now, prediction)
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
