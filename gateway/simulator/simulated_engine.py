"""A model of an engine with continuous batching and a paged prefix cache, as vLLM and the bundled engine have it.

The engine works in steps. A step computes at most `step_tokens_max` tokens: one for each request that decodes, and with
the rest of this budget, chunks of prompts in order of arrival. So several prompts may share a step, and get their first
chunks together. A step takes

    seconds = (step + prefill_token * prompt tokens + prefill_context * sum over them of the tokens before each
                    + decode * decoding requests    + decode_context * sum of their lengths
                    + start * admitted requests     + start_token * sum of their prompts' lengths) / speed

A waiting request is admitted when there are blocks for its whole prompt, behind its longest cached prefix. No request
overtakes another one. Blocks become findable in the step that computes them, blocks of answers included. The last token
of a prompt is computed even if it is cached. Blocks of another engine are in the cache before their request is
submitted (`replay.py`). If blocks run out, the request that arrived last is preempted: it
waits again, and is computed again from what is still cached. `engine_cache.py` has the blocks and their eviction.

As long as nothing changes, all steps are alike, so the model does not go step by step: a *phase* is a number of equal
steps, and ends when a request ends, a prompt is complete, or a request arrives.

Engines on one machine may share its processors (`set_share`). Then phases count the time in which the engine computes,
and `processors_used` is what the engine would use if it had its own: one for the steps, and some for what it sends.

The model leaves out priorities, speculative decoding, and interrupted steps.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence

from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.simulator.engine_cache import BlockTable, EngineCache
from gateway.simulator.engine_steps import EngineEvent, EngineJob, EngineSpeed, Phase

STEPS_MAX = 1 << 30  # without decoding requests, nothing else ends a phase


class SimulatedEngine:
    """One engine. Call `advance` at `next_event_at`, as it is after every `submit` and `advance`."""

    def __init__(
        self, cache: EngineCache, timing: EngineSpeed, *, speed: float = 1.0, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        """`cache` may be shared with other engines. `speed` divides all times."""
        self.cache = cache
        self.timing = timing
        self.speed = speed
        self.block_tokens = block_tokens
        self.next_event_at = math.inf
        self.waiting: list[EngineJob] = []  # this and the next two in order of arrival
        self.prefilling: list[EngineJob] = []
        self.decoding: list[EngineJob] = []
        self.requests = 0  # this and the next three of admitted requests
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.work_seconds = 0.0  # of steps, without what a step costs whatever it computes
        self._phase: Phase | None = None
        self._arrivals = 0
        self._tokens_waiting = 0
        self._closed_until = 0.0  # it is starting until then
        self._share = 1.0
        self._then = self._engine_time_then = 0.0  # when the share changed, in both kinds of time

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def used_share(self) -> float:
        """The share of the blocks that running requests use, as engines report it."""
        return 1 - self.cache.available / self.cache.capacity

    def queued_tokens(self) -> int:
        """Tokens of prompts still to be computed. Those of waiting requests by what was cached when they arrived."""
        return self._tokens_waiting + sum(job.known - job.computed for job in self.prefilling)

    @property
    def prefill_tokens_charged(self) -> int:
        """Tokens of all prompts without a first chunk, whatever has been computed of them already."""
        return self._tokens_waiting + sum(job.prompt_tokens - job.cached_tokens for job in self.prefilling)

    def submit(self, job: EngineJob, now: float) -> None:
        """A request arrives. It takes part from the next step on. Raises `ValueError` if the cache cannot hold it."""
        if job.prompt_tokens + job.left - 1 > self.cache.capacity * self.block_tokens:
            raise ValueError(f"a request of {job.prompt_tokens} prompt tokens does not fit into the cache")
        self._arrivals += 1
        job.arrival, job.submitted_at = self._arrivals, now
        job.uncached_tokens = job.known - self.cache.match(job.chain) * self.block_tokens
        self._tokens_waiting += job.uncached_tokens
        self.waiting.append(job)
        if self._phase is not None:
            self._phase = self._phase.cut(self._engine_time(now))
            self.next_event_at = self._time_of(self._phase.ends)
        else:
            self.next_event_at = max(now, self._closed_until)

    @property
    def processors_used(self) -> float:
        """Processors that it would keep busy now: those of its steps, and of what sends on the chunks."""
        if self._phase is None:
            return 0.0
        chunk_seconds = self.timing.chunk * len(self.decoding)
        return 1.0 + chunk_seconds / self._phase.seconds if chunk_seconds else 1.0

    def set_share(self, share: float, now: float) -> None:
        """From now on the engine has this share of the processor time that it could use. Moves `next_event_at`."""
        if share != self._share:
            self._engine_time_then, self._then, self._share = self._engine_time(now), now, share
            if self._phase is not None:
                self.next_event_at = self._time_of(self._phase.ends)

    def _engine_time(self, now: float) -> float:
        """Seconds of computing, as phases count them."""
        return self._engine_time_then + (now - self._then) * self._share

    def _time_of(self, engine_time: float) -> float:
        return self._then + (engine_time - self._engine_time_then) / self._share

    def restart(self, now: float, seconds: float) -> None:
        """Lose the cache and all progress. Requests are computed again, once the engine has started."""
        for job in [*self.prefilling, *self.decoding]:
            self._preempt(job)
        self._phase = None
        self.cache.clear()
        self._closed_until = now + seconds
        self.next_event_at = self._closed_until if self.waiting else math.inf

    def advance(self, now: float) -> list[EngineEvent]:
        """End the phase that ends now, and begin the next one. Returns what was sent."""
        events: list[EngineEvent] = []
        if self._phase is not None:
            phase, self._phase = self._phase, None
            self._complete(phase, now, events)
        self._phase = self._plan(self._engine_time(now))
        if self._phase is not None:
            self.next_event_at = self._time_of(self._phase.ends)
        else:  # with a shared cache, requests at other engines may use all blocks
            self.next_event_at = now + self.timing.step if self.waiting else math.inf
        return events

    def _plan(self, now: float) -> Phase | None:
        """The next steps, as the scheduler plans them: decoding requests first, then prompts in order of arrival."""
        self._grow_decoding()
        budget = self.timing.step_tokens_max - len(self.decoding)
        parts: list[tuple[EngineJob, int]] = []
        for job in self.prefilling:
            if budget <= 0:
                break
            parts.append((job, min(budget, job.known - job.computed)))
            budget -= parts[-1][1]
        if self.waiting:
            for job in self.decoding:
                self._publish(job)
        start_seconds = 0.0
        while budget > 0 and self.waiting and (admitted := self._admit(self.waiting[0])) is not None:
            parts.append((admitted, min(budget, admitted.known - admitted.computed)))
            budget -= parts[-1][1]
            start_seconds += self.timing.start + self.timing.start_token * admitted.known
        if not parts and not self.decoding:
            return None
        steps = self._steps_until_end()
        if parts:
            job, tokens = parts[0]
            one_step = len(parts) > 1 or start_seconds > 0
            steps = 1 if one_step else min(steps, max(1, (job.known - job.computed - 1) // tokens))
        return self._phase_of(now, steps, tuple(parts), start_seconds)

    def _grow_decoding(self) -> None:
        """Allocate blocks for the next token of each decoding request. Preempts the last requests if necessary."""
        size = self.block_tokens
        for job in list(self.decoding):
            table = job.table
            while table is not None and job.computed >= len(table) * size:
                if self.cache.available > 0:
                    self.cache.grow(table, 1)
                else:
                    self._preempt(max([*self.prefilling, *self.decoding], key=lambda other: other.arrival))
                    table = job.table

    def _steps_until_end(self) -> int:
        """How many steps all decoding requests can make before one of them ends or blocks run out; at least 1."""
        if not self.decoding:
            return STEPS_MAX
        steps, available = min(job.left for job in self.decoding), self.cache.available
        if len(self.decoding) * (steps // self.block_tokens + 1) > available:
            while steps > 1 and self._blocks_for(steps) > available:
                steps //= 2
        return steps

    def _blocks_for(self, steps: int) -> int:
        """How many blocks the decoding requests need in addition, for so many steps."""
        size = self.block_tokens
        return sum(max(0, -(-(job.computed + steps) // size) - len(_table(job))) for job in self.decoding)

    def _admit(self, job: EngineJob) -> EngineJob | None:
        """The waiting request, running from now on; None if there is no room."""
        if self.running >= self.timing.running_max:
            return None
        chain = self._chain_of(job)[: (job.known - 1) // self.block_tokens]
        table = self.cache.allocate(chain, -(-job.known // self.block_tokens))
        if table is None:
            return None
        job.table = table
        job.computed = table.depth * self.block_tokens
        del self.waiting[0]
        self._tokens_waiting -= job.uncached_tokens
        insort(self.prefilling, job, key=lambda other: other.arrival)
        if job.cached_tokens < 0:
            job.cached_tokens = job.computed
            self.requests += 1
            self.prompt_tokens += job.prompt_tokens
            self.cached_tokens += job.cached_tokens
        return job

    def _preempt(self, job: EngineJob) -> None:
        (self.decoding if job in self.decoding else self.prefilling).remove(job)
        self._publish(job)
        self.cache.free(_table(job))
        job.table, job.computed, job.uncached_tokens = None, 0, 0
        job.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, job, key=lambda other: other.arrival)

    def _phase_of(
        self, now: float, steps: int, parts: tuple[tuple[EngineJob, int], ...], start_seconds: float
    ) -> Phase:
        timing, decoding = self.timing, self.decoding
        seconds = timing.step + timing.decode * len(decoding) + start_seconds
        growth = 0.0
        if timing.decode_context and decoding:
            seconds += timing.decode_context * sum(job.computed for job in decoding)
            growth += timing.decode_context * len(decoding)
        for job, tokens in parts:
            seconds += tokens * (timing.prefill_token + timing.prefill_context * (job.computed + tokens / 2))
            growth += timing.prefill_context * tokens * tokens
        return Phase(now, steps, seconds / self.speed, growth / self.speed, parts)

    def _complete(self, phase: Phase, now: float, events: list[EngineEvent]) -> None:
        """Apply the steps of a phase. All of them, since `submit` has cut it already."""
        steps = phase.steps
        self.work_seconds += phase.seconds_of(steps) - steps * self.timing.step / self.speed
        self._decode(steps, events)
        for job, tokens in phase.parts:
            job.computed += tokens * steps
            self._publish(job)
            if job.computed == job.known:
                self._take_token(job, now, events)

    def _decode(self, steps: int, events: list[EngineEvent]) -> None:
        size, ended = self.block_tokens, False
        for job in self.decoding:
            job.computed += steps
            job.known += steps
            job.left -= steps
            ended = ended or not job.left
            table = _table(job)
            missing = -(-job.computed // size) - len(table)
            if missing > 0:
                self.cache.grow(table, missing)
        if ended:
            for job in [job for job in self.decoding if not job.left]:
                self.decoding.remove(job)
                self._end(job)
                events.append(EngineEvent(job, False, True))

    def _take_token(self, job: EngineJob, now: float, events: list[EngineEvent]) -> None:
        """The prompt is complete, and the step has given the next token of the answer."""
        self.prefilling.remove(job)
        job.known += 1
        job.left -= 1
        is_first = job.first_chunk_at < 0
        if is_first:
            job.first_chunk_at = now
        if job.left:
            insort(self.decoding, job, key=lambda other: other.arrival)
        else:
            self._end(job)
        if is_first or not job.left:
            events.append(EngineEvent(job, is_first, not job.left))

    def _end(self, job: EngineJob) -> None:
        self._publish(job)
        self.cache.free(_table(job))
        job.table = None

    def _publish(self, job: EngineJob) -> None:
        """Make the full blocks findable that have been computed."""
        full = job.computed // self.block_tokens
        if full > _table(job).depth:
            self.cache.publish(_table(job), self._chain_of(job)[:full], job.session)

    @staticmethod
    def _chain_of(job: EngineJob) -> Sequence[int]:
        """The hashes of a request's full blocks, the answer's included."""
        if job.known == job.prompt_tokens or not job.answer_chain:
            return job.chain
        return (*job.chain, *job.answer_chain)


def _table(job: EngineJob) -> BlockTable:
    assert job.table is not None, "only running requests have blocks"
    return job.table
