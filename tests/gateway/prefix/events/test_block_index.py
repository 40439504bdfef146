"""The index against a real block pool: what it believes of a prompt is what the pool still has of it."""

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
BYTES_PER_TOKEN = 5  # of this engine's tokenizer, which the index is not told
ROOMY = 1 << 30
SEED = 7


class Engine:
    """Prompts as texts; tokens are their slices. Tells a `BlockIndex` what a publisher would tell."""

    def __init__(self, index: BlockIndex, num_blocks: int, *, tells_sessions: bool = True) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_TOKENS, self)
        self.index = index
        self.tells_sessions = tells_sessions
        self.held_back: list[BlocksStored | BlocksRemoved] | None = None  # a list: events do not arrive yet

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
        if self.held_back is not None:
            self.held_back.append(event)
        elif isinstance(event, BlocksStored):
            self.index.stored(event)
        else:
            self.index.removed(event)

    def arrive(self) -> None:
        late, self.held_back = self.held_back or [], None
        for event in late:
            self._tell(event)

    def hashes(self, text: str) -> list[bytes]:
        tokens = [hash(text[i : i + BYTES_PER_TOKEN]) % 2**31 for i in range(0, len(text), BYTES_PER_TOKEN)]
        made: list[bytes] = []
        for i in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            made.append(hash_block(made[-1] if made else ROOT_HASH, tokens[i : i + BLOCK_TOKENS]))
        return made

    def serve(self, call_id: str, prompt: str, answer: str = "") -> FinishedCall:
        """Computes a prompt and its answer, as one request alone would."""
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


def believed_bytes(cache: CacheModel, text: str) -> int:
    return cache.match(chain(text)) * fingerprints.BLOCK_BYTES


def words(name: str, length: int) -> str:
    """A text of this length that is like no other name's."""
    return "".join(f"{name}{i:05}," for i in range(length // (len(name) + 6) + 1))[:length]


class EngineAndIndex:
    def __init__(self, num_blocks: int = 400, *, tells_sessions: bool = True) -> None:
        self.cache = CacheModel(ROOMY)
        self.index = BlockIndex(self.cache)
        self.engine = Engine(self.index, num_blocks, tells_sessions=tells_sessions)
        self._calls = 0

    def call(self, prompt: str, answer: str = "") -> None:
        self._calls += 1
        self.cache.add(chain(prompt))  # as the router does when it sends it
        self.index.call_finished(self.engine.serve(f"call-{self._calls}", prompt, answer))

    def error_bytes(self, text: str) -> int:
        """What is believed beyond the truth, or short of it; a part of a block of either kind is no error."""
        prediction, true = believed_bytes(self.cache, text), self.engine.cached_bytes(text)
        slack = fingerprints.BLOCK_BYTES + BLOCK_TOKENS * BYTES_PER_TOKEN
        return max(0, abs(prediction - true) - slack)


@pytest.fixture(params=[True, False], ids=["sessions", "no sessions"])
def setup(request: pytest.FixtureRequest) -> EngineAndIndex:
    return EngineAndIndex(tells_sessions=request.param)


def test_what_was_evicted_is_believed_to_be_gone(setup: EngineAndIndex) -> None:
    old, new = words("old", 20_000), words("new", 20_000)
    setup.call(old)
    assert believed_bytes(setup.cache, old) == 20_000 // 256 * 256
    setup.call(new)  # 400 blocks hold 32,000 bytes: the end of the old one goes
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


def test_nothing_is_told_of_what_was_all_there(setup: EngineAndIndex) -> None:
    setup.call(text := words("a", 5_010))
    setup.call(text)
    assert setup.index.calls_attributed == setup.index.calls_finished == 2
    assert len(setup.index._calls) == 0


def test_an_answer_that_became_a_prompt_is_followed(setup: EngineAndIndex) -> None:
    """Its blocks have no place in the text of the call that they came with."""
    question, answer = words("q", 3_000), words("answer", 6_000)
    setup.call(question, answer)
    setup.call(whole := question + answer + words("next", 1_000))
    setup.call(words("other", 26_000))
    assert setup.engine.cached_bytes(whole) < 8_000
    assert setup.error_bytes(whole) == 0


def test_events_may_come_after_the_end_of_their_call(setup: EngineAndIndex) -> None:
    old = words("old", 20_000)
    setup.engine.held_back = []
    setup.call(old)
    assert setup.index.calls_attributed == 0
    setup.engine.arrive()
    setup.call(words("new", 20_000))
    assert setup.index.calls_attributed == 2
    assert setup.error_bytes(old) == 0


def test_a_removal_that_crosses_a_computation_is_made_good(setup: EngineAndIndex) -> None:
    """The prompt was sent again while the news of its eviction was on the way: it is computed, and there."""
    old = words("old", 20_000)
    setup.call(old)
    setup.call(words("new", 31_000))
    setup.cache.add(chain(old))
    setup.engine.held_back = []
    ended = setup.engine.serve("again", old)
    setup.engine.arrive()
    setup.index.removed(BlocksRemoved((b"unknown",)))
    setup.index.call_finished(ended)
    assert setup.error_bytes(old) == 0


def test_two_paths_that_fit_two_calls_are_left_alone() -> None:
    setup = EngineAndIndex(tells_sessions=False)
    ended = [setup.engine.serve(name, words(name, 5_000)) for name in ("left", "right")]
    for call in ended:
        setup.cache.add(call.chain)
        setup.index.call_finished(call)
    assert setup.index.calls_attributed == 0
    setup.call(words("of another length", 6_000))
    assert setup.index.calls_attributed == 1


def test_all_is_gone_when_the_engine_says_so(setup: EngineAndIndex) -> None:
    setup.call(text := words("a", 5_000))
    setup.engine.pool.clear()
    assert believed_bytes(setup.cache, text) == 0
    assert len(setup.index) == 0
    setup.call(text)
    assert setup.error_bytes(text) == 0


def test_what_was_lost_leaves_the_model_as_it_is(setup: EngineAndIndex) -> None:
    setup.call(text := words("a", 5_000))
    setup.index.events_lost()
    assert len(setup.index) == 0
    assert believed_bytes(setup.cache, text) > 4_000


def test_a_path_whose_beginning_was_never_told() -> None:
    setup = EngineAndIndex()
    text = words("a", 10_000)
    setup.engine.serve("before the gateway was started", text[:5_000])
    setup.index.events_lost()
    setup.call(text)
    setup.call(words("b", 29_000))
    assert setup.engine.cached_bytes(text) < 5_000
    assert setup.error_bytes(text[:5_000]) <= setup.engine.cached_bytes(text[:5_000]) + 5_000  # soft, and no crash
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
            FinishedCall(f"{name} of which nothing is told", chain(words(name, 10_000)), 10_000, 2_000, 0, 1)
        )
    assert len(setup.index) == 50
    assert len(setup.index._known) <= 50 + 100
    assert len(setup.index._calls) == 2


def test_a_block_that_names_itself_as_its_parent_hangs_nothing() -> None:
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
    """Whatever is evicted: no prompt is believed to be warm where more than an edge of it is cold, nor cold where it
    is warm."""
    setup = EngineAndIndex(num_blocks=600)
    texts = {number: words("shared", 3_000) for number in range(6)}
    for i, (number, asked, answered) in enumerate(turns):
        texts[number] = (texts[number] + words(f"{number}-{i}", asked))[:30_000]
        if late:
            setup.engine.held_back = []
        setup.call(texts[number], answer := words(f"s{number}-{i}", answered))
        setup.engine.arrive()
        texts[number] = (texts[number] + answer)[:30_000]
        assert setup.index.calls_attributed == setup.index.calls_finished
    for text in texts.values():
        assert setup.error_bytes(text) <= 1_000  # an answer that was the last word so far is not believed yet
