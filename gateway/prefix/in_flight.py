"""What a deployment has in flight: a prompt of this gateway, and the loads that its engine and the peers report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from gateway.prefix.cache_runs import CachePrediction, KnownBlocks
from gateway.prefix.prefill_speed import BusyPeriod


class ReportedLoad(NamedTuple):
    """The load that an engine reported, of all its clients together. `at` is in event-loop seconds."""

    at: float
    running: int
    waiting: int
    kv_usage: float = 0.0  # share of the KV blocks in use, 0 to 1


class PeerLoad(msgspec.Struct, frozen=True, gc=False):
    """The load of all peer gateways at a deployment, as they last published it."""

    in_flight: int
    queued_tokens: int


NO_PEER_LOAD = PeerLoad(0, 0)


class InFlightPrompt(msgspec.Struct, eq=False, kw_only=True):
    """One prompt at one deployment, from its sending to its end."""

    chain: Sequence[int]
    prompt_tokens: int
    prediction: CachePrediction
    known: tuple[KnownBlocks, ...]  # of the prompt, as `CacheModel.known_parts` says
    uncached_tokens: int  # to be computed, as predicted when it was sent; raised if cached blocks are evicted
    work: float  # to compute these: as many tokens at the beginning of a prompt take the same time
    pin: int  # of the cache model: the engine evicts nothing of a prompt in flight
    streams: bool
    sent_at: float
    prefilled_by: float = math.inf  # predicted, for a call that does not stream: nothing shows when it is computed
    computed_tokens: float | None = None  # of the prompt, as the response reported
    on_prefilled: list[Callable[[], None]] = []  # each called once, when the prefill ends or fails
    period: BusyPeriod | None = None  # in which it was computed; None before, and once its tokens are accounted for
    first_chunk_at: float = 0.0
    in_flight_seconds: float = 0.0  # the deployment's, at the first chunk
    prefilled_seconds: float = 0.0  # the deployment's, at the first chunk
