"""The block index against the engine's own scheduler, with a cache that holds a fraction of the requested prompts.

Calls overlap, are preempted and evict each other. Events and ends of calls arrive late. Once all have arrived, the
prediction must be exact.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.engine.block_pool import BlockPool
from backend.engine.cached_block import ROOT_HASH, CachedBlock, hash_block
from backend.engine.plan import RunnerOutput
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.engine.scheduler import Scheduler
from gateway.prefix.cache_model import CacheModel
from gateway.prefix.events.base import BlocksRemoved, BlocksStored
from gateway.prefix.events.block_index import BlockIndex, FinishedCall
from gateway.prefix.fingerprint import BLOCK_BYTES, fingerprint

BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 5  # of this engine's tokenizer, which the index does not know
EDGE_BYTES = BLOCK_BYTES + BLOCK_TOKENS * BYTES_PER_TOKEN  # text blocks and token blocks end at different positions
PROMPT_MAX_BYTES = 6_000
STEP_TOKENS = 64


def words(name: str, length: int) -> str:
    return "".join(f"{name}{i:05}," for i in range(length // (len(name) + 6) + 1))[:length]


def tokens(text: str) -> list[int]:
    return [crc32(text[i : i + BYTES_PER_TOKEN].encode()) % 2**31 for i in range(0, len(text), BYTES_PER_TOKEN)]


def chain_of(text: str) -> Sequence[int]:
    return fingerprint([text.encode()], 7)


@dataclass
class Conversation:
    text: str
    repeats: bool  # the next prompt repeats the answer unchanged
    turns: int = 0
    in_flight: bool = False
    prompts: list[str] = field(default_factory=list)


@dataclass
class Running:
    conversation: Conversation
    request: Request
    prompt: str
    answer: list[int]
    said: str


class EngineAndIndex:
    """An engine, an index that receives its events late, and clients."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = CacheModel(1 << 30)
        self.index = BlockIndex(self.cache)
        self.pool = BlockPool(num_blocks, BLOCK_TOKENS, self)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=8, max_num_batched_tokens=STEP_TOKENS, max_model_len=8_000, max_waiting=64
        )
        self.conversations = [Conversation(words("shared", 1_000), repeats=i % 2 == 0) for i in range(5)]
        self.running: dict[str, Running] = {}
        self.told: list[BlocksStored | BlocksRemoved] = []
        self.news: deque[list[BlocksStored | BlocksRemoved]] = deque()
        self.finished: deque[FinishedCall] = deque()

    def stored(self, block: CachedBlock) -> None:
        parent = None if block.parent == ROOT_HASH else block.parent
        self.told.append(BlocksStored((block.block_hash,), parent, BLOCK_TOKENS, block.session_id))

    def removed(self, block_hash: bytes) -> None:
        self.told.append(BlocksRemoved((block_hash,)))

    def cleared(self) -> None:
        raise AssertionError("the cache is never cleared")

    def end_step(self) -> None:
        if self.told:
            self.news.append(self.told)
            self.told = []

    def sends(self, number: int, asked: int, answered: int) -> None:
        conversation = self.conversations[number]
        if conversation.in_flight:
            return
        name = f"c{number}t{conversation.turns}"
        conversation.turns += 1
        prompt = conversation.text + words(name, asked)
        if len(prompt) + answered > PROMPT_MAX_BYTES:  # restart the conversation
            conversation.text, prompt = words("shared", 1_000), words("shared", 1_000) + words(name, asked)
        said = words(f"s{name}", answered)
        answer = [*tokens(said), 1]
        prompt_ids = tokens(prompt)
        request = Request(name, prompt_ids, SamplingParams(max_tokens=len(answer)), session_id=name, arrived=0.0)
        self.cache.add(chain_of(prompt))  # as the router does when it sends the call
        self.scheduler.add(request)
        conversation.in_flight = True
        self.running[name] = Running(conversation, request, prompt, answer, said)

    def step(self) -> None:
        if not self.scheduler.has_unfinished:
            return
        plan = self.scheduler.schedule()
        computed = []
        for part in plan:
            one = self.running[part.request.request_id]
            next_token = one.answer[part.request.num_output_tokens] if part.catches_up else None
            computed.append(RunnerOutput(token_ids=() if next_token is None else (next_token,)))
        for output in self.scheduler.advance(plan, computed):
            if output.finish_reason is not None:
                self._finish(self.running.pop(output.request_id), output.num_cached_tokens)
        self.pool.end_step()

    def _finish(self, one: Running, cached_tokens: int) -> None:
        kept = one.said if one.conversation.repeats else words("x" + one.said[:9], len(one.said))
        one.conversation.text = one.prompt + kept
        one.conversation.in_flight = False
        one.conversation.prompts.append(one.prompt)
        prompt_tokens = one.request.num_prompt_tokens
        chain = chain_of(one.prompt)
        self.finished.append(
            FinishedCall(one.request.request_id, chain, len(one.prompt), prompt_tokens, cached_tokens, len(one.answer))
        )

    def hear_of_events(self) -> None:
        for event in self.news.popleft() if self.news else ():
            if isinstance(event, BlocksStored):
                self.index.stored(event)
            else:
                self.index.removed(event)

    def hear_of_an_end(self) -> None:
        if self.finished:
            self.index.call_finished(self.finished.popleft())

    def come_to_rest(self) -> None:
        while self.scheduler.has_unfinished:
            self.step()
        while self.news:
            self.hear_of_events()
        while self.finished:
            self.hear_of_an_end()

    def error_bytes(self, prompt: str) -> int:
        hashes = [ROOT_HASH]
        ids = tokens(prompt)
        for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            hashes.append(hash_block(hashes[-1], ids[start : start + BLOCK_TOKENS]))
        true = len(self.pool.find_cached_prefix(hashes[1:])) * BLOCK_TOKENS * BYTES_PER_TOKEN
        prediction = self.cache.match(chain_of(prompt)) * BLOCK_BYTES
        return max(0, abs(prediction - true) - EDGE_BYTES)

    def lets(self, happening: tuple[int, int, int, int]) -> None:
        what, number, asked, answered = happening
        if what == 0:
            self.sends(number, asked, answered)
        elif what <= 4:
            self.step()
        elif what <= 6:
            self.hear_of_events()
        else:
            self.hear_of_an_end()

    def wrong(self) -> list[tuple[int, str]]:
        """The difference between prediction and truth in bytes, for every prompt so far."""
        prompts = [prompt for conversation in self.conversations for prompt in conversation.prompts]
        return [(error, prompt[1_000:1_020]) for prompt in prompts if (error := self.error_bytes(prompt))]


HAPPENINGS = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 4), st.integers(100, 3_000), st.integers(0, 600)),
    min_size=100,
    max_size=300,
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.data_too_large])
@given(HAPPENINGS, st.sampled_from([100, 250]))
def test_the_prediction_is_exact_once_all_events_have_arrived(
    happenings: list[tuple[int, int, int, int]], num_blocks: int
) -> None:
    setup = EngineAndIndex(num_blocks)
    for happening in happenings:
        setup.lets(happening)
    setup.come_to_rest()
    assert setup.wrong() == []
    assert setup.index.calls_attributed == setup.index.calls_finished


@pytest.mark.parametrize("num_blocks", [100, 150, 250])
def test_a_long_time_of_thrashing(num_blocks: int) -> None:
    setup, rng = EngineAndIndex(num_blocks), random.Random(1)
    for _ in range(4_000):
        setup.lets((rng.randrange(8), rng.randrange(5), rng.randrange(100, 3_000), rng.randrange(600)))
    setup.come_to_rest()
    assert setup.index.blocks_removed > 2_000
    assert setup.wrong() == []
    assert len(setup.index) == setup.pool.num_cached
