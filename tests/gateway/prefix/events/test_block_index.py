"""The block index against a real block pool: its prediction for a prompt is what the pool still has of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.block_pool import BlockPool
from backend.engine.cached_block import ROOT_HASH, CachedBlock, hash_block
from gateway.prefix import fingerprint as fingerprints
from gateway.prefix.cache_model import CacheModel
from gateway.prefix.events import block_index
from gateway.prefix.events.base import BlocksRemoved, BlocksStored
from gateway.prefix.events.block_index import BlockIndex, FinishedCall

BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 5  # of this engine's tokenizer, which the index does not know
ROOMY = 1 << 30
SEED = 7


class Engine:
    """Prompts are texts, and tokens are slices of them. Sends a `BlockIndex` the events that a publisher would send."""

    def __init__(self, index: BlockIndex, num_blocks: int, *, tells_sessions: bool = True) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_TOKENS, self)
        self.index = index
        self.tells_sessions = tells_sessions
        self.delayed: list[BlocksStored | BlocksRemoved] | None = None  # a list while events are delayed

    def stored(self, block: CachedBlock) -> None:
        parent = None if block.parent == ROOT_HASH else block.parent
        self._tell(
            BlocksStored((block.block_hash,), parent, BLOCK_TOKENS, block.session_id if self.tells_sessions else "")
        )

    def removed(self, block_hash: bytes) -> None:
        self._tell(BlocksRemoved((block_hash,)))

    def cleared(self) -> None:
        self.index.cleared()

    def end_step(self) -> None:
        pass

    def _tell(self, event: BlocksStored | BlocksRemoved) -> None:
        if self.delayed is not None:
            self.delayed.append(event)
        elif isinstance(event, BlocksStored):
            self.index.stored(event)
        else:
            self.index.removed(event)

    def arrive(self) -> None:
        late, self.delayed = self.delayed or [], None
        for event in late:
            self._tell(event)

    def hashes(self, text: str) -> list[bytes]:
        tokens = [hash(text[i : i + BYTES_PER_TOKEN]) % 2**31 for i in range(0, len(text), BYTES_PER_TOKEN)]
        made: list[bytes] = []
        for i in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            made.append(hash_block(made[-1] if made else ROOT_HASH, tokens[i : i + BLOCK_TOKENS]))
        return made

    def serve(self, call_id: str, prompt: str, answer: str = "") -> FinishedCall:
        """Compute a prompt and its answer, as a single request."""
        prompt_tokens = -(-len(prompt) // BYTES_PER_TOKEN)
        answer_tokens = -(-len(answer) // BYTES_PER_TOKEN)
        reusable = (prompt_tokens - 1) // BLOCK_TOKENS
        cached = self.pool.find_cached_prefix(self.hashes(prompt)[:reusable])
        hashes = self.hashes(prompt + answer)
        table = self.pool.allocate(len(hashes) - len(cached), cached)
        assert table is not None
        for i in range(len(cached), len(hashes)):
            parent = hashes[i - 1] if i else ROOT_HASH
            self.pool.cache_block(table[i], CachedBlock(hashes[i], parent, (), "", call_id))
        self.pool.free(table)
        return FinishedCall(
            call_id, chain(prompt), len(prompt), prompt_tokens, len(cached) * BLOCK_TOKENS, answer_tokens + 1
        )

    def cached_bytes(self, text: str) -> int:
        return len(self.pool.find_cached_prefix(self.hashes(text))) * BLOCK_TOKENS * BYTES_PER_TOKEN


def chain(text: str) -> Sequence[int]:
    return fingerprints.fingerprint([text.encode()], SEED)


def predicted_bytes(cache: CacheModel, text: str) -> int:
    return cache.match(chain(text)) * fingerprints.BLOCK_BYTES


def words(name: str, length: int) -> str:
    """A text of this length, different for each name."""
    return "".join(f"{name}{i:05}," for i in range(length // (len(name) + 6) + 1))[:length]


class EngineAndIndex:
    def __init__(self, num_blocks: int = 400, *, tells_sessions: bool = True) -> None:
        self.cache = CacheModel(ROOMY)
        self.index = BlockIndex(self.cache)
        self.engine = Engine(self.index, num_blocks, tells_sessions=tells_sessions)
        self._calls = 0

    def call(self, prompt: str, answer: str = "") -> None:
        self._calls += 1
        self.cache.add(chain(prompt))  # as the router does when it sends the call
        self.index.call_finished(self.engine.serve(f"call-{self._calls}", prompt, answer))

    def error_bytes(self, text: str) -> int:
        """The difference between prediction and truth. A part of a text block or of a token block is no error."""
        prediction, true = predicted_bytes(self.cache, text), self.engine.cached_bytes(text)
        slack = fingerprints.BLOCK_BYTES + BLOCK_TOKENS * BYTES_PER_TOKEN
        return max(0, abs(prediction - true) - slack)


@pytest.fixture(params=[True, False], ids=["sessions", "no sessions"])
def setup(request: pytest.FixtureRequest) -> EngineAndIndex:
    return EngineAndIndex(tells_sessions=request.param)


def test_evicted_blocks_leave_the_cache_model(setup: EngineAndIndex) -> None:
    old, new = words("old", 20_000), words("new", 20_000)
    setup.call(old)
    assert predicted_bytes(setup.cache, old) == 20_000 // 256 * 256
    setup.call(new)  # 400 blocks hold 32,000 bytes: the end of the old text is evicted
    assert setup.index.calls_attributed == 2
    assert 10_000 < setup.engine.cached_bytes(old) < 14_000
    assert setup.error_bytes(old) == setup.error_bytes(new) == 0


def test_a_conversation_shares_its_beginning(setup: EngineAndIndex) -> None:
    system = words("system", 6_000)
    for name in ("a", "b", "c"):
        text = system
        for turn in range(3):
            text += words(f"{name}{turn}", 2_500)
            setup.call(text, answer := words(f"says{name}{turn}", 300))
            text += answer
    for name in ("a", "b", "c"):
        assert setup.error_bytes(system + words(f"{name}0", 2_500)) == 0
    assert setup.index.calls_attributed == 9


def test_a_fully_cached_prompt_has_no_events(setup: EngineAndIndex) -> None:
    setup.call(text := words("a", 5_010))
    setup.call(text)
    assert setup.index.calls_attributed == setup.index.calls_finished == 2
    assert len(setup.index._calls) == 0


def test_an_answer_that_the_next_prompt_repeats_is_attributed(setup: EngineAndIndex) -> None:
    """Its blocks are behind the prompt of the call that computed them."""
    question, answer = words("q", 3_000), words("answer", 6_000)
    setup.call(question, answer)
    setup.call(whole := question + answer + words("next", 1_000))
    setup.call(words("other", 26_000))
    assert setup.engine.cached_bytes(whole) < 8_000
    assert setup.error_bytes(whole) == 0


def test_events_may_come_after_the_end_of_their_call(setup: EngineAndIndex) -> None:
    old = words("old", 20_000)
    setup.engine.delayed = []
    setup.call(old)
    assert setup.index.calls_attributed == 0
    setup.engine.arrive()
    setup.call(words("new", 20_000))
    assert setup.index.calls_attributed == 2
    assert setup.error_bytes(old) == 0


def test_a_late_eviction_event_does_not_remove_a_recomputed_prompt(setup: EngineAndIndex) -> None:
    """The prompt was sent again before its eviction event arrived. It was computed again, so it is cached."""
    old = words("old", 20_000)
    setup.call(old)
    setup.call(words("new", 31_000))
    setup.cache.add(chain(old))
    setup.engine.delayed = []
    ended = setup.engine.serve("again", old)
    setup.engine.arrive()
    setup.index.removed(BlocksRemoved((b"unknown",)))
    setup.index.call_finished(ended)
    assert setup.error_bytes(old) == 0


def test_ambiguous_paths_are_not_attributed() -> None:
    setup = EngineAndIndex(tells_sessions=False)
    ended = [setup.engine.serve(name, words(name, 5_000)) for name in ("left", "right")]
    for call in ended:
        setup.cache.add(call.chain)
        setup.index.call_finished(call)
    assert setup.index.calls_attributed == 0
    setup.call(words("of another length", 6_000))
    assert setup.index.calls_attributed == 1


def test_a_cleared_event_empties_the_cache_model(setup: EngineAndIndex) -> None:
    setup.call(text := words("a", 5_000))
    setup.engine.pool.clear()
    assert predicted_bytes(setup.cache, text) == 0
    assert len(setup.index) == 0
    setup.call(text)
    assert setup.error_bytes(text) == 0


def test_lost_events_leave_the_cache_model_unchanged(setup: EngineAndIndex) -> None:
    setup.call(text := words("a", 5_000))
    setup.index.events_lost()
    assert len(setup.index) == 0
    assert predicted_bytes(setup.cache, text) > 4_000


def test_a_path_whose_beginning_was_never_reported() -> None:
    setup = EngineAndIndex()
    text = words("a", 10_000)
    setup.engine.serve("before the gateway was started", text[:5_000])
    setup.index.events_lost()
    setup.call(text)
    setup.call(words("b", 29_000))
    assert setup.engine.cached_bytes(text) < 5_000
    assert setup.error_bytes(text[:5_000]) <= setup.engine.cached_bytes(text[:5_000]) + 5_000  # no crash
    setup.call(text)
    assert setup.error_bytes(text) == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_index, "BLOCKS_MAX", 50)
    monkeypatch.setattr(block_index, "GONE_MAX", 100)
    monkeypatch.setattr(block_index, "CALLS_MAX", 2)
    setup = EngineAndIndex()
    for name in "abcdef":
        setup.engine.serve(f"of another gateway: {name}", words(name, 10_000))
        setup.index.call_finished(
            FinishedCall(f"{name} without events", chain(words(name, 10_000)), 10_000, 2_000, 0, 1)
        )
    assert len(setup.index) == 50
    assert len(setup.index._known) <= 50 + 100
    assert len(setup.index._calls) == 2


def test_a_block_that_is_its_own_parent_does_not_loop() -> None:
    index = BlockIndex(CacheModel(ROOMY))
    index.stored(BlocksStored((1,), 1, BLOCK_TOKENS))
    index.stored(BlocksStored((1,), 1, BLOCK_TOKENS, "call"))
    index.call_finished(FinishedCall("call", (1, 2), 600, 100, 0, 10))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(200, 3_000), st.integers(0, 900)), max_size=40),
    st.booleans(),
)
def test_any_mix_of_conversations(turns: list[tuple[int, int, int]], late: bool) -> None:
    """After any evictions, no prompt's prediction differs from the truth by more than an edge."""
    setup = EngineAndIndex(num_blocks=600)
    texts = {number: words("shared", 3_000) for number in range(6)}
    for i, (number, asked, answered) in enumerate(turns):
        texts[number] = (texts[number] + words(f"{number}-{i}", asked))[:30_000]
        if late:
            setup.engine.delayed = []
        setup.call(texts[number], answer := words(f"s{number}-{i}", answered))
        setup.engine.arrive()
        texts[number] = (texts[number] + answer)[:30_000]
        assert setup.index.calls_attributed == setup.index.calls_finished
    for text in texts.values():
        assert setup.error_bytes(text) <= 1_000  # the newest answer is not predicted yet
