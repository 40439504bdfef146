"""The index against a real block pool: what it believes of a prompt is what the pool still has of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.block_pool import ROOT_HASH, BlockPool, CachedBlock, hash_block
from gateway.prefix import fingerprint as fingerprints
from gateway.prefix.cache_model import CacheModel
from gateway.prefix.events import blocks
from gateway.prefix.events.base import Removed, Stored
from gateway.prefix.events.blocks import BlockIndex, Ended

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
        self.held_back: list[Stored | Removed] | None = None  # a list: events do not arrive yet

    def stored(self, block: CachedBlock) -> None:
        parent = None if block.parent == ROOT_HASH else block.parent
        self._tell(Stored((block.block_hash,), parent, BLOCK_TOKENS, block.session_id if self.tells_sessions else ""))

    def removed(self, block_hash: bytes) -> None:
        self._tell(Removed((block_hash,)))

    def cleared(self) -> None:
        self.index.cleared()

    def step_over(self) -> None:
        pass

    def _tell(self, event: Stored | Removed) -> None:
        if self.held_back is not None:
            self.held_back.append(event)
        elif isinstance(event, Stored):
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

    def serve(self, call_id: str, prompt: str, answer: str = "") -> Ended:
        """Computes a prompt and its answer, as one request alone would."""
        prompt_tokens = -(-len(prompt) // BYTES_PER_TOKEN)
        answer_tokens = -(-len(answer) // BYTES_PER_TOKEN)
        reusable = (prompt_tokens - 1) // BLOCK_TOKENS
        cached = self.pool.match(self.hashes(prompt)[:reusable])
        hashes = self.hashes(prompt + answer)
        table = self.pool.allocate(len(hashes) - len(cached), cached)
        assert table is not None
        for i in range(len(cached), len(hashes)):
            parent = hashes[i - 1] if i else ROOT_HASH
            self.pool.publish(table[i], CachedBlock(hashes[i], parent, (), "", call_id))
        self.pool.release(table)
        return Ended(call_id, chain(prompt), len(prompt), prompt_tokens, len(cached) * BLOCK_TOKENS, answer_tokens + 1)

    def cached_bytes(self, text: str) -> int:
        return len(self.pool.match(self.hashes(text))) * BLOCK_TOKENS * BYTES_PER_TOKEN


def chain(text: str) -> Sequence[int]:
    return fingerprints.fingerprint([text.encode()], SEED)


def believed_bytes(cache: CacheModel, text: str) -> int:
    return cache.match(chain(text)) * fingerprints.BLOCK_BYTES


def words(name: str, length: int) -> str:
    """A text of this length that is like no other name's."""
    return "".join(f"{name}{i:05}," for i in range(length // (len(name) + 6) + 1))[:length]


class House:
    def __init__(self, num_blocks: int = 400, *, tells_sessions: bool = True) -> None:
        self.cache = CacheModel(ROOMY)
        self.index = BlockIndex(self.cache)
        self.engine = Engine(self.index, num_blocks, tells_sessions=tells_sessions)
        self._calls = 0

    def call(self, prompt: str, answer: str = "") -> None:
        self._calls += 1
        self.cache.add(chain(prompt))  # as the router does when it sends it
        self.index.ended(self.engine.serve(f"call-{self._calls}", prompt, answer))

    def error_bytes(self, text: str) -> int:
        """What is believed beyond the truth, or short of it; a part of a block of either kind is no error."""
        believed, true = believed_bytes(self.cache, text), self.engine.cached_bytes(text)
        slack = fingerprints.BLOCK_BYTES + BLOCK_TOKENS * BYTES_PER_TOKEN
        return max(0, abs(believed - true) - slack)


@pytest.fixture(params=[True, False], ids=["sessions", "no sessions"])
def house(request: pytest.FixtureRequest) -> House:
    return House(tells_sessions=request.param)


def test_what_was_evicted_is_believed_to_be_gone(house: House) -> None:
    old, new = words("old", 20_000), words("new", 20_000)
    house.call(old)
    assert believed_bytes(house.cache, old) == 20_000 // 256 * 256
    house.call(new)  # 400 blocks hold 32,000 bytes: the end of the old one goes
    assert house.index.calls_attributed == 2
    assert 10_000 < house.engine.cached_bytes(old) < 14_000
    assert house.error_bytes(old) == house.error_bytes(new) == 0


def test_a_conversation_shares_its_beginning(house: House) -> None:
    system = words("system", 6_000)
    for name in ("a", "b", "c"):
        text = system
        for turn in range(3):
            text += words(f"{name}{turn}", 2_500)
            house.call(text, answer := words(f"says{name}{turn}", 300))
            text += answer
    for name in ("a", "b", "c"):
        assert house.error_bytes(system + words(f"{name}0", 2_500)) == 0
    assert house.index.calls_attributed == 9


def test_nothing_is_told_of_what_was_all_there(house: House) -> None:
    house.call(text := words("a", 5_010))
    house.call(text)
    assert house.index.calls_attributed == house.index.calls_ended == 2
    assert len(house.index._calls) == 0


def test_an_answer_that_became_a_prompt_is_followed(house: House) -> None:
    """Its blocks have no place in the text of the call that they came with."""
    question, answer = words("q", 3_000), words("answer", 6_000)
    house.call(question, answer)
    house.call(whole := question + answer + words("next", 1_000))
    house.call(words("other", 26_000))
    assert house.engine.cached_bytes(whole) < 8_000
    assert house.error_bytes(whole) == 0


def test_events_may_come_after_the_end_of_their_call(house: House) -> None:
    old = words("old", 20_000)
    house.engine.held_back = []
    house.call(old)
    assert house.index.calls_attributed == 0
    house.engine.arrive()
    house.call(words("new", 20_000))
    assert house.index.calls_attributed == 2
    assert house.error_bytes(old) == 0


def test_a_removal_that_crosses_a_computation_is_made_good(house: House) -> None:
    """The prompt was sent again while the news of its eviction was on the way: it is computed, and there."""
    old = words("old", 20_000)
    house.call(old)
    house.call(words("new", 31_000))
    house.cache.add(chain(old))
    house.engine.held_back = []
    ended = house.engine.serve("again", old)
    house.engine.arrive()
    house.index.removed(Removed((b"unknown",)))
    house.index.ended(ended)
    assert house.error_bytes(old) == 0


def test_two_paths_that_fit_two_calls_are_left_alone() -> None:
    house = House(tells_sessions=False)
    ended = [house.engine.serve(name, words(name, 5_000)) for name in ("left", "right")]
    for call in ended:
        house.cache.add(call.chain)
        house.index.ended(call)
    assert house.index.calls_attributed == 0
    house.call(words("of another length", 6_000))
    assert house.index.calls_attributed == 1


def test_all_is_gone_when_the_engine_says_so(house: House) -> None:
    house.call(text := words("a", 5_000))
    house.engine.pool.clear()
    assert believed_bytes(house.cache, text) == 0
    assert len(house.index) == 0
    house.call(text)
    assert house.error_bytes(text) == 0


def test_what_was_lost_leaves_the_model_as_it_is(house: House) -> None:
    house.call(text := words("a", 5_000))
    house.index.lost()
    assert len(house.index) == 0
    assert believed_bytes(house.cache, text) > 4_000


def test_a_path_whose_beginning_was_never_told() -> None:
    house = House()
    text = words("a", 10_000)
    house.engine.serve("before the gateway was started", text[:5_000])
    house.index.lost()
    house.call(text)
    house.call(words("b", 29_000))
    assert house.engine.cached_bytes(text) < 5_000
    assert house.error_bytes(text[:5_000]) <= house.engine.cached_bytes(text[:5_000]) + 5_000  # soft, and no crash
    house.call(text)
    assert house.error_bytes(text) == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCKS_MAX", 50)
    monkeypatch.setattr(blocks, "GONE_MAX", 100)
    monkeypatch.setattr(blocks, "CALLS_MAX", 2)
    house = House()
    for name in "abcdef":
        house.engine.serve(f"of another gateway: {name}", words(name, 10_000))
        house.index.ended(Ended(f"{name} of which nothing is told", chain(words(name, 10_000)), 10_000, 2_000, 0, 1))
    assert len(house.index) == 50
    assert len(house.index._known) <= 50 + 100
    assert len(house.index._calls) == 2


def test_a_block_that_names_itself_as_its_parent_hangs_nothing() -> None:
    index = BlockIndex(CacheModel(ROOMY))
    index.stored(Stored((1,), 1, BLOCK_TOKENS))
    index.stored(Stored((1,), 1, BLOCK_TOKENS, "call"))
    index.ended(Ended("call", (1, 2), 600, 100, 0, 10))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(200, 3_000), st.integers(0, 900)), max_size=40),
    st.booleans(),
)
def test_any_mix_of_conversations(turns: list[tuple[int, int, int]], late: bool) -> None:
    """Whatever is evicted: no prompt is believed to be warm where more than an edge of it is cold, nor cold where it
    is warm."""
    house = House(num_blocks=600)
    texts = {number: words("shared", 3_000) for number in range(6)}
    for i, (number, asked, answered) in enumerate(turns):
        texts[number] = (texts[number] + words(f"{number}-{i}", asked))[:30_000]
        if late:
            house.engine.held_back = []
        house.call(texts[number], answer := words(f"s{number}-{i}", answered))
        house.engine.arrive()
        texts[number] = (texts[number] + answer)[:30_000]
        assert house.index.calls_attributed == house.index.calls_ended
    for text in texts.values():
        assert house.error_bytes(text) <= 1_000  # an answer that was the last word so far is not believed yet
