"""Replays the conversations in virtual time: the gateway's queue, router and cache estimates, with modelled engines.

Queue, router and cache estimates are the gateway's own code. Each of the three engines is the bundled engine's own
scheduler and block pool, without a model. A step takes `STEP_SECONDS`, plus `TOKEN_SECONDS` per token. KV events arrive
`EVENTS_SECONDS` late. A run takes about a second, and its results are deterministic. It reports the figures of `run.py`
and `wrong`: the share of the tokens predicted as cached by which the engines' block pools hold fewer or more, over all
conversations, compared after every call on the engines that are idle.

    python -m benchmarks.warm_paths.rehearsal --sizes 6,4,600 10,4,600 --seeds 6

A size is the number of conversations, their concurrency, and the number of blocks in each cache. The seed also chooses
the speed of the engines. Each line is one seed, and compares prefix affinity with round robin. `at_most` is the hit
rate of one infinite cache, as a multiple of round robin's, which no router can exceed.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import selectors
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.engine.block_pool import BlockPool
from backend.engine.cached_block import ROOT_HASH, CachedBlock, hash_block
from backend.engine.plan import RunnerOutput
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.engine.scheduler import Scheduler
from backend.model_files import open_model_files
from backend.server.templates import ChatTemplate
from backend.server.tokenizer import load_codec
from benchmarks.warm_paths.conversations import BLOCK_TOKENS, Conversation, InfiniteCache, conversations
from benchmarks.warm_paths.stack import DEMO_WEIGHTS, MODEL
from gateway.deployments.engine_reports import METRICS_SECONDS, ROOM_WITH_EVENTS
from gateway.deployments.fleet import Fleet
from gateway.endpoints import ENDPOINTS
from gateway.policy import Deployment, Policy
from gateway.prefix.events.base import BlocksRemoved, BlocksStored
from gateway.prefix.events.block_index import BlockIndex
from gateway.prefix.fingerprint import BLOCK_BYTES, text_bytes_of
from gateway.prefix.in_flight import ReportedLoad
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.providers.offline import OfflineProvider
from gateway.queueing import Queue
from gateway.routing import STRATEGIES
from gateway.routing.attempt_log import AttemptLog
from gateway.routing.router import Router
from gateway.types import Call, Principal, Trace

SIZES = ("6,4,600", "10,4,600", "20,6,600", "20,8,600", "30,6,1000")
FROM_CONVERSATIONS = 100  # candidates; those that fit into a cache are used
ENGINES = 3
ANSWER_TOKENS = 4
STEP_SECONDS = 0.004
TOKEN_SECONDS = (0.0003, 0.0006, 0.0012)
EVENTS_SECONDS = 0.002
STEP_TOKENS_MAX = 512
EDGE_TOKENS = 96  # tolerance, since fingerprint blocks and KV blocks end at different tokens
WARM_UP_SHARE = 0.25  # share of the requests that are sent before predictions count
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"."}}]}\n\n'


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time: only waiting advances its clock, and it never really waits."""

    def __init__(self) -> None:
        super().__init__(_SkippingSelector(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _SkippingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: all tasks wait, and no timer is set")
        self._loop.now += timeout
        return super().select(0)


class RehearsedEngine(OfflineProvider):
    """The bundled engine without its model, as a provider of the gateway. Publishes its KV events to `blocks`."""

    def __init__(
        self, deployment: Deployment, num_blocks: int, token_seconds: float, token_ids: Mapping[str, list[int]]
    ) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_TOKENS, self)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=64, max_num_batched_tokens=STEP_TOKENS_MAX, max_model_len=16_384, max_waiting=512
        )
        self.blocks: BlockIndex | None = None
        self._token_seconds = token_seconds
        self._token_ids = token_ids  # of prompts, by call id
        self._replies: dict[str, RehearsedReply] = {}
        self._events: list[BlocksStored | BlocksRemoved] = []
        self._wake = asyncio.Event()

    def stored(self, block: CachedBlock) -> None:
        parent, last = None if block.parent == ROOT_HASH else block.parent, self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.hashes[-1] == parent and last.session == block.session_id:
            self._events[-1] = last._replace(hashes=(*last.hashes, block.block_hash))
        else:
            self._events.append(BlocksStored((block.block_hash,), parent, BLOCK_TOKENS, block.session_id))

    def removed(self, block_hash: bytes) -> None:
        self._events.append(BlocksRemoved((block_hash,)))

    def cleared(self) -> None:
        raise AssertionError("the block pool was cleared")

    def end_step(self) -> None:
        events, self._events = self._events, []
        if self.blocks is not None and events:
            asyncio.get_running_loop().call_later(EVENTS_SECONDS, self._publish, self.blocks, events)

    @staticmethod
    def _publish(blocks: BlockIndex, events: Sequence[BlocksStored | BlocksRemoved]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                blocks.stored(event)
            else:
                blocks.removed(event)

    async def run(self) -> None:
        while True:
            while not self.scheduler.has_unfinished:
                self._wake.clear()
                await self._wake.wait()
            plan = self.scheduler.schedule()
            await asyncio.sleep(STEP_SECONDS + self._token_seconds * sum(part.num_tokens for part in plan))
            computed = [RunnerOutput(token_ids=(part.end % 997,) if part.catches_up else ()) for part in plan]
            outputs = self.scheduler.advance(plan, computed)
            self.end_step()
            for output in outputs:
                reply = self._replies[output.request_id]
                reply.cached_tokens = output.num_cached_tokens
                for _ in output.new_token_ids:
                    reply.chunks.put_nowait(CHUNK)
                if output.finish_reason is not None:
                    reply.chunks.put_nowait(None)
                    del self._replies[output.request_id]

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> RehearsedReply:
        reply = self._replies[call.id] = RehearsedReply()
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS)
        now = asyncio.get_running_loop().time()
        self.scheduler.add(
            Request(
                call.id, self._token_ids[call.id], sampling, cache_salt=call.cache_salt, arrived=now, session_id=call.id
            )
        )
        self._wake.set()
        return reply

    def cached_tokens(self, token_ids: Sequence[int], salt: str) -> int:
        hashes = [ROOT_HASH]
        for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = token_ids[start : start + BLOCK_TOKENS]
            hashes.append(hash_block(hashes[-1], block, "" if start else salt))
        return len(self.pool.find_cached_prefix(hashes[1:])) * BLOCK_TOKENS


class RehearsedReply:
    """A streamed reply of a modelled engine: a queue of chunks, ended by `None`."""

    def __init__(self) -> None:
        self.chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.cached_tokens = 0

    def __aiter__(self) -> RehearsedReply:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self.chunks.get()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def stream_to(self, sink: Callable[[bytes], bool]) -> bool:
        async for chunk in self:
            if not sink(chunk):
                return False
        return True

    async def aclose(self) -> None:
        pass


@dataclass(frozen=True)
class RehearsedRequest:
    """One answered request."""

    tenant: str
    sent_at: float
    ttft_seconds: float
    token_ids: Sequence[int]
    cached_tokens: int
    predicted_tokens: int


class PromptTokenizer:
    """Token ids of prompts, by the demo model's template and tokenizer. Tokenizes each prompt once."""

    def __init__(self) -> None:
        files = open_model_files(DEMO_WEIGHTS)
        self._codec = load_codec(files)
        self._template = ChatTemplate(files.chat_templates(), self._codec.special_tokens)
        self._known: dict[str, list[int]] = {}

    def ids_of(self, messages: list[dict[str, Any]]) -> list[int]:
        text = self._template.render(messages)
        if text not in self._known:
            self._known[text] = self._codec.encode(text, add_special_tokens=False)
        return self._known[text]


@dataclass(frozen=True)
class Scene:
    concurrency: int
    num_blocks: int
    token_seconds: float
    events: bool


class Rehearsal:
    """One replay of conversations, which starts with empty caches."""

    def __init__(self, tokenizer: PromptTokenizer, work: Sequence[Conversation], scene: Scene, strategy: str) -> None:
        self._tokenizer = tokenizer
        self._work = work
        self._scene = scene
        names = [f"engine-{letter}" for letter in "abcdefgh"[:ENGINES]]
        self._policy = Policy.model_validate(
            {
                "deployments": [
                    {"name": name, "base_url": f"http://{name}.invalid/v1", "model": MODEL, "max_concurrency": 64}
                    for name in names
                ],
                "models": [{"name": MODEL, "deployments": names}],
                "classes": {"realtime": {"ttft": "5m", "inter_token": "5m", "total": "10m"}},
                "tenants": [{"name": name} for name in sorted({conversation.tenant for conversation in work})],
                "routing": {"strategy": strategy},
            }
        )
        self._token_ids: dict[str, list[int]] = {}
        self._engines: dict[str, RehearsedEngine] = {}
        self._fleet = Fleet(self._engine)
        self._fleet.apply(self._policy)
        self._deployments = list(self._fleet)
        if scene.events:
            for deployment in self._deployments:
                deployment.blocks = self._engines[deployment.name].blocks = BlockIndex(deployment.cache)
        self._router = Router(self._fleet, STRATEGIES)
        self._queue = Queue(self._fleet)
        self._canonicaliser = Canonicaliser(b"secret")
        self._spans = itertools.count(1)
        self._last: dict[int, tuple[Call, list[int]]] = {}  # the last prompt of each conversation
        self._ends: dict[int, list[tuple[int, int]]] = {}  # and the ends of all its prompts, in tokens and in bytes
        self.served: list[RehearsedRequest] = []
        self.wrong_tokens = self.predicted_tokens = 0  # sums over all comparisons

    def _engine(self, deployment: Deployment) -> RehearsedEngine:
        scene = self._scene
        engine = RehearsedEngine(deployment, scene.num_blocks, scene.token_seconds, self._token_ids)
        self._engines[deployment.name] = engine
        return engine

    async def run(self) -> None:
        waiting = iter(enumerate(self._work))
        background = [asyncio.create_task(engine.run()) for engine in self._engines.values()]
        background.append(asyncio.create_task(self._report_load()))
        await asyncio.gather(*(self._converse(waiting) for _ in range(self._scene.concurrency)))
        for task in background:
            task.cancel()
        await asyncio.wait(background)

    async def _converse(self, waiting: Iterator[tuple[int, Conversation]]) -> None:
        for number, conversation in waiting:
            for turn, messages in enumerate(conversation.turns()):
                await self._ask(number, f"{number}-{turn}", conversation.tenant, messages)

    async def _ask(self, number: int, call_id: str, tenant: str, messages: list[dict[str, Any]]) -> None:
        loop = asyncio.get_running_loop()
        body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "stream": True}
        call = self._canonicaliser.canonicalise(
            ENDPOINTS[0], json.dumps(body).encode(), {}, call_id=call_id, now=loop.time(), policy=self._policy,
            principal=Principal(self._policy.tenants_by_name[tenant], "k"), trace=Trace(1, 0, False),
        )  # fmt: skip
        token_ids = self._token_ids[call_id] = self._tokenizer.ids_of(messages)
        attempts = AttemptLog(lambda: next(self._spans), lambda span: {}, asyncio.current_task())
        sent_at = loop.time()
        with await self._queue.acquire_slot(call) as slot:
            async with self._router.open(call, slot, attempts) as upstream:
                ttft_seconds = loop.time() - sent_at
                output = 1
                while not await upstream.stream_to(lambda chunk: False):
                    output += 1
        reply = upstream.response
        assert isinstance(reply, RehearsedReply)
        upstream.sent.learn_cached(len(token_ids), reply.cached_tokens)
        upstream.sent.learn_usage(call_id, len(token_ids), reply.cached_tokens, output)
        predicted = attempts.done[-1].predicted_cached_tokens
        self.served.append(RehearsedRequest(tenant, sent_at, ttft_seconds, token_ids, reply.cached_tokens, predicted))
        self._last[number] = (call, token_ids)
        text_bytes = text_bytes_of(call.fingerprint, call.prompt_tokens_estimate)
        self._ends.setdefault(number, [(0, 0)]).append((len(token_ids), text_bytes))
        loop.call_later(2 * EVENTS_SECONDS, self._compare)

    async def _report_load(self) -> None:
        while True:
            await asyncio.sleep(METRICS_SECONDS)
            for deployment in self._deployments:
                scheduler = self._engines[deployment.name].scheduler
                now = asyncio.get_running_loop().time()
                deployment.estimate.load = ReportedLoad(now, len(scheduler.running), len(scheduler.waiting))
                deployment.estimate.set_capacity(self._scene.num_blocks * BLOCK_TOKENS, ROOM_WITH_EVENTS)

    def _compare(self) -> None:
        for deployment in self._deployments:
            engine = self._engines[deployment.name]
            if engine.scheduler.has_unfinished:
                continue  # its estimate already counts the blocks of calls in flight
            for number, (call, token_ids) in self._last.items():
                true = engine.cached_tokens(token_ids, call.cache_salt)
                predicted = _tokens_at(deployment.cache.match(call.fingerprint) * BLOCK_BYTES, self._ends[number])
                self.predicted_tokens += predicted
                self.wrong_tokens += max(0, abs(predicted - true) - EDGE_TOKENS)


def _tokens_at(text_bytes: int, ends: Sequence[tuple[int, int]]) -> int:
    """The tokens that so many bytes of a prompt have, interpolated between the ends of the conversation's prompts."""
    for (tokens, start), (more_tokens, end) in itertools.pairwise(ends):
        if text_bytes < end:
            return tokens + (text_bytes - start) * (more_tokens - tokens) // (end - start)
    return ends[-1][0]


def rehearse(tokenizer: PromptTokenizer, work: Sequence[Conversation], scene: Scene, strategy: str) -> dict[str, float]:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def whole() -> Rehearsal:
            rehearsal = Rehearsal(tokenizer, work, scene, strategy)
            await rehearsal.run()
            return rehearsal

        rehearsal = runner.run(whole())
        seconds = runner.get_loop().time()
    served = sorted(rehearsal.served, key=lambda one: one.sent_at)
    cache = InfiniteCache()
    prompt_tokens = sum(len(one.token_ids) for one in served)
    ideal = sum(cache.serve(one.tenant, one.token_ids) for one in served)
    ttfts = sorted(one.ttft_seconds for one in served)
    late = rehearsal.served[int(len(served) * WARM_UP_SHARE) :]
    reported = max(1, sum(one.cached_tokens for one in late))
    wrong = sum(abs(one.predicted_tokens - one.cached_tokens) for one in late)
    return {
        "cached": sum(one.cached_tokens for one in served) / prompt_tokens,
        "ideal": ideal / prompt_tokens,
        "ttft_p50_ms": statistics.median(ttfts) * 1000,
        "ttft_p90_ms": ttfts[int(0.9 * len(ttfts))] * 1000,
        "predicted_to_reported": sum(one.predicted_tokens for one in late) / reported,
        "mean_error_share": wrong / reported,
        "wrong": rehearsal.wrong_tokens / max(1, rehearsal.predicted_tokens),
        "seconds": seconds,
    }


def compared(tokenizer: PromptTokenizer, size: tuple[int, int, int], seed: int, *, events: bool) -> dict[str, float]:
    """Prefix affinity's figures, and by how much they differ from round robin's."""
    count, concurrency, num_blocks = size
    _, work = conversations(FROM_CONVERSATIONS, seed)
    fitting = [one for one in work if len(tokenizer.ids_of(list(one.turns())[-1])) < (num_blocks - 1) * BLOCK_TOKENS]
    scene = Scene(concurrency, num_blocks, TOKEN_SECONDS[seed % len(TOKEN_SECONDS)], events)
    robin = rehearse(tokenizer, fitting[:count], scene, "round_robin")
    ours = rehearse(tokenizer, fitting[:count], scene, "prefix_affinity")
    return {
        "ideal": ours["ideal"],
        "cached": ours["cached"],
        "robin": robin["cached"],
        "hit_times": ours["cached"] / robin["cached"],
        "at_most": ours["ideal"] / robin["cached"],
        "ttft_times": ours["ttft_p50_ms"] / robin["ttft_p50_ms"],
        "p90_times": ours["ttft_p90_ms"] / robin["ttft_p90_ms"],
        "predicted": ours["predicted_to_reported"],
        "error": ours["mean_error_share"],
        "robin_pred": robin["predicted_to_reported"],
        "wrong": ours["wrong"],
        "time_times": ours["seconds"] / robin["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=SIZES, help="CONVERSATIONS,CONCURRENCY,BLOCKS")
    parser.add_argument("--seeds", type=int, default=6, help="number of seeds")
    parser.add_argument("--no-events", action="store_true", help="engines publish no KV events")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    args = parser.parse_args()
    tokenizer, rows = PromptTokenizer(), []
    for size in args.sizes:
        conversations_, concurrency, blocks = map(int, size.split(","))
        figures: list[dict[str, float]] = []
        print(f"\n{conversations_} conversations, {concurrency} at a time, {ENGINES} caches of {blocks} blocks")
        for seed in range(1, args.seeds + 1):
            figures.append(compared(tokenizer, (conversations_, concurrency, blocks), seed, events=not args.no_events))
            if seed == 1:
                print("seed  " + "".join(f"{name:>11}" for name in figures[0]))
            print(f"{seed:4}  " + "".join(f"{value:11.3f}" for value in figures[-1].values()), flush=True)
        mean = {name: statistics.mean(row[name] for row in figures) for name in figures[0]}
        print("mean  " + "".join(f"{value:11.3f}" for value in mean.values()))
        rows.append({"size": size, "seeds": [{k: round(v, 4) for k, v in row.items()} for row in figures]})
    if args.out:
        now = datetime.datetime.now(datetime.UTC)
        result = {
            "at": now.isoformat(timespec="seconds"),
            "events": not args.no_events,
            "engines": ENGINES,
            "sizes": rows,
        }
        args.out.write_text(json.dumps(result | {"sizes": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
