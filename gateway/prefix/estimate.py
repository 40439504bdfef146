"""What is expected of one server: which prompts are warm there, what it has yet to prefill, and how fast it does so.

Everything is told `now` in seconds and asks no clock, so that the simulator runs this very code in virtual time.
Tokens are the fingerprint's: estimates by the length of text. Replies give the factor to the engine's own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from gateway.prefix.cache_model import CacheModel, CachePrediction
from gateway.prefix.fingerprint import BLOCK_TOKENS

RATE_WEIGHT = 0.2  # of the newest observation in the learned prefill speed
RATE_MIN_TOKENS = 64  # shorter prefills tell more about the network than about the server
SCALE_WEIGHT = 0.05  # of the newest prompt in the learned tokens per estimated token
GAP_WEIGHT = 0.1  # of the newest gap in the mean time from one call to the next
EVICTED_HIT_WEIGHT = 0.1  # of the newest reply in `evicted_share_held`
MISPREDICTED_SHARE = 0.1  # of a prediction that may be missing without meaning that anything was evicted
MISPREDICTED_BLOCKS = 2
LOAD_VALID_SECONDS = 15.0  # after which a reported load says nothing any more


class ReportedLoad(NamedTuple):
    """What a server has said about itself, all its clients together. `at` is in event-loop seconds."""

    at: float
    running: int
    waiting: int
    kv_usage: float = 0.0  # share of its KV blocks in use


class PeerLoad(NamedTuple):
    """What other gateways have under way at a server, as they last told."""

    in_flight: int
    queued_tokens: int


NO_PEER_LOAD = PeerLoad(0, 0)


class InFlightPrompt(msgspec.Struct, eq=False, kw_only=True):
    """One prompt at one server, until its end."""

    chain: Sequence[int]
    prompt_tokens: int
    prediction: CachePrediction
    uncached_tokens: int  # tokens to be computed, as was believed when it went
    clock: int  # of the cache model, when it was added there
    concurrent_from_clock: int  # what was added at this clock or later was being computed when this was sent
    streams: bool
    on_prefilled: list[Callable[[], None]] = []  # called once, also if it fails
    prefill_seconds: float = 0.0  # known from its first chunk on


class Estimate:
    """Of one server. Owned by the event loop, changed without locks."""

    def __init__(self, cache_tokens: int, prefill_tokens_per_second: float, cache: CacheModel | None = None) -> None:
        self.cache = CacheModel(cache_tokens) if cache is None else cache
        self.prefill_tokens_per_second = prefill_tokens_per_second
        self.speed_is_known = False  # else it is a first guess
        self.prefill_tokens_queued = 0  # sent, and not yet answered by a first chunk
        self.tokens_scale = 1.0  # the engine's tokens per estimated token
        self.reports_cached = False  # whether it has ever said that tokens came from its cache
        self.evicted_hit_share = 0.5  # of what should have been evicted, how much turned out to be there
        self.load: ReportedLoad | None = None
        self.peers = NO_PEER_LOAD
        self.calls_sent = 0  # calls, ever
        self.in_flight = 0  # calls that were sent and are not answered to the end
        self.prompt_tokens_in_flight = 0  # of these calls
        self.engine_tokens: int | None = None  # that its cache holds, where it has told
        self._busy: set[int] = set()  # when, by the cache model's clock, the calls in flight were sent
        self._prefills: dict[InFlightPrompt, None] = {}  # in the order in which they were sent
        self._prefilling_since = 0.0  # when the first of them could begin
        self._no_peer_prefills_since = True  # as far as others have told: else it has been computing theirs, too
        self.last_sent_at = -math.inf  # the newest call
        self._mean_gap_seconds = 0.0  # from one call to the next, by mean
        self._removals = 0  # of the cache model, when what is missing was last looked at

    def expected_cached_tokens(self, prediction: CachePrediction) -> float:
        """How many tokens of a prompt's beginning are expected to be found, evicted ones by their probability."""
        matched, remembered = prediction.matched, prediction.remembered
        return (matched + self.evicted_hit_share * (remembered - matched)) * BLOCK_TOKENS

    def predict_cache(self, chain: Sequence[int], present_tokens: int, now: float) -> CachePrediction:
        """What its cache will have of a prompt when its turn comes. `present_tokens`, of the engine's own, are in the
        cache now; what was sent before needs room, and what was used longest ago makes it."""
        coming = self._incoming_blocks(0.0, present_tokens, now)
        return self.cache.predict_cache(chain, coming, self._busy) if coming else self.cache.predict(chain)

    def eviction_loss_tokens(self, computed_tokens: float, present_tokens: int, now: float) -> float:
        """What computing so many tokens there costs others: what it drives out, as far as that is wanted again."""
        before = self._incoming_blocks(0.0, present_tokens, now)
        victims = self._incoming_blocks(computed_tokens, present_tokens, now) - before
        if victims <= 0:
            return 0.0
        # Where nobody asks, nothing ages by being used: what idles grows old at the pace at which it was asked before.
        idle_uses = (now - self.last_sent_at) / self._mean_gap_seconds if self._mean_gap_seconds > 0 else 0.0
        return self.cache.eviction_loss(before, victims, self._busy, idle_uses) * BLOCK_TOKENS

    def _incoming_blocks(self, tokens: float, present_tokens: int, now: float) -> int:
        """How many blocks have to make way for what was sent, and for so many tokens behind it."""
        if self.engine_tokens is None:
            return 0
        room = (self.engine_tokens - present_tokens) / self.tokens_scale
        return max(0, math.ceil((tokens + self.queued_tokens(now) - room) / BLOCK_TOKENS))

    def _recount_uncached(self) -> None:
        """What was evicted of prompts that wait for their turn is to be computed as well."""
        self._removals = self.cache.removals
        for sent in self._prefills:
            missing = sent.prompt_tokens - self.cache.match(sent.chain) * BLOCK_TOKENS
            if missing > sent.uncached_tokens:
                self.prefill_tokens_queued += missing - sent.uncached_tokens
                sent.uncached_tokens = missing

    def total_in_flight(self, now: float) -> int:
        """Calls that it works on; those of others, too, where it has told of its load lately."""
        load, known = self.load, self.in_flight + self.peers.in_flight
        if load is None or now - load.at > LOAD_VALID_SECONDS:
            return known
        return max(known, load.running + load.waiting)

    def begin(
        self,
        chain: Sequence[int],
        prompt_tokens: int,
        now: float,
        *,
        streams: bool = True,
        prediction: CachePrediction | None = None,
    ) -> InFlightPrompt:
        """A prompt is sent. It counts as cached at once: what comes meanwhile with the same prefix follows it.
        `believed`: what the cache model says of it now, where that has been asked already."""
        cache, prefills = self.cache, self._prefills
        if prediction is None:
            prediction = cache.predict(chain)
        cache.add(chain, prediction)
        if prefills:
            concurrent_from_clock = next(iter(prefills)).clock
        else:
            concurrent_from_clock, self._prefilling_since = cache.clock, now
            self._no_peer_prefills_since = not self.peers.queued_tokens
        missing = prompt_tokens - prediction.matched * BLOCK_TOKENS
        sent = InFlightPrompt(
            chain=chain,
            prompt_tokens=prompt_tokens,
            prediction=prediction,
            uncached_tokens=missing if missing > 0 else 0,
            clock=cache.clock,
            concurrent_from_clock=concurrent_from_clock,
            streams=streams,
        )
        prefills[sent] = None
        self._busy.add(sent.clock)
        self.prefill_tokens_queued += sent.uncached_tokens
        gap_seconds = now - self.last_sent_at
        self.last_sent_at = now
        if gap_seconds < math.inf:
            self._mean_gap_seconds += GAP_WEIGHT * (gap_seconds - self._mean_gap_seconds)
        self.calls_sent += 1
        self.in_flight += 1
        self.prompt_tokens_in_flight += prompt_tokens
        return sent

    def first_chunk(self, sent: InFlightPrompt, now: float) -> None:
        """Its prompt has been computed. Of calls that do not stream, nobody learns when."""
        if sent not in self._prefills:
            return
        alone = self._no_peer_prefills_since or not self.speed_is_known
        if sent.streams and alone and sent is next(iter(self._prefills)):
            sent.prefill_seconds = now - self._prefilling_since
            if not self.reports_cached:
                self.learn_prefill(sent.uncached_tokens, sent.prefill_seconds)
        self._leave(sent, now)

    def end(self, sent: InFlightPrompt, now: float, *, answered: bool = True) -> None:
        """Its answer is over, or will not come: then nobody knows whether its prompt was computed."""
        if sent in self._prefills:
            self._leave(sent, now)
        self.in_flight -= 1
        self.prompt_tokens_in_flight -= sent.prompt_tokens
        self._busy.discard(sent.clock)
        if answered:
            self.cache.touch(sent.chain)  # engines give blocks up when the last call that uses them is over
        else:
            self.cache.remove(sent.chain[: sent.prediction.matched + 1])

    def _leave(self, sent: InFlightPrompt, now: float) -> None:
        del self._prefills[sent]
        self.prefill_tokens_queued -= sent.uncached_tokens
        self._prefilling_since = now
        self._no_peer_prefills_since = not self.peers.queued_tokens
        if sent.on_prefilled:
            for tell in sent.on_prefilled:
                tell()

    def queued_tokens(self, now: float) -> float:
        """What it has yet to prefill, given what it must have done since it was last heard of."""
        first = next(iter(self._prefills), None)
        if first is None:
            return self.peers.queued_tokens
        if self._removals != self.cache.removals:
            self._recount_uncached()
        done = (now - self._prefilling_since) * self.prefill_tokens_per_second
        return self.peers.queued_tokens + self.prefill_tokens_queued - min(done, first.uncached_tokens)

    def find_shared_prefill(self, chain: Sequence[int], at_least_tokens: float = 0.0) -> InFlightPrompt | None:
        """The prompt that is being computed and shares the most with this one, if it shares what was missing then. Only
        of those of which as much was missing."""
        best: InFlightPrompt | None = None
        longest = 0
        for sent in self._prefills:
            if sent.uncached_tokens < at_least_tokens:
                continue
            shared = shared_blocks(sent.chain, chain)
            if shared > max(longest, sent.prediction.matched):
                best, longest = sent, shared
        return best

    def learn_prefill(self, computed_tokens: int, seconds: float) -> None:
        """`computed_tokens` took it `seconds`."""
        if computed_tokens >= RATE_MIN_TOKENS and seconds > 0:
            observed = computed_tokens / seconds
            self.speed_is_known = True
            self.prefill_tokens_per_second += RATE_WEIGHT * (observed - self.prefill_tokens_per_second)

    def learn_cached(
        self, sent: InFlightPrompt, input_tokens: int, cached_tokens: int, *, evictions_reported: bool = False
    ) -> None:
        """A reply said how much of its prompt was cached. Zero is believed of servers that have ever said more.
        `evictions_told`: the engine says itself what is gone, so that nothing has to be concluded."""
        self.reports_cached = self.reports_cached or cached_tokens > 0
        if not self.reports_cached or not sent.chain or not input_tokens:
            return
        self.tokens_scale += SCALE_WEIGHT * (input_tokens / max(1, sent.prompt_tokens) - self.tokens_scale)
        computed = sent.prompt_tokens * (1 - cached_tokens / input_tokens)
        self.learn_prefill(int(computed), sent.prefill_seconds)
        prediction = sent.prediction
        reported = round(cached_tokens / input_tokens * sent.prompt_tokens / BLOCK_TOKENS)
        tolerated = MISPREDICTED_BLOCKS + int(MISPREDICTED_SHARE * prediction.matched)
        if (evicted := prediction.remembered - prediction.matched) > 0:
            held = max(0, min(reported, prediction.remembered) - prediction.matched)
            self.evicted_hit_share += EVICTED_HIT_WEIGHT * (held / evicted - self.evicted_hit_share)
        if evictions_reported:
            return
        if reported < prediction.matched:
            if reported + tolerated >= prediction.matched:
                return
            missing_since = next(used for end, used in prediction.ages if end > reported)
            if missing_since >= sent.concurrent_from_clock:  # it was being computed itself: a miss that tells nothing
                return
        self.cache.learn(prediction, reported)

    def set_peer_load(self, others: PeerLoad) -> None:
        """What other gateways have under way here now."""
        self.peers = others
        if others.queued_tokens:
            self._no_peer_prefills_since = False

    def set_capacity(self, engine_tokens: int, room: float = 1.0) -> None:
        """The engine says how many of its own tokens its cache holds. The model holds `room` times as many."""
        self.engine_tokens = engine_tokens
        self.cache.resize(round(room * engine_tokens / self.tokens_scale))


def shared_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading blocks two chains have in common: by bisection, since a hash stands for all before it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
