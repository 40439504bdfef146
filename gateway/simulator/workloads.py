"""Generated workloads on which routing rules are known to fail, each with the site that it is sent to.

`RECIPES` names them all. A recipe draws sessions, and spaces their beginnings so that the deployments are as busy as
`rho` says: 1 would be full use of all of them by the best possible rule, which computes every prefix once in all and
keeps everything cached. Equal seeds, equal traffic.

A prompt is built from segments (`PromptWriter`): shared ones, which are equal wherever the same ones precede them, and
unique ones.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import NamedTuple

from gateway.prefix.cache_model import CacheModel
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.simulator import generate
from gateway.simulator.engine_steps import STEP_TOKENS_MAX, EngineSpeed
from gateway.simulator.site import Reports, Restart, SimulatedSite, default_policy
from gateway.simulator.traces import TraceRequest, TraceSession, TrafficTrace, staggered

SERVERS = 4
PREFILL_TOKENS_PER_SECOND = 8_000.0
TIMING = EngineSpeed.of_rate(PREFILL_TOKENS_PER_SECOND)
UNBOUNDED_TOKENS = 10**12
OUTPUT_TOKENS = 200  # mean
RECORDED_RHO = 0.7


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the suite."""

    name: str
    trace: TrafficTrace
    site: SimulatedSite
    rho: float  # load, as a share of what the best possible rule could serve


class Prompt(NamedTuple):
    """The blocks and the tokens of a prompt."""

    blocks: tuple[range, ...] = ()
    tokens: int = 0


class PromptWriter:
    """Writes the prompts of one workload."""

    def __init__(self) -> None:
        self._new_blocks = count()
        self._shared: dict[tuple[int, str], range] = {}  # by the block before, and the segment's name

    def shared(self, prompt: Prompt, segment: str, tokens: int) -> Prompt:
        """Append a segment that other prompts have, too. Its length is rounded to blocks, so that they stay equal."""
        blocks = max(1, round(tokens / BLOCK_TOKENS))
        before = prompt.blocks[-1][-1] if prompt.blocks else -1
        known = self._shared.get((before, segment))
        if known is None:
            first = next(self._new_blocks)
            for _ in range(blocks - 1):
                next(self._new_blocks)
            known = self._shared[before, segment] = range(first, first + blocks)
        return Prompt((*prompt.blocks, known), prompt.tokens + len(known) * BLOCK_TOKENS)

    def unique(self, prompt: Prompt, tokens: int) -> Prompt:
        """Append text that no other session has."""
        return Prompt(*generate.grow_prompt(*prompt, tokens, self._new_blocks))


class _Conversation:
    """Collects the requests of one session."""

    def __init__(self, writer: PromptWriter, prompt: Prompt, rng: random.Random) -> None:
        self._writer = writer
        self._rng = rng
        self.prompt = prompt
        self.requests: list[TraceRequest] = []

    def ask(self, added_tokens: int, *, pause_seconds: float = 0.0, mean_output: float = OUTPUT_TOKENS) -> None:
        """Another request, after the last answer and `added_tokens` more."""
        answered = self.requests[-1].output_tokens if self.requests else 0
        self.prompt = self._writer.unique(self.prompt, answered + added_tokens)
        output_tokens = 1 + int(self._rng.expovariate(1 / mean_output))
        self.requests.append(TraceRequest(pause_seconds, self.prompt.tokens, output_tokens, self.prompt.blocks))


Sessions = Iterator[Sequence[TraceRequest]]


def _lognormal(rng: random.Random, median: float, sigma: float, at_most: int) -> int:
    return min(at_most, generate.draw_lognormal(rng, median, sigma))


class _Popularity:
    """Draws one of `number` items. The probability of the k-th is proportional to k ** -exponent."""

    def __init__(self, number: int, exponent: float) -> None:
        self._sums = list(accumulate(k**-exponent for k in range(1, number + 1)))

    def draw(self, rng: random.Random) -> int:
        return bisect(self._sums, rng.random() * self._sums[-1])


def _one_prompt(rng: random.Random, writer: PromptWriter, requests: int) -> Sessions:
    """Nine of ten requests have the same long beginning, and little behind it."""
    for number in range(requests):
        prompt = writer.shared(Prompt(), "popular" if rng.random() < 0.9 else f"other {number}", 6_400)
        session = _Conversation(writer, prompt, rng)
        session.ask(_lognormal(rng, 150, 1.0, 2_000), mean_output=100)
        yield session.requests


def _short_sessions(rng: random.Random, writer: PromptWriter, requests: int) -> Sessions:
    """Short runs of agents: two to six quick requests behind one of three system prompts."""
    made = 0
    while made < requests:
        system = f"system {rng.randrange(3)}"
        session = _Conversation(writer, writer.shared(Prompt(), system, 4_096), rng)
        session.ask(_lognormal(rng, 300, 0.8, 4_000), mean_output=80)
        for _ in range(rng.randint(1, 5)):
            session.ask(_lognormal(rng, 400, 1.0, 6_000), pause_seconds=rng.uniform(0.1, 2.0), mean_output=80)
        made += len(session.requests)
        yield session.requests


def _zipf_documents(rng: random.Random, writer: PromptWriter, requests: int) -> Sessions:
    """Questions about documents. A few documents are popular."""
    popularity = _Popularity(400, 1.0)
    lengths = [_lognormal(rng, 5_000, 0.8, 30_000) for _ in range(400)]
    for _ in range(requests):
        document = popularity.draw(rng)
        prompt = writer.shared(writer.shared(Prompt(), "system", 320), f"document {document}", lengths[document])
        session = _Conversation(writer, prompt, rng)
        session.ask(rng.randint(20, 200), mean_output=150)
        yield session.requests


def _samples(rng: random.Random, writer: PromptWriter, requests: int) -> Sessions:
    """Eight samples of each prompt at once (`_in_bursts` lets them begin together)."""
    for number in range(max(1, requests // 8)):
        prompt = writer.shared(
            writer.shared(Prompt(), "system", 512), f"task {number}", _lognormal(rng, 3_000, 0.7, 20_000)
        )
        for _ in range(8):
            yield [TraceRequest(0.0, prompt.tokens, 1 + int(rng.expovariate(1 / 300)), prompt.blocks)]


def _chats(rng: random.Random, writer: PromptWriter, requests: int) -> Sessions:
    """Chats of several turns behind one system prompt, with pauses to read and write."""
    made = 0
    while made < requests:
        session = _Conversation(writer, writer.shared(Prompt(), "system", 512), rng)
        session.ask(_lognormal(rng, 2_500, 1.2, 40_000))
        while rng.random() < 0.7 and session.prompt.tokens < 60_000:
            session.ask(_lognormal(rng, 300, 1.0, 8_000), pause_seconds=5 + rng.expovariate(1 / 30))
        made += len(session.requests)
        yield session.requests


def _tool_agents(rng: random.Random, writer: PromptWriter, requests: int) -> Sessions:
    """Agents that call tools: short gaps, short answers, long outputs of tools."""
    made = 0
    while made < requests:
        session = _Conversation(writer, writer.shared(Prompt(), f"agent {rng.randrange(2)}", 8_192), rng)
        session.ask(_lognormal(rng, 1_500, 0.8, 10_000), mean_output=120)
        for _ in range(rng.randint(5, 30)):
            session.ask(_lognormal(rng, 1_500, 1.2, 16_000), pause_seconds=rng.uniform(0.2, 4.0), mean_output=120)
        made += len(session.requests)
        yield session.requests


def _rag(rng: random.Random, writer: PromptWriter, requests: int) -> Sessions:
    """Retrieval: a system prompt, and six popular chunks in the order of each search, so that few prefixes repeat."""
    popularity = _Popularity(300, 0.8)
    for _ in range(requests):
        prompt = writer.shared(Prompt(), "system", 1_024)
        chunks: list[int] = []
        while len(chunks) < 6:
            chunk = popularity.draw(rng)
            if chunk not in chunks:
                chunks.append(chunk)
        for chunk in chunks:
            prompt = writer.shared(prompt, f"chunk {chunk}", 512)
        session = _Conversation(writer, prompt, rng)
        session.ask(rng.randint(20, 200))
        if rng.random() < 0.3:
            session.ask(rng.randint(20, 100), pause_seconds=rng.uniform(5, 30))
        yield session.requests


def _images(rng: random.Random, writer: PromptWriter, requests: int) -> Sessions:
    """Questions about images, which are large parts of their prompts. Some images are popular."""
    popularity = _Popularity(500, 0.7)
    made = 0
    while made < requests:
        prompt = writer.shared(Prompt(), "system", 256)
        for _ in range(rng.choice((1, 1, 2, 4))):
            image = popularity.draw(rng)
            prompt = writer.shared(prompt, f"image {image}", 1_024 + 512 * (image % 5))
        session = _Conversation(writer, prompt, rng)
        session.ask(rng.randint(20, 100), mean_output=150)
        for _ in range(rng.randint(0, 4)):
            session.ask(rng.randint(20, 100), pause_seconds=rng.uniform(2, 20), mean_output=150)
        made += len(session.requests)
        yield session.requests


def _coding_agents(rng: random.Random, writer: PromptWriter, requests: int) -> Sessions:
    """Coding agents with long prompts, as `generate.agents` draws them."""
    made = generate.agents(rng.randrange(10**9), sessions=max(1, requests // 25), max_requests=40)
    return (session.requests for session in made.sessions)


Draw = Callable[[random.Random, PromptWriter, int], Sessions]
Starts = Callable[[random.Random, int], list[float]]


def _poisson(rng: random.Random, sessions: int) -> list[float]:
    return list(accumulate(rng.expovariate(1.0) for _ in range(sessions)))


def _in_eights(rng: random.Random, sessions: int) -> list[float]:
    starts = _poisson(rng, -(-sessions // 8))
    return [starts[number // 8] for number in range(sessions)]


def _in_bursts(rng: random.Random, sessions: int) -> list[float]:
    """Quiet for a while, then several times as many sessions as the deployments can serve."""
    starts: list[float] = []
    at = 0.0
    while len(starts) < sessions:
        at += rng.expovariate(1 / 20)
        for _ in range(rng.randint(5, 35)):
            starts.append(at + rng.random())
    return sorted(starts[:sessions])


def ideal_seconds(sessions: Sequence[Sequence[TraceRequest]], timing: EngineSpeed = TIMING) -> float:
    """How long one deployment would compute all requests in full steps, if everything stayed cached."""
    everything, seconds = CacheModel(UNBOUNDED_TOKENS), 0.0
    prefill_token = timing.prefill_token + timing.step / STEP_TOKENS_MAX
    for session in sessions:
        for request in session:
            chain = request.chain
            computed = request.prompt_tokens - everything.match(chain) * BLOCK_TOKENS
            everything.add(chain)
            decoding = timing.decode + timing.decode_context * request.prompt_tokens
            seconds += computed * prefill_token + request.output_tokens * decoding
    return seconds


def _at_load(trace: TrafficTrace, rho: float, speed: float) -> TrafficTrace:
    """The trace with its sessions' beginnings moved so that deployments of this total speed have the load `rho`."""
    duration = ideal_seconds([session.requests for session in trace.sessions]) / (rho * speed)
    first = min(session.starts_at_seconds for session in trace.sessions)
    scale = duration / max(trace.duration_seconds - first, 1e-9)
    sessions = [
        replace(session, starts_at_seconds=(session.starts_at_seconds - first) * scale) for session in trace.sessions
    ]
    return replace(trace, sessions=sessions)


def _site(capacity_tokens: int, **settings: object) -> SimulatedSite:
    return SimulatedSite(default_policy(SERVERS, **settings), capacity_tokens, TIMING)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a workload is made."""

    draw: Draw
    requests: int
    rho: float
    site: SimulatedSite
    starts: Starts = _poisson
    urgent: bool = True
    joins: bool = False  # the last deployment joins in the middle
    restarts: bool = False  # the first deployment restarts in the middle

    def make(self, name: str, seed: int, share: float) -> Workload:
        """The workload with this share of its requests."""
        rng = random.Random(f"{name} {seed}")
        drawn = list(self.draw(rng, PromptWriter(), max(1, int(self.requests * share))))
        starts = [0.0, *self.starts(rng, len(drawn) - 1)]
        sessions = [
            TraceSession(str(number), at, requests, self.urgent)
            for number, (at, requests) in enumerate(zip(starts, drawn, strict=True))
        ]
        site = self.site
        trace = _at_load(TrafficTrace(name, sessions, closed_loop=True), self.rho, sum(site.speeds) or SERVERS)
        duration = trace.duration_seconds
        if self.joins:
            site = replace(site, joins_at_seconds=duration / 2)
        if self.restarts:
            site = replace(site, restarts=(Restart(duration / 2, 0),))
        return Workload(name, trace, site, self.rho)


_CHATS = _Recipe(_chats, 2_000, 0.8, _site(400_000))

RECIPES: dict[str, _Recipe] = {
    "one prompt, 90 %": _Recipe(_one_prompt, 3_000, 0.85, _site(400_000)),
    "short sessions": _Recipe(_short_sessions, 3_000, 0.85, _site(300_000)),
    "zipf documents": _Recipe(_zipf_documents, 2_500, 0.4, _site(600_000)),
    "8 samples each": _Recipe(_samples, 2_000, 0.8, _site(400_000), _in_eights),
    "bursts of chats": replace(_CHATS, starts=_in_bursts, rho=0.6),
    "chats, half load": replace(_CHATS, rho=0.5),
    "chats": _CHATS,
    "chats, near full": replace(_CHATS, rho=0.95),
    "chats, KV events": replace(_CHATS, site=replace(_CHATS.site, reports=Reports.EVENTS)),
    "chats, no reports": replace(_CHATS, site=replace(_CHATS.site, reports=Reports.NOTHING)),
    "speeds 3:1:1:1": replace(_CHATS, site=replace(_CHATS.site, speeds=(3.0, 1.0, 1.0, 1.0))),
    "guess: cache x10": replace(_CHATS, site=_site(400_000, cache_tokens=4_000_000)),
    "guess: cache /10": replace(_CHATS, site=_site(400_000, cache_tokens=40_000)),
    "guess: speed x10": replace(_CHATS, site=_site(400_000, prefill_tokens_per_second=80_000)),
    "guess: speed /10": replace(_CHATS, site=_site(400_000, prefill_tokens_per_second=800)),
    "cold join": replace(_CHATS, rho=0.7, joins=True),
    "restart": replace(_CHATS, rho=0.7, restarts=True),
    "tool agents": _Recipe(_tool_agents, 2_500, 0.8, _site(400_000)),
    "coding agents": _Recipe(_coding_agents, 2_000, 0.6, _site(1_500_000)),
    "agents, no room": _Recipe(_coding_agents, 2_000, 0.5, _site(500_000)),
    "batch agents, no room": _Recipe(_coding_agents, 2_000, 0.5, _site(500_000), urgent=False),
    "shuffled RAG": _Recipe(_rag, 2_500, 0.85, _site(400_000)),
    "images": _Recipe(_images, 2_500, 0.85, _site(400_000)),
}


def make_workload(name: str, seed: int, share: float = 1.0) -> Workload:
    """The generated workload of this name, with this share of its requests."""
    return RECIPES[name].make(name, seed, share)


def recorded_workload(name: str, trace: TrafficTrace, seed: int, share: float = 1.0) -> Workload:
    """A recorded trace before the usual site. Its sessions begin as far apart as `RECORDED_RHO` demands."""
    if trace.closed_loop:
        sessions = max(2, int(60 * share))
        trace = staggered(trace, seed=seed, sessions=sessions, max_requests=max(2, int(60 * share)), urgent_every=1)
    else:
        trace = replace(trace, sessions=trace.sessions[: max(1, int(3_000 * share))])
    longest = max(request.prompt_tokens for session in trace.sessions for request in session.requests)
    return Workload(name, _at_load(trace, RECORDED_RHO, SERVERS), _site(max(1_000_000, 2 * longest)), RECORDED_RHO)
