"""Model of one deployment's prefix cache: predicts which prefixes of a prompt the engine has cached.

The model holds the prompts that were sent to the deployment and evicts least recently used blocks first, as engines do.

A chain is a fingerprint: a sequence of hashes, each of which stands for its block and everything before it. Equal
hashes mean equal prefixes. So the chains form a tree, stored as *runs*: blocks that always occurred together. A lookup
takes as many steps as the prompt has branches, not blocks. Runs are kept in order of use. A use touches a chain from
its end to its beginning, as engines do, so a run is never older than the runs behind it.

Evicted runs are remembered (a ghost list), up to `REMEMBERED_FACTOR` times the capacity, or `REMEMBERED_MIN_BLOCKS` if
that is more. If a deployment still has one of them cached, its cache is larger than the model assumed.

Responses teach the capacity (`learn_cached`), KV events correct the content (`add`, `remove`, `clear`), and a capacity
that the engine reports replaces the learned one (`resize`). Memory is bounded by the capacity: about 10 bytes per
block, times `1 + REMEMBERED_FACTOR`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence

import msgspec

from gateway.prefix.fingerprint import BLOCK_TOKENS

REMEMBERED_FACTOR = 3  # times the capacity: evicted blocks that are remembered
REMEMBERED_MIN_BLOCKS = 32_768  # remembered at least, so that a capacity is found that was guessed much too small
SHRINK_AT_MOST = 0.1  # of the learned capacity, per response: a restarted engine has lost its content, not its size
GROW_AT_MOST = 0.5  # of the learned capacity, per response: a hit on evicted blocks proves that it is larger
CHANGE_AT_LEAST = 0.02  # of the learned capacity, per response that suggests another one
CHANGE_FACTOR = 2.0  # between a change of the learned capacity and the next one
CAPACITY_MAX_TOKENS = 64_000_000  # upper bound of a learned capacity


class _Run:
    """Consecutive blocks of a chain without a branch.

    `last_used` is the model's clock at their last use. The first `settled_blocks` were certainly computed: `settled` is
    the clock when the last call that used them ended. `evicted_at` is the model's count of evicted blocks when
    these were evicted.
    """

    __slots__ = (
        "blocks", "children", "evicted_at", "is_cached", "last_used", "parent", "settled", "settled_blocks",
    )  # fmt: skip

    def __init__(self, parent: _Run | None, blocks: array[int], last_used: int) -> None:
        self.parent = parent
        self.blocks = blocks  # hashes of 64 bits; as objects they would take six times as much memory
        self.children: dict[int, _Run] = {}  # by their first block
        self.last_used = last_used
        self.settled = 0
        self.settled_blocks = 0
        self.evicted_at = 0
        self.is_cached = True  # False: evicted, and only remembered


_Walk = tuple[list[_Run], int, int]
"""A chain's path through the tree: its runs, how many of the chain's blocks they cover, and how many blocks of the last
run belong to the chain if not all of them do (else 0)."""


class CachePrediction(msgspec.Struct, frozen=True, gc=False):
    """What the model predicted for a chain at one moment. All lengths are in blocks.

    The first `matched` blocks are predicted to be cached. The blocks from there to `remembered` are known, but evicted.
    `ages` has entries for each run on the chain's path: where the run, or its settled part, ends in the chain, and its
    `settled`, which is 0 for blocks that may not be computed yet; for an evicted run, how many blocks have been evicted
    since. `version` is the model's version: while it is unchanged, the prediction and its `walk` are current.

    `reused` has, for each run, how many uses of the model ago it was last used, and how many of its blocks the chain
    has.
    """

    matched: int
    remembered: int
    ages: tuple[tuple[int, int], ...]
    version: int
    walk: _Walk | None = None
    reused: tuple[tuple[int, int], ...] = ()


class CacheModel:
    """A bounded tree of chains in order of use. Lengths are in blocks unless a name says tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity = _blocks(capacity_tokens)
        self._root = _Run(None, array("Q"), 0)
        self._cached: OrderedDict[_Run, None] = OrderedDict()  # cached runs, least recently used first
        self._remembered: OrderedDict[_Run, None] = OrderedDict()  # evicted runs, first evicted first
        self._cached_blocks = 0
        self._remembered_blocks = 0
        self._evicted_blocks = 0  # in total, ever
        self.clock = 0  # counts uses: each `add` and `touch`
        self.version = 0  # counts changes of any kind
        self.removals = 0  # counts chains that `remove` has removed
        self._capacity_reported = False
        self._last_change = 0.0  # of the learned capacity, as a share of it; negative if it shrank

    def __len__(self) -> int:
        return self._cached_blocks

    @property
    def capacity_tokens(self) -> int:
        """The capacity in fingerprint tokens."""
        return self.capacity * BLOCK_TOKENS

    def match(self, chain: Sequence[int]) -> int:
        """How many leading blocks are predicted to be cached. Changes nothing."""
        matched = 0
        path, depth, _ = self._walk(chain)
        for run in path:
            if not run.is_cached:  # an engine cannot use blocks behind a missing one
                return matched
            matched += len(run.blocks)
        return min(matched, depth)

    def known_blocks(self, chain: Sequence[int]) -> int:
        """How many leading blocks are known, cached or only remembered. Changes nothing."""
        return self._walk(chain)[1]

    def predict(self, chain: Sequence[int]) -> CachePrediction:
        """What is cached of a chain now, in the detail that `learn_cached` needs. Changes nothing."""
        return self._predict(chain, {})

    def predict_after(self, chain: Sequence[int], evictions: int, in_use: Container[int]) -> CachePrediction:
        """What will be cached of a chain after `evictions` blocks have been evicted. Changes nothing.

        Runs whose last use is in `in_use` belong to calls in flight and are not evicted.
        """
        return self._predict(chain, self._victims(evictions, in_use))

    def _predict(self, chain: Sequence[int], leaving: Mapping[_Run, int]) -> CachePrediction:
        walk = self._walk(chain)
        path, depth, _ = walk
        if not path:
            return CachePrediction(0, 0, (), self.version, walk)
        matched, end = 0, 0
        ages: list[tuple[int, int]] = []
        reused: list[tuple[int, int]] = []
        for run in path:
            length = len(run.blocks)
            staying = (length - leaving.get(run, 0) if leaving else length) if run.is_cached else 0
            if matched == end:
                matched = min(end + staying, depth)
            if not run.is_cached:
                ages.append((min(end + length, depth), self._evicted_blocks - run.evicted_at))
            else:
                if run.settled_blocks:
                    ages.append((min(end + run.settled_blocks, depth), run.settled))
                if run.settled_blocks < length:
                    ages.append((min(end + length, depth), 0))
            reused.append((self.clock - run.last_used, min(length, depth - end)))
            end = min(end + length, depth)
        return CachePrediction(matched, depth, tuple(ages), self.version, walk, tuple(reused))

    def _victims(self, blocks: int, in_use: Container[int]) -> dict[_Run, int]:
        """The runs that are evicted next, for so many blocks, and how many blocks of each."""
        leaving: dict[_Run, int] = {}
        for run in self._cached:
            if blocks <= 0:
                break
            if run.last_used not in in_use:
                leaving[run] = min(blocks, len(run.blocks))
                blocks -= len(run.blocks)
        return leaving

    def eviction_loss(
        self,
        evictions: int,
        blocks: int,
        in_use: Container[int],
        reuse_share: Callable[[float], float],
        idle_uses: float = 0.0,
    ) -> float:
        """How many evicted blocks will be wanted again, as an expected number, if `blocks` more are evicted.

        The first `evictions` blocks are evicted before and do not count; runs in `in_use` are never evicted. Evicted
        blocks count `reuse_share(age + idle_uses)`, where `age` is how many uses ago they were last used. Blocks for
        which nothing can be evicted count fully. `idle_uses` is how many times the deployment would have been used
        since its last call, had the calls continued at the former rate: it lets an idle deployment's content age.
        """
        lost_blocks = 0.0
        for run in self._cached:
            if blocks <= 0:
                return lost_blocks
            if run.last_used in in_use:
                continue
            leaving = max(0, min(len(run.blocks) - evictions, blocks))
            evictions = max(0, evictions - len(run.blocks))
            if leaving:
                blocks -= leaving
                lost_blocks += leaving * reuse_share(self.clock - run.last_used + idle_uses)
        return lost_blocks + blocks

    def touch(self, chain: Sequence[int]) -> None:
        """A call ended that used this chain: what is cached of it is the most recently used now."""
        self.clock += 1
        self.version += 1
        path, _, cut = self._walk(chain)
        if cut and path[-1].is_cached:
            path[-1] = self._split(path[-1], cut)
        for run in reversed(path):
            if run.is_cached:
                self._mark_used(run)
                run.settled, run.settled_blocks = self.clock, len(run.blocks)

    def add(self, chain: Sequence[int], prediction: CachePrediction | None = None) -> None:
        """The deployment computes this chain, or has computed it: it is cached, and the most recently used now.

        `prediction` is the model's prediction for the chain. If it is current, it saves the lookup.
        """
        if len(chain) > self.capacity:
            chain, prediction = chain[: self.capacity], None
        if prediction is None or prediction.walk is None or prediction.version != self.version:
            path, depth, cut = self._walk(chain)
        else:
            runs, depth, cut = prediction.walk
            path = [*runs]
        self.clock += 1
        self.version += 1
        if cut:  # the chain branches off or ends within the last run
            path[-1] = self._split(path[-1], cut)
        if depth < len(chain):
            self._grow(path, array("Q", chain[depth:]))
        for run in reversed(path):
            self._mark_used(run)
        self._make_room()

    def _grow(self, path: list[_Run], rest: array[int]) -> None:
        """Append unknown blocks: to the last run if nothing continues it, or as a new run behind it."""
        tip = path[-1] if path else self._root
        if tip.children or tip is self._root:
            run = tip.children[rest[0]] = _Run(tip, rest, self.clock)
            self._cached[run] = None
            path.append(run)
        else:
            self._mark_used(tip)  # before it grows, because `_mark_used` counts its blocks
            tip.blocks += rest
        self._cached_blocks += len(rest)

    def remove(self, chain: Sequence[int]) -> None:
        """The last block of this chain was evicted, and with it every block that continues it."""
        path, depth, _ = self._walk(chain)
        if not chain or depth < len(chain):
            return
        self.version += 1
        self.removals += 1
        tip, before = path[-1], sum(len(run.blocks) for run in path[:-1])
        # An engine cannot use a block whose predecessor is gone, so the whole subtree goes.
        removed_runs = list(tip.children.values())
        for run in removed_runs:
            removed_runs.extend(run.children.values())
        for run in reversed(removed_runs):
            self._drop(run)
        kept_blocks = len(chain) - before - 1
        if not kept_blocks:
            self._drop(tip)
            return
        self._change_count(tip, kept_blocks - len(tip.blocks))
        del tip.blocks[kept_blocks:]
        tip.settled_blocks = min(tip.settled_blocks, kept_blocks)

    def clear(self) -> None:
        """The engine was restarted, or dropped its cache. Its capacity is unchanged."""
        self.version += 1
        self._root.children.clear()
        self._cached.clear()
        self._remembered.clear()
        self._cached_blocks = self._remembered_blocks = 0

    def resize(self, capacity_tokens: int) -> None:
        """The engine reported its capacity. From now on, responses no longer change it."""
        self.version += 1
        self.capacity = _blocks(capacity_tokens)
        self._capacity_reported = True
        self._make_room()

    def learn_cached(self, prediction: CachePrediction, reported_blocks: int) -> None:
        """Correct the model: a response reported `reported_blocks` of a prompt as cached, instead of `prediction`.

        If fewer blocks were cached than predicted, everything that was used before the first missing run is taken to be
        evicted, and the capacity to be smaller. That shows nothing if no call that used the missing run has ended: it
        may still be computed. If more blocks were cached, evicted blocks were still there: the capacity holds them, and
        what was used since.

        The order in which an engine evicts is known only roughly, so single responses contradict each other. A change
        is at most `CHANGE_FACTOR` times the last one, or a part of it if the last one went in the other direction. So
        a capacity that is far off is found soon, and one that is right is kept.
        """
        if reported_blocks < prediction.matched:
            settled = next(settled for end, settled in prediction.ages if end > reported_blocks)
            if not settled:
                return
            self.version += 1
            self._evict_older(settled)
            # What is still cached after the eviction fits, so the capacity is at least that.
            self._learn_capacity(max(self._cached_blocks, 1), SHRINK_AT_MOST, grows=False)
        elif prediction.matched < reported_blocks:
            self.version += 1
            evicted = [since for end, since in prediction.ages if prediction.matched < end <= reported_blocks]
            if evicted:
                self._learn_capacity(self._cached_blocks + max(evicted), GROW_AT_MOST, grows=True)

    def _learn_capacity(self, evident_blocks: int, at_most: float, *, grows: bool) -> None:
        """Change the capacity towards the one that a response suggests, by a share of it, `at_most`."""
        last = self._last_change
        if self._capacity_reported or grows == (evident_blocks <= self.capacity):
            return
        share = abs(last) * CHANGE_FACTOR if (last > 0) == grows else abs(last) / CHANGE_FACTOR
        share = min(max(share, CHANGE_AT_LEAST), at_most)
        self._last_change = share if grows else -share
        change = min(abs(evident_blocks - self.capacity), max(1, int(share * self.capacity)))
        capacity = self.capacity + (change if grows else -change)
        self.capacity = min(max(1, capacity), CAPACITY_MAX_TOKENS // BLOCK_TOKENS)
        self._make_room()

    def _walk(self, chain: Sequence[int]) -> _Walk:
        path: list[_Run] = []
        run, depth, length = self._root, 0, len(chain)
        while depth < length and (child := run.children.get(chain[depth])) is not None:
            path.append(child)
            end = depth + len(child.blocks)
            if end > length or chain[end - 1] != child.blocks[-1]:
                cut = _common_blocks(child.blocks, chain, depth)
                return path, depth + cut, cut
            run, depth = child, end
        return path, depth, 0

    def _split(self, run: _Run, length: int) -> _Run:
        """Cut a run after `length` blocks. `run` itself becomes the tail and keeps its place in the order."""
        assert run.parent is not None
        head = _Run(run.parent, run.blocks[:length], run.last_used)
        head.is_cached, head.evicted_at, head.settled = run.is_cached, run.evicted_at, run.settled
        head.settled_blocks = min(run.settled_blocks, length)
        run.settled_blocks -= head.settled_blocks
        run.parent.children[head.blocks[0]] = head
        run.parent = head
        del run.blocks[:length]
        head.children[run.blocks[0]] = run
        (self._cached if head.is_cached else self._remembered)[head] = None
        return head

    def _mark_used(self, run: _Run) -> None:
        run.last_used = self.clock
        if run.is_cached:
            self._cached.move_to_end(run)
            return
        run.is_cached = True
        run.settled = run.settled_blocks = 0  # it is computed again, and was not for longer than the call takes
        del self._remembered[run]
        self._cached[run] = None
        self._remembered_blocks -= len(run.blocks)
        self._cached_blocks += len(run.blocks)

    def _make_room(self) -> None:
        while self._cached_blocks > self.capacity:
            run = next(iter(self._cached))
            excess = self._cached_blocks - self.capacity
            if excess < len(run.blocks):  # evict its end; its beginning stays the oldest
                head = self._split(run, len(run.blocks) - excess)
                self._cached.move_to_end(head, last=False)
            self._evict(run)
        while self._remembered_blocks > max(REMEMBERED_FACTOR * self.capacity, REMEMBERED_MIN_BLOCKS):
            self._drop(next(iter(self._remembered)))

    def _evict_older(self, last_used: int) -> None:
        """Evict everything that was last used at that time or earlier."""
        while self._cached and (run := next(iter(self._cached))).last_used <= last_used:
            self._evict(run)

    def _evict(self, run: _Run) -> None:
        run.is_cached = False
        self._evicted_blocks += len(run.blocks)
        run.evicted_at = self._evicted_blocks
        del self._cached[run]
        self._remembered[run] = None
        self._cached_blocks -= len(run.blocks)
        self._remembered_blocks += len(run.blocks)

    def _drop(self, run: _Run) -> None:
        """Forget a run that no other run continues."""
        assert run.parent is not None and not run.children
        del run.parent.children[run.blocks[0]]
        del (self._cached if run.is_cached else self._remembered)[run]
        self._change_count(run, -len(run.blocks))

    def _change_count(self, run: _Run, blocks: int) -> None:
        if run.is_cached:
            self._cached_blocks += blocks
        else:
            self._remembered_blocks += blocks


def _blocks(tokens: int) -> int:
    return max(1, tokens // BLOCK_TOKENS)


def _common_blocks(blocks: Sequence[int], chain: Sequence[int], start: int) -> int:
    """How many blocks of a run the chain contains from `start` on. The first one is known to be equal."""
    low, high = 1, min(len(blocks), len(chain) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if chain[start + middle - 1] == blocks[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
