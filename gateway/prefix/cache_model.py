"""What we believe one server's prefix cache holds: the prompts we sent it, least recently used ends dropped first.

A chain is a fingerprint: a sequence of hashes in which each one stands for everything before it. Equal hashes mean
equal prefixes, so that a tree of *runs* (blocks that always came together) is enough: a prompt is found in as many
steps as it has branches, and not blocks. The runs are kept in order of use. A use touches a chain from its end to its
beginning, as the engines do, so that the oldest run never has a younger one behind it.

What has had to make way is remembered for `REMEMBERED` times as long: a server that still has it has more room than
we thought.
Replies teach the capacity (`learn`), events correct the content (`add`, `remove`, `clear`), and an engine that tells
its size is believed (`resize`). Memory is bounded by the capacity: some 40 bytes per block, `1 + REMEMBERED` times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

import msgspec

from gateway.prefix.fingerprint import BLOCK_TOKENS

REMEMBERED_FACTOR = 3  # times the capacity
SHRINK_AT_MOST = 0.1  # of the learned capacity, by one reply: a restarted server has lost its content, not its size
GROW_AT_MOST = 0.1
RECENT_USES = 4  # of a cache, since the last of which a block is as good as wanted again; then ever less
CAPACITY_MAX_TOKENS = 64_000_000  # up to which a capacity is learned


class _Run:
    """Blocks of a chain that follow each other without a branch. `used` is the model's clock at their last use;
    `evicted` is how many blocks had been evicted in all when these were."""

    __slots__ = ("blocks", "children", "evicted", "held", "parent", "used")

    def __init__(self, parent: _Run | None, blocks: list[int], used: int) -> None:
        self.parent = parent
        self.blocks = blocks
        self.children: dict[int, _Run] = {}  # by their first block
        self.used = used
        self.evicted = 0
        self.held = True  # else only remembered


_Walk = tuple[list[_Run], int, int]
"""Along a chain from its beginning: the runs, how many of its blocks they cover, and, where it covers the last run in
part, how many blocks of that."""


class CachePrediction(msgspec.Struct, frozen=True, gc=False):
    """What was believed of a chain at one moment. `ages`: for each run on its path, where it ends, and when it was used
    last; or, of those that have been evicted (from `matched` to `remembered`), how many blocks were so since.
    `version` is the model's at that moment: while it is the same, so is what is believed, and the way there."""

    matched: int
    remembered: int
    ages: tuple[tuple[int, int], ...]
    version: int
    walk: _Walk | None = None


class CacheModel:
    """A bounded tree of chains in order of use. All lengths are in blocks but where a name says tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity = _blocks(capacity_tokens)
        self._root = _Run(None, [], 0)
        self._held: OrderedDict[_Run, None] = OrderedDict()  # from the least to the most recently used
        self._remembered: OrderedDict[_Run, None] = OrderedDict()  # from the first to the last evicted
        self._held_blocks = 0
        self._remembered_blocks = 0
        self._evicted = 0  # blocks, ever
        self.clock = 0  # counts additions
        self.version = 0  # counts changes of any kind
        self.removals = 0  # by events
        self._capacity_reported = False

    def __len__(self) -> int:
        return self._held_blocks

    @property
    def capacity_tokens(self) -> int:
        return self.capacity * BLOCK_TOKENS

    def match(self, chain: Sequence[int]) -> int:
        """How many leading blocks are believed to be there. Changes nothing."""
        matched = 0
        path, depth, _ = self._walk(chain)
        for run in path:
            if not run.held:  # what is behind a run that is gone, is gone as well
                return matched
            matched += len(run.blocks)
        return min(matched, depth)

    def known_blocks(self, chain: Sequence[int]) -> int:
        """How many leading blocks are known, be they there or only remembered. Changes nothing."""
        return self._walk(chain)[1]

    def predict(self, chain: Sequence[int]) -> CachePrediction:
        """What is believed of a chain, in as much detail as `learn` wants it. Changes nothing."""
        walk = self._walk(chain)
        path, depth, _ = walk
        matched, end = 0, 0
        ages: list[tuple[int, int]] = []
        for run in path:
            end += len(run.blocks)
            if end > depth:
                end = depth
            if run.held:
                matched = end
                ages.append((end, run.used))
            else:
                ages.append((end, self._evicted - run.evicted))
        return CachePrediction(matched, depth, tuple(ages), self.version, walk)

    def predict_cache(self, chain: Sequence[int], coming: int, busy: Container[int]) -> CachePrediction:
        """What will be there of a chain when `coming` blocks have made room for themselves. What was used last at a
        time in `busy` is in use, and stays. Changes nothing."""
        going = self._victims(coming, busy)
        walk = self._walk(chain)
        path, depth, _ = walk
        matched, end = 0, 0
        ages: list[tuple[int, int]] = []
        for run in path:
            stays = len(run.blocks) - going.get(run, 0) if run.held else 0
            if matched == end:
                matched = min(end + stays, depth)
            end = min(end + len(run.blocks), depth)
            ages.append((end, run.used if stays else 0))
        return CachePrediction(matched, depth, tuple(ages), self.version, walk)

    def _victims(self, blocks: int, busy: Container[int]) -> dict[_Run, int]:
        """Which runs make way for so many blocks, and how much of them."""
        going: dict[_Run, int] = {}
        for run in self._held:
            if blocks <= 0:
                break
            if run.used not in busy:
                going[run] = min(blocks, len(run.blocks))
                blocks -= len(run.blocks)
        return going

    def eviction_loss(self, coming: int, blocks: int, busy: Container[int], idle_uses: float = 0.0) -> float:
        """What is lost when, after `coming` blocks as above, `blocks` more make room for themselves: so many of those
        that go will be wanted again, by how lately they were used. What finds no room drives out as much as it is.
        `idle_uses`: how many times it would have been used since the last time, had it been as before."""
        lost = 0.0
        for run in self._held:
            if blocks <= 0:
                return lost
            if run.used in busy:
                continue
            going = max(0, min(len(run.blocks) - coming, blocks))
            coming = max(0, coming - len(run.blocks))
            blocks -= going
            lost += going * min(1.0, RECENT_USES / (1 + self.clock - run.used + idle_uses))
        return lost + blocks

    def touch(self, chain: Sequence[int]) -> None:
        """Whatever is held of it has been used until now."""
        self.clock += 1
        self.version += 1
        path, _, cut = self._walk(chain)
        if cut and path[-1].held:
            path[-1] = self._split(path[-1], cut)
        for run in reversed(path):
            if run.held:
                self._use(run)

    def add(self, chain: Sequence[int], prediction: CachePrediction | None = None) -> None:
        """The server computes this prompt, or has: it is the most recently used now. `believed`: what was believed of
        it, which spares looking it up again."""
        if len(chain) > self.capacity:
            chain, prediction = chain[: self.capacity], None
        if prediction is None or prediction.walk is None or prediction.version != self.version:
            path, depth, cut = self._walk(chain)
        else:
            runs, depth, cut = prediction.walk
            path = [*runs]
        self.clock += 1
        self.version += 1
        if cut:  # it leaves the last run, or ends, in its midst
            path[-1] = self._split(path[-1], cut)
        if depth < len(chain):
            self._grow(path, list(chain[depth:]))
        for run in reversed(path):
            self._use(run)
        self._make_room()

    def _grow(self, path: list[_Run], rest: list[int]) -> None:
        """Put blocks that nobody knows behind the last run, or into it."""
        tip = path[-1] if path else self._root
        if tip.children or tip is self._root:
            run = tip.children[rest[0]] = _Run(tip, rest, self.clock)
            self._held[run] = None
            path.append(run)
        else:
            self._use(tip)  # before it grows, so that each block is counted once
            tip.blocks += rest
        self._held_blocks += len(rest)

    def remove(self, chain: Sequence[int]) -> None:
        """The last block of this chain is gone, and so is whatever continued it."""
        path, depth, _ = self._walk(chain)
        if not chain or depth < len(chain):
            return
        self.version += 1
        self.removals += 1
        tip, before = path[-1], sum(len(run.blocks) for run in path[:-1])
        gone = list(tip.children.values())
        for run in gone:
            gone.extend(run.children.values())
        for run in reversed(gone):
            self._drop(run)
        kept = len(chain) - before - 1
        if not kept:
            self._drop(tip)
            return
        self._count(tip, kept - len(tip.blocks))
        del tip.blocks[kept:]

    def clear(self) -> None:
        """The server has restarted or dropped its cache. Its capacity is what it was."""
        self.version += 1
        self._root.children.clear()
        self._held.clear()
        self._remembered.clear()
        self._held_blocks = self._remembered_blocks = 0

    def resize(self, capacity_tokens: int) -> None:
        """The engine has told its size: replies do not teach another one any more."""
        self.version += 1
        self.capacity = _blocks(capacity_tokens)
        self._capacity_reported = True
        self._make_room()

    def learn(self, prediction: CachePrediction, reported: int) -> None:
        """A reply said how many leading blocks were cached of a prompt of which this was believed before it was added.

        Less than believed: what was used before the first missing run is gone as well, and the cache is smaller than
        it seemed. More: what had to make way here did not there, and it is larger.
        """
        self.version += 1
        if reported < prediction.matched:
            missing = next(used for end, used in prediction.ages if end > reported)
            self._evict_older(missing)
            smaller = max(self._held_blocks, int(self.capacity * (1 - SHRINK_AT_MOST)))
            self._learn_capacity(min(self.capacity, smaller))
        elif prediction.matched < reported:
            evicted = [since for end, since in prediction.ages if prediction.matched < end <= reported]
            if evicted:
                self._learn_capacity(self.capacity + min(max(evicted), int(self.capacity * GROW_AT_MOST)))

    def _learn_capacity(self, capacity: int) -> None:
        if not self._capacity_reported:
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
        head = _Run(run.parent, run.blocks[:length], run.used)
        head.held, head.evicted = run.held, run.evicted
        run.parent.children[head.blocks[0]] = head
        run.parent = head
        del run.blocks[:length]
        head.children[run.blocks[0]] = run
        (self._held if head.held else self._remembered)[head] = None
        return head

    def _use(self, run: _Run) -> None:
        run.used = self.clock
        if run.held:
            self._held.move_to_end(run)
            return
        run.held = True
        del self._remembered[run]
        self._held[run] = None
        self._remembered_blocks -= len(run.blocks)
        self._held_blocks += len(run.blocks)

    def _make_room(self) -> None:
        while self._held_blocks > self.capacity:
            run = next(iter(self._held))
            excess = self._held_blocks - self.capacity
            if excess < len(run.blocks):  # its end makes way, its beginning stays the oldest
                head = self._split(run, len(run.blocks) - excess)
                self._held.move_to_end(head, last=False)
            self._evict(run)
        while self._remembered_blocks > REMEMBERED_FACTOR * self.capacity:
            self._drop(next(iter(self._remembered)))

    def _evict_older(self, used: int) -> None:
        """Everything last used at that time, or before it."""
        while self._held and (run := next(iter(self._held))).used <= used:
            self._evict(run)

    def _evict(self, run: _Run) -> None:
        run.held = False
        self._evicted += len(run.blocks)
        run.evicted = self._evicted
        del self._held[run]
        self._remembered[run] = None
        self._held_blocks -= len(run.blocks)
        self._remembered_blocks += len(run.blocks)

    def _drop(self, run: _Run) -> None:
        """Forget a run that nothing continues."""
        assert run.parent is not None and not run.children
        del run.parent.children[run.blocks[0]]
        del (self._held if run.held else self._remembered)[run]
        self._count(run, -len(run.blocks))

    def _count(self, run: _Run, blocks: int) -> None:
        if run.held:
            self._held_blocks += blocks
        else:
            self._remembered_blocks += blocks


def _blocks(tokens: int) -> int:
    return max(1, tokens // BLOCK_TOKENS)


def _common_blocks(blocks: list[int], chain: Sequence[int], start: int) -> int:
    """How many of a run's blocks stand in the chain from `start` on, of which the first one does."""
    low, high = 1, min(len(blocks), len(chain) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if chain[start + middle - 1] == blocks[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
