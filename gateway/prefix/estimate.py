"""Estimates for one deployment: which prefixes are cached, how many tokens are queued, and how fast it computes them.

`begin`, `first_chunk` and `end` follow each prompt; `learn_cached` applies what its response reported. From these, an
`Estimate` answers the router's questions (`gateway/routing/prefix_affinity.py` has the cost formula):

    expected_cached_tokens   of a prompt, at the moment of the prediction
    queued_tokens            that are still to be computed, of all prompts without a first chunk yet
                             (`queued_prompts.py`) + the peers' queued tokens
    queued_work              what it takes to compute these (`prefill_speed.py` says what work is)
    eviction_loss            work to compute again what a prompt evicts and other calls will need
    prefill_tokens_per_second  the learned speed (`prefill_speed.py`)
    busy_time                share of the time in which prompts were computed, and how many waited (`busy_time.py`)

Token counts are in fingerprint tokens (text bytes / 4), unless a name says engine tokens. `tokens_scale` is the learned
factor between the two: engine tokens per fingerprint token. Learned values are exponential averages; the `*_WEIGHT`
constants are the weights of the newest sample.

Every method gets `now` in seconds and reads no clock, so that the simulator runs this very code in virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.prefix.busy_time import BusyTime
from gateway.prefix.cache_model import CacheModel
from gateway.prefix.cache_runs import CachePrediction
from gateway.prefix.decode_speed import DecodeSpeed
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.fleet_traffic import FleetTraffic
from gateway.prefix.in_flight import NO_PEER_LOAD, InFlightPrompt, PeerLoad, ReportedLoad
from gateway.prefix.inferred_hits import InferredHits
from gateway.prefix.prefill_share import PrefillShare
from gateway.prefix.prefill_speed import PrefillSpeed
from gateway.prefix.queued_prompts import QueuedPrompts

PREFILL_SHARE_MAX = 0.9  # of an answer's time that other prompts may have taken
SCALE_WEIGHT = 0.05  # of the newest prompt, in `tokens_scale`
MEAN_WEIGHT = 0.05  # of the newest prompt, in the means of lengths and work
PAUSE_GAPS = 2.0  # between two calls, on average: a longer pause shows that fewer calls arrive
GAP_WEIGHT = 0.1  # of the newest gap, in the mean time between two calls
EVICTED_HIT_WEIGHT = 0.1  # of the newest response, in `evicted_hit_share`
MISPREDICTED_SHARE = 0.1  # of the predicted blocks: fewer missing ones do not mean that anything was evicted
MISPREDICTED_BLOCKS = 2  # tolerated in addition to that share
LOAD_VALID_SECONDS = 15.0  # after which a reported load is ignored


class Estimate:
    """What is known and predicted about one deployment. Owned by the event loop; needs no locks."""

    def __init__(
        self,
        cache_tokens: int,
        prefill_tokens_per_second: float,
        cache: CacheModel | None = None,
        traffic: FleetTraffic | None = None,
    ) -> None:
        """`cache_tokens` and `prefill_tokens_per_second` are the policy's first guesses.

        `cache` replaces the usual cache model (`CacheSlots`). `traffic` is what all deployments of a fleet share.
        """
        self.cache = CacheModel(cache_tokens) if cache is None else cache
        self.speed = PrefillSpeed(prefill_tokens_per_second)
        self.decode = DecodeSpeed()  # equal deployments share one
        self._inferred_hits = InferredHits()
        self.traffic = traffic or FleetTraffic()
        self.queue = QueuedPrompts(self.speed, self.cache)
        self.tokens_scale = 1.0  # engine tokens per fingerprint token
        self.reports_cached = False  # whether a response ever reported cached tokens
        self.evicted_hit_share = 0.5  # of blocks that the model had evicted, the share that responses found cached
        self.load: ReportedLoad | None = None
        self.peers = NO_PEER_LOAD
        self.calls_sent = 0  # in total
        self.in_flight = 0  # this gateway's calls that were sent and have not ended
        self.prompt_tokens_in_flight = 0  # of those calls
        self.waiting_for_prefix = 0  # calls that will be sent here once a prefix is computed that they share
        self.capacity_engine_tokens: int | None = None  # of the engine's cache, if the engine reports it
        self._reported_capacity_tokens: int | None = None  # the same, when it was reported last
        self._alone: InFlightPrompt | None = None  # in flight, and no other one has been since it was sent
        self._prefill_share = PrefillShare()
        self._peers_seen_at = -math.inf  # until when peers had calls in flight
        self._busy_time = BusyTime()
        self._in_flight_seconds = 0.0  # the integral of `in_flight` until `_in_flight_changed_at`
        self._in_flight_changed_at = 0.0
        self._prefilled_seconds = 0.0  # spent on prompts so far, by the learned speed
        # About how long any prompt would wait here, and be slowed down: a quick look, to compare many deployments by.
        self.standing_seconds = 0.0
        self.pressure = 0.0  # of this deployment alone, as `FleetTraffic.pressure` computed it last
        self.most_calls = 0.0  # that were there at once lately, likewise
        self.last_sent_at = -math.inf
        self.mean_work = float(BLOCK_TOKENS)  # of a prompt
        self.mean_prompt_tokens = float(BLOCK_TOKENS)
        self._mean_gap_seconds = 0.0  # between two calls

    @property
    def prefill_tokens_per_second(self) -> float:
        """The learned speed; the policy's guess until something was measured."""
        return self.speed.tokens_per_second

    @property
    def capacity_tokens(self) -> int:
        """The capacity of the engine's cache, as it was reported or learned. The cache model may have more room."""
        reported = self._reported_capacity_tokens
        return self.cache.capacity_tokens if reported is None else reported

    def busy_time(self, now: float) -> BusyTime:
        """How busy the deployment is with prompts, up to now."""
        if now >= self.queue.unstreamed_due:
            self._finish_unstreamed(now)
        self._note_busy_time(now)
        return self._busy_time

    def _note_busy_time(self, now: float) -> None:
        """Call it before the prompts that are queued here change."""
        prompts: float = len(self.queue.prompts)
        if self.peers.queued_tokens:  # the number of their prompts is not known
            prompts += max(1.0, self.peers.queued_tokens / max(self.mean_work, BLOCK_TOKENS))
        self._busy_time.note(now, prompts, self.in_flight + self.peers.in_flight)

    def pace(self, now: float) -> float:
        """How often calls arrive now, compared with their mean: below 1 after a pause that is long for this deployment.

        So it counts as idle soon after its calls have ended.
        """
        gaps_seconds = PAUSE_GAPS * self._mean_gap_seconds
        pause_seconds = now - max(self.last_sent_at, self.queue.began_at, self._peers_seen_at)
        if self.in_flight or self.peers.in_flight or not self.calls_sent or pause_seconds <= gaps_seconds:
            return 1.0
        return gaps_seconds / pause_seconds

    def _note_in_flight(self, now: float) -> None:
        """Call it before the number of calls in flight changes."""
        self._in_flight_seconds += self.in_flight * (now - self._in_flight_changed_at)
        self._in_flight_changed_at = now

    def expected_cached_tokens(self, prediction: CachePrediction) -> float:
        """How many of the prompt's tokens are expected to be cached.

        (matched + evicted_hit_share * (remembered - matched)) * BLOCK_TOKENS
        """
        matched, remembered = prediction.matched, prediction.remembered
        return (matched + self.evicted_hit_share * (remembered - matched)) * BLOCK_TOKENS

    def predict_cache(self, chain: Sequence[int], present_tokens: int, now: float) -> CachePrediction:
        """What the cache will hold of a prompt when its prefill begins.

        `present_tokens` engine tokens are cached now, as KV events report. If the queued prompts need more space than
        is free, the least recently used blocks are predicted to be evicted.
        """
        evictions = self._blocks_to_evict(0.0, present_tokens, now)
        return self.cache.predict_after(chain, evictions) if evictions else self.cache.predict(chain)

    def eviction_loss(self, computed_tokens: float, present_tokens: int | None, now: float) -> float:
        """The work that other calls will have to do again if `computed_tokens` are computed here.

        The blocks that these evict, beyond those that the queued prompts evict, weighted by how likely they are used
        again (`reuse.py`). `present_tokens` engine tokens are cached now, as KV events report; None without events:
        then the cache model says what is cached.
        """
        cache = self.cache
        if present_tokens is None:
            excess_blocks = cache.cached_blocks - cache.capacity  # the model holds the queued prompts already
            queued_evictions = max(0, excess_blocks)
            own_evictions = excess_blocks + math.ceil(computed_tokens / BLOCK_TOKENS) - queued_evictions
        else:
            queued_evictions = self._blocks_to_evict(0.0, present_tokens, now)
            own_evictions = self._blocks_to_evict(computed_tokens, present_tokens, now) - queued_evictions
        if own_evictions <= 0:
            return 0.0
        # Blocks age by uses, so an idle deployment's blocks would never age. They age at the former rate of its calls.
        idle_uses = (now - self.last_sent_at) / self._mean_gap_seconds if self._mean_gap_seconds > 0 else 0.0
        lost_blocks = cache.eviction_loss(queued_evictions, own_evictions, self.traffic.reuse.share, idle_uses)
        # It is not known where in their prompts they are.
        return lost_blocks * BLOCK_TOKENS * (1 + self.speed.fitted_attention * self.mean_prompt_tokens / 2)

    def _blocks_to_evict(self, tokens: float, present_tokens: int, now: float) -> int:
        """How many blocks the engine has to evict for the queued prompts and `tokens` more.

        0 if its capacity is unknown.

            ceil((tokens + queued_tokens - free engine tokens / tokens_scale) / BLOCK_TOKENS), at least 0
        """
        if self.capacity_engine_tokens is None:
            return 0
        room = (self.capacity_engine_tokens - present_tokens) / self.tokens_scale
        return max(0, math.ceil((tokens + self.queued_tokens(now) - room) / BLOCK_TOKENS))

    def total_in_flight(self, now: float) -> int:
        """Calls at the deployment, of this gateway and its peers.

        The engine's own count, if that is recent and larger.
        """
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
        """A prompt is sent. It counts as cached at once, so that calls with the same prefix are routed here, too.

        `prediction` is the cache model's prediction for the prompt, if it was made already.
        """
        cache, queue = self.cache, self.queue
        if now >= queue.unstreamed_due:
            self._finish_unstreamed(now)
        if prediction is None:
            prediction = cache.predict(chain)
        known = cache.known_parts(prediction)
        self.note_use(chain, prediction)
        cache.add(chain, prediction)
        self._note_in_flight(now)
        self._note_busy_time(now)
        if not queue.prompts:
            queue.began_at = now
        self.speed.sent(now, usable=streams, shared=self.peers.queued_tokens > 0)
        uncached_tokens = prompt_tokens - prediction.matched * BLOCK_TOKENS
        if uncached_tokens < 0:
            uncached_tokens = 0
        speed = self.speed.fitted()
        work = uncached_tokens * (1 + speed.fitted_attention * (prompt_tokens - uncached_tokens / 2))  # `work_of`
        prompt = InFlightPrompt(
            chain=chain,
            prompt_tokens=prompt_tokens,
            prediction=prediction,
            known=known,
            uncached_tokens=uncached_tokens,
            work=work,
            pin=cache.pin(chain),
            streams=streams,
            sent_at=now,
        )
        if not streams:
            queued_seconds = self.queued_seconds(self.queued_work(now) if queue.prompts else self.peers.queued_tokens)
            own_seconds = self._prefill_share.prefill_seconds(work, speed.fitted_tokens_per_second)
            prompt.prefilled_by = now + queued_seconds + own_seconds + speed.fitted_overhead_seconds
        queue.add(prompt)
        self.mean_work += MEAN_WEIGHT * (work - self.mean_work)
        self.mean_prompt_tokens += MEAN_WEIGHT * (prompt_tokens - self.mean_prompt_tokens)
        gap_seconds = now - self.last_sent_at
        self.last_sent_at = now
        if gap_seconds < math.inf:
            self._mean_gap_seconds += GAP_WEIGHT * (gap_seconds - self._mean_gap_seconds)
        self.calls_sent += 1
        self._alone = None if self.in_flight or self.peers.in_flight else prompt
        self.in_flight += 1
        self.prompt_tokens_in_flight += prompt_tokens
        self._note_standing()
        return prompt

    def note_use(self, chain: Sequence[int], prediction: CachePrediction) -> None:
        """A call with this prompt was sent here, by this gateway or a peer."""
        self.traffic.reuse.note_call(len(chain), prediction.reused)
        self.traffic.note_call(chain, self)

    def expect_cached(self, prompt: InFlightPrompt, cached_tokens: int) -> None:
        """So many tokens of a prompt that was just sent will be loaded from another deployment, if it lacks them.

        The time of its prefill then includes the transfer, and tells nothing about the speed.
        """
        uncached_tokens = max(0, prompt.prompt_tokens - cached_tokens)
        if uncached_tokens < prompt.uncached_tokens:
            self.queue.set_uncached(prompt, uncached_tokens)
            self._note_standing()
        self.speed.spoil()
        self._alone = None

    def first_chunk(self, prompt: InFlightPrompt, now: float) -> None:
        """The prompt has been computed. Without streaming, the time of its prefill remains unknown."""
        if prompt not in self.queue.prompts:
            return
        self._finish_prefill(prompt, now)
        self._note_in_flight(now)
        speed = self.speed.fitted()
        self._prefilled_seconds += prompt.work / speed.fitted_tokens_per_second + speed.fitted_overhead_seconds
        prompt.first_chunk_at, prompt.in_flight_seconds = now, self._in_flight_seconds
        prompt.prefilled_seconds = self._prefilled_seconds
        period = prompt.period = self.speed.first_chunk(
            now, idle=not self.queue.prompts, usable=not self.queue.unstreamed, shared=self.peers.queued_tokens > 0
        )
        if period is not None and not self.reports_cached:
            self._inferred_hits.note(prompt, period, self.speed, self.cache)
            # What the cache model predicts to be cached may be gone. What it never saw was computed.
            self._account(prompt, None if prompt.prediction.remembered else prompt.prompt_tokens)

    def _account(self, prompt: InFlightPrompt, computed_tokens: float | None) -> None:
        """So many of the prompt's tokens were computed; None if that is unknown."""
        period, prompt.period = prompt.period, None
        if period is not None:
            self.speed.account(period, prompt.prompt_tokens, computed_tokens)

    def end(self, prompt: InFlightPrompt, now: float, *, answered: bool = True, output_tokens: int = 0) -> None:
        """The response is complete, with so many tokens, if they are known; or will not arrive (`answered=False`).

        Then the prompt may not have been computed.
        """
        self._note_in_flight(now)
        if now >= self.queue.unstreamed_due:
            self._finish_unstreamed(now)
        if prompt in self.queue.prompts:
            self._finish_prefill(prompt, now)
            self.speed.spoil()
            if not self.queue.prompts:
                self.speed.idle()
        elif answered and output_tokens and prompt.streams:
            seconds = now - prompt.first_chunk_at
            in_flight = (self._in_flight_seconds - prompt.in_flight_seconds) / seconds if seconds > 0 else 1.0
            # Prompts that were computed meanwhile delayed the answer, too, but not because it was in their batch.
            prefills_seconds = min(self._prefilled_seconds - prompt.prefilled_seconds, PREFILL_SHARE_MAX * seconds)
            self.decode.learn(output_tokens, seconds - prefills_seconds, in_flight - 1)
        if not prompt.streams and answered and output_tokens and prompt is self._alone:
            computed_tokens = prompt.uncached_tokens if prompt.computed_tokens is None else prompt.computed_tokens
            work = self.speed.work(prompt.prompt_tokens - computed_tokens, prompt.prompt_tokens)
            self._prefill_share.learn(work, output_tokens, now - prompt.sent_at)
        self._account(prompt, None)
        self.in_flight -= 1
        self.prompt_tokens_in_flight -= prompt.prompt_tokens
        self._note_standing()
        self.cache.unpin(prompt.pin)
        if answered:
            self.cache.touch(prompt.chain)  # engines free blocks, for eviction, when the last call that uses them ends
        else:
            self.cache.remove(prompt.chain[: prompt.prediction.matched + 1])

    def _finish_unstreamed(self, now: float) -> None:
        """Calls that do not stream: count those prompts as computed that are predicted to be."""
        for prompt in self.queue.take_due(now):
            self._finish_prefill(prompt, max(prompt.prefilled_by, self._busy_time.noted_at))
            self.speed.spoil()
            if not self.queue.prompts:
                self.speed.idle()

    def _finish_prefill(self, prompt: InFlightPrompt, now: float) -> None:
        self._note_busy_time(now)
        self.queue.remove(prompt, now)
        self._note_standing()
        if prompt.on_prefilled:
            for callback in prompt.on_prefilled:
                callback()

    def queued_seconds(self, queued_work: float) -> float:
        """How long a prompt that is sent now waits for the prompts before it, which are so much work."""
        speed = self.speed.fitted()
        return queued_work / speed.fitted_tokens_per_second + len(self.queue.prompts) * speed.fitted_overhead_seconds

    def _note_standing(self) -> None:
        """Call it after the queued prompts or the calls in flight have changed."""
        decode, peers, speed = self.decode, self.peers, self.speed
        # Without a call for what is read at each change: `decode.slowdown_of` and `speed.tokens_per_second`.
        slowdown_seconds = decode.mean_output_tokens * decode.slowdown_seconds * (self.in_flight + peers.in_flight)
        rate = speed.fitted_tokens_per_second if speed.is_fitted else speed.tokens_per_second
        self.standing_seconds = (self.queue.work + peers.queued_tokens) / rate + slowdown_seconds

    def queued_tokens(self, now: float) -> float:
        """Uncached tokens that the deployment has still to compute, of this gateway's and its peers' prompts."""
        if now >= self.queue.unstreamed_due:
            self._finish_unstreamed(now)
        return self.peers.queued_tokens + self.queue.tokens_left(now)

    def queued_work(self, now: float) -> float:
        """What it takes to compute the queued tokens, as a number of tokens at the beginning of a prompt.

        Peers only tell the number of theirs.
        """
        if now >= self.queue.unstreamed_due:
            self._finish_unstreamed(now)
        return self.peers.queued_tokens + self.queue.work_left(now)

    def learn_cached(
        self, prompt: InFlightPrompt, input_tokens: int, cached_tokens: int, *, evictions_reported: bool = False
    ) -> None:
        """A response reported its prompt's tokens and how many of them were cached, in engine tokens.

        Zero cached tokens count only if the deployment has ever reported more. `evictions_reported`: the engine reports
        evictions itself, so none need be concluded from this.
        """
        self.reports_cached = self.reports_cached or cached_tokens > 0
        if not self.reports_cached or not input_tokens:
            return
        prompt.computed_tokens = prompt.prompt_tokens * max(0.0, 1 - cached_tokens / input_tokens)
        self._account(prompt, prompt.computed_tokens)
        if not prompt.chain:
            return
        self.tokens_scale += SCALE_WEIGHT * (input_tokens / max(1, prompt.prompt_tokens) - self.tokens_scale)
        prediction = prompt.prediction
        reported_blocks = round(cached_tokens / input_tokens * prompt.prompt_tokens / BLOCK_TOKENS)
        tolerated_blocks = MISPREDICTED_BLOCKS + int(MISPREDICTED_SHARE * prediction.matched)
        if (evicted_blocks := prediction.remembered - prediction.matched) > 0:
            found_blocks = max(0, min(reported_blocks, prediction.remembered) - prediction.matched)
            self.evicted_hit_share += EVICTED_HIT_WEIGHT * (found_blocks / evicted_blocks - self.evicted_hit_share)
        if evictions_reported:
            return
        if reported_blocks < prediction.matched <= reported_blocks + tolerated_blocks:
            reported_blocks = prediction.matched
        self.cache.learn_cached(prediction, reported_blocks, prompt.known)

    def set_peer_load(self, peer_load: PeerLoad, now: float) -> None:
        """Set what the peers have in flight here now."""
        self._note_busy_time(now)
        if self.peers.in_flight or self.peers.queued_tokens:
            self._peers_seen_at = now
        self.peers = peer_load
        self._note_standing()
        if peer_load.queued_tokens:
            self.speed.share()

    def set_capacity(self, engine_tokens: int, room: float = 1.0) -> None:
        """The engine reported its cache's capacity in engine tokens. The cache model gets `room` times as many."""
        self.capacity_engine_tokens = engine_tokens
        self._reported_capacity_tokens = round(engine_tokens / self.tokens_scale)
        self.cache.resize(round(room * engine_tokens / self.tokens_scale))
