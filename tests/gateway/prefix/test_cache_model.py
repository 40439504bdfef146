"""The cache model against a plain LRU of single blocks, and its predictions of evictions."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.prefix import cache_model
from gateway.prefix.cache_model import CacheModel
from gateway.prefix.cache_runs import CachePrediction
from gateway.prefix.fingerprint import BLOCK_TOKENS

Chain = tuple[int, ...]


def chain_of(text: str) -> Chain:
    """A block for each letter: its hash stands for all letters up to there."""
    return tuple(hash(text[: end + 1]) % 2**64 for end in range(len(text)))


class BlockLRU:
    """The same rules, block by block: the reference that the tree of runs must equal."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, chain: Sequence[int]) -> int:
        return next((depth for depth, block in enumerate(chain) if block not in self.blocks), len(chain))

    def add(self, chain: Sequence[int]) -> None:
        for block in reversed(chain[: self.capacity]):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)

    def touch(self, chain: Sequence[int]) -> None:
        for block in reversed(chain[: self.match(chain)]):
            self.blocks.move_to_end(block)

    def remove(self, chain: Sequence[int]) -> None:
        if chain and self.match(chain) == len(chain):
            for block, before in list(PARENTS.items()):
                if chain[-1] in before:
                    self.blocks.pop(block, None)


texts = st.text(alphabet="ab", min_size=1, max_size=9)
EVERY_TEXT = [""] + ["".join(t) for n in range(1, 10) for t in product("ab", repeat=n)]
PARENTS = {chain_of(text)[-1]: set(chain_of(text)) for text in EVERY_TEXT[1:]}


steps_of = st.lists(st.tuples(st.sampled_from(["add", "add", "add", "remove", "touch"]), texts), max_size=40)


@given(steps_of, st.integers(1, 15))
def test_the_model_equals_an_lru_of_single_blocks(steps: list[tuple[str, str]], capacity: int) -> None:
    model, plain = CacheModel(capacity * BLOCK_TOKENS), BlockLRU(capacity)
    prediction: dict[str, CachePrediction] = {}  # the newest of each text, current or not
    for step, text in steps:
        if step == "add":
            model.add(chain_of(text), prediction.get(text))
        else:
            getattr(model, step)(chain_of(text))
        getattr(plain, step)(chain_of(text))
        assert len(model) == len(plain.blocks)
        prediction[text] = model.predict(chain_of(text))
    for text in EVERY_TEXT:
        assert model.match(chain_of(text)) == plain.match(chain_of(text)), text


@given(steps_of, st.integers(1, 15))
def test_predicted_evictions_equal_real_ones(steps: list[tuple[str, str]], coming: int) -> None:
    model = CacheModel(100 * BLOCK_TOKENS)
    for step, text in steps:
        getattr(model, step)(chain_of(text))
    foreseen = {text: model.predict_after(chain_of(text), coming).matched for text in EVERY_TEXT}
    model.resize(max(1, len(model)) * BLOCK_TOKENS)
    model.add(range(coming))
    for text in EVERY_TEXT:
        assert model.match(chain_of(text)) == foreseen[text], text


def test_blocks_in_use_are_not_evicted() -> None:
    model = CacheModel(100 * BLOCK_TOKENS)
    model.add((1, 2, 3))
    pin = model.pin((1, 2, 3))
    model.add((7, 8, 9))
    assert model.predict_after((1, 2, 3), 2).matched == 3
    assert model.predict_after((7, 8, 9), 2).matched == 1
    model.add(range(100, 197))
    assert (model.match((1, 2, 3)), model.match((7, 8, 9))) == (3, 0)
    model.unpin(pin)
    model.add(range(200, 300))
    assert model.match((1, 2, 3)) == 0


def test_calls_that_do_not_fit_together_evict_what_the_first_of_them_used_when_it_ends() -> None:
    """An engine lets the last one wait until there is room. It does not compute it without its end."""
    model = CacheModel(10 * BLOCK_TOKENS)
    pins = {}
    for first in (100, 200, 300):
        model.add(range(first, first + 4))
        pins[first] = model.pin(range(first, first + 4))
    assert [model.match(range(first, first + 4)) for first in (100, 200, 300)] == [4, 4, 4]
    model.unpin(pins[200])
    model.touch(range(200, 204))
    assert [model.match(range(first, first + 4)) for first in (100, 200, 300)] == [4, 2, 4]


def test_evicted_blocks_are_a_loss_as_far_as_they_are_used_again() -> None:
    def reuse_share(age: float) -> float:
        return 1 / (1 + age)

    model = CacheModel(100 * BLOCK_TOKENS)
    model.add(range(10))
    model.add(range(100, 110))
    assert model.eviction_loss(0, 10, reuse_share) == 5
    assert model.eviction_loss(10, 10, reuse_share) == 10
    for _ in range(99):
        model.touch(range(100, 110))
    assert 0 < model.eviction_loss(0, 10, reuse_share) < 1
    assert model.eviction_loss(10, 10, reuse_share) == 10, "those before it have taken what is old"
    assert model.eviction_loss(0, 50, reuse_share) > 40, "there is not so much to drive out"


def test_a_prediction_says_when_its_blocks_were_last_used() -> None:
    model = CacheModel(100 * BLOCK_TOKENS)
    model.add((1, 2, 3, 4))
    model.add((1, 2, 7))
    assert model.predict((1, 2, 3, 9)).reused == ((0, 2), (1, 1))
    assert model.predict((8,)).reused == ()


def test_a_capacity_is_found_soon_and_then_kept() -> None:
    """Whatever was guessed. Replies that contradict each other afterwards hardly move it."""
    for guess in (20, 200, 2_000):
        model, engine = CacheModel(guess * BLOCK_TOKENS), CacheModel(200 * BLOCK_TOKENS)
        rng, capacities = random.Random(1), list[int]()
        for _ in range(600):
            first = rng.randrange(40) * 1000
            chain = tuple(range(first, first + 10))
            prediction, found = model.predict(chain), engine.match(chain)
            known = model.known_parts(prediction)
            for cache in (model, engine):
                cache.add(chain)
                cache.touch(chain)
            model.learn_cached(prediction, found, known)
            capacities.append(model.capacity)
        assert all(140 < capacity < 280 for capacity in capacities[250:]), (guess, capacities[250:])


def test_what_is_computed_again_may_not_be_there_yet() -> None:
    """A reply without those blocks says nothing of the capacity, as for blocks that are computed for the first time."""
    model = CacheModel(20 * BLOCK_TOKENS)
    chain = tuple(range(10))
    model.add(chain)
    model.touch(chain)
    model.add(range(100, 120))
    assert model.match(chain) == 0
    model.add(chain)
    model.learn_cached(model.predict(chain), 0)
    assert (model.match(chain), model.capacity) == (10, 20)


@given(st.lists(st.tuples(st.sampled_from(["send", "send", "end", "lose"]), texts), max_size=60), st.integers(1, 15))
def test_no_block_is_cached_without_those_before_it(steps: list[tuple[str, str]], capacity: int) -> None:
    """Whatever is in flight. The model holds more than its capacity only for calls in flight."""
    model, in_flight = CacheModel(capacity * BLOCK_TOKENS), dict[str, int]()
    for step, text in steps:
        chain = chain_of(text)
        if step == "send" and text not in in_flight:
            model.add(chain)
            in_flight[text] = model.pin(chain)
        elif step == "end" and text in in_flight:
            model.unpin(in_flight.pop(text))
            model.touch(chain)
        elif step == "lose":
            prediction = model.predict(chain)
            model.learn_cached(prediction, 0, model.known_parts(prediction))
        assert len(model) <= max(model.capacity, sum(map(len, in_flight)))
        assert len(model) == sum(model.match(chain_of(other)) == len(other) for other in EVERY_TEXT[1:])


@given(st.lists(st.tuples(st.sampled_from(["use", "end", "pin"]), st.integers(0, 5)), min_size=1, max_size=40))
def test_blocks_of_calls_in_flight_are_newer_than_a_prompt_that_was_used_before(steps: list[tuple[str, int]]) -> None:
    """Against a count over all calls in flight."""
    model, pins = CacheModel(20 * BLOCK_TOKENS), list[int]()
    for what, number in steps:
        chain = chain_of("abcdef"[: number + 1])
        if what == "end" and pins:
            model.unpin(pins.pop(number % len(pins)))
            continue
        model.add(chain)
        if what == "pin":
            pins.append(model.pin(chain))
    for clock in range(model.clock + 2):
        in_use = sum(blocks for used, blocks in model._in_use.items() if used < clock)
        assert model._reuse_distance(clock) == model._ages.newer_blocks(clock) + in_use


def test_a_chain_repeats_a_prompt_if_no_other_one_continues_what_it_has_of_it() -> None:
    model = CacheModel(100 * BLOCK_TOKENS)

    def repeats(*chain: int) -> bool:
        return model.predict(chain).repeats_prompt

    assert not repeats()
    model.add(range(16))
    assert repeats(*range(18))
    assert repeats(*range(16))
    assert repeats(*range(12), 100, 101), "clients edit ends"
    assert not repeats(*range(11), 100, 101)
    assert not repeats(100, 101)
    model.add((*range(8), *range(50, 58)))
    assert not repeats(*range(8), 100), "two have this in common"
    assert repeats(*range(18))
    model.resize(20 * BLOCK_TOKENS)
    assert not repeats(*range(18)), "its end was evicted"


def test_a_conversation_has_what_no_other_prompt_continues() -> None:
    model = CacheModel(100 * BLOCK_TOKENS)

    def own_part(*chain: int) -> int | None:
        return model.predict(chain).own_part

    assert own_part() is None
    model.add(range(16))
    assert own_part(*range(16)) == own_part(*range(18)) == 0
    assert own_part(*range(15), 100) == 0, "the last block was not full"
    assert own_part(*range(14), 100) is None, "another conversation with most of it"
    model.add((*range(8), *range(50, 58)))
    assert own_part(*range(18)) == 8
    assert own_part(*range(8)) is None, "two have it"
    model.resize(20 * BLOCK_TOKENS)
    assert own_part(*range(18)) is None, "its end was evicted"


def test_what_was_given_up_is_not_cached_and_teaches_nothing() -> None:
    model = CacheModel(100 * BLOCK_TOKENS)
    for chain in (range(16), (*range(8), *range(50, 58))):
        model.add(chain)
        model.touch(chain)
    model.give_up(range(18), 10)
    assert (model.match(range(18)), model.cached_blocks) == (10, 18)
    assert model.known_parts(model.predict(range(18)))[-1].blocks == 2, "of which a reply shows whether they are there"
    model.give_up(range(18), 4)
    assert model.match(range(18)) == 8, "the other one needs the beginning"
    model.give_up((1, 2, 3), 0)
    model.give_up((), 0)
    model.add((*range(8), *range(50, 58)))
    pin = model.pin((*range(8), *range(50, 58)))
    model.give_up((*range(8), *range(50, 58)), 8)
    assert model.match((*range(8), *range(50, 58))) == 16, "a call uses it"
    model.unpin(pin)
    model.give_up((*range(8), *range(50, 58)), 8)
    assert model.cached_blocks == 8
    model.add(range(18))
    assert model.match(range(18)) == 18, "it has come back"


def test_what_an_engine_reports_as_evicted_is_known_and_gone() -> None:
    """Known, so that it is noticed if conversations evict each other; gone, so that nothing expects it to be cached."""
    model = CacheModel(100 * BLOCK_TOKENS)
    model.add(range(16))
    model.add(range(100, 116))
    model.remove(range(11))
    found = model.predict(range(18))
    assert (found.matched, found.remembered, found.known) == (10, 10, 16)
    assert not found.repeats_prompt and found.own_part is None
    model.resize(200 * BLOCK_TOKENS)
    assert model.match(range(16)) == 10, "a larger capacity does not bring it back"
    model.resize(20 * BLOCK_TOKENS)
    assert (model.match(range(16)), model.match(range(100, 116))) == (4, 16), "what is left of it is as old as before"
    model.add(range(16))
    assert model.predict(range(16)).matched == 16, "it was computed again"


@given(steps_of, st.integers(1, 30))
def test_reuse_distances_count_what_takes_room(steps: list[tuple[str, str]], capacity: int) -> None:
    model = CacheModel(capacity * BLOCK_TOKENS)
    for method, text in steps:
        getattr(model, method)(chain_of(text))
    runs = [*model._cached, *(run for run in model._remembered if not run.is_gone)]
    assert sum(model._ages._blocks) == sum(len(run.blocks) for run in runs)
    assert model.cached_blocks == sum(len(run.blocks) for run in model._cached)
    assert model._remembered_blocks == sum(len(run.blocks) for run in model._remembered)


@given(st.lists(st.tuples(st.sampled_from(["add", "add", "remove", "touch", "give_up"]), texts)), st.integers(1, 6))
@example([("add", "ba"), ("add", "aa"), ("remove", "ba"), ("remove", "a")], 2)
def test_what_is_remembered_is_bounded(steps: list[tuple[str, str]], capacity: int) -> None:
    """Ends of chains are forgotten before their beginnings, in whatever order they were evicted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_model, "REMEMBERED_MIN_BLOCKS", 3)
        patch.setattr(cache_model, "REMEMBERED_FACTOR", 1)
        model = CacheModel(capacity * BLOCK_TOKENS)
        for method, text in steps:
            chain = chain_of(text)
            if method == "give_up":
                model.give_up(chain, len(chain) // 2)
            else:
                getattr(model, method)(chain)
        model.resize(capacity * BLOCK_TOKENS)  # makes room
        assert model._remembered_blocks <= max(3, capacity)
        assert model._remembered_blocks == sum(len(run.blocks) for run in model._remembered)
