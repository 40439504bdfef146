"""Model of one deployment's prefix cache: predicts which prefixes of a prompt the engine has cached.

The model holds the prompts that were sent to the deployment and evicts least recently used blocks first, as engines do.

A chain is a fingerprint: a sequence of hashes, each of which stands for its block and everything before it. Equal
hashes mean equal prefixes. So the chains form a tree, stored as *runs*: blocks that always occurred together. A lookup
takes as many steps as the prompt has branches, not blocks. Runs are kept in order of use. A use touches a chain from
its end to its beginning, as engines do, so a run is never older than the runs behind it.

Evicted runs are remembered (a ghost list), up to `REMEMBERED_FACTOR` times the capacity, or `REMEMBERED_MIN_BLOCKS` if
that is more. If a deployment still has one of them cached, its cache is larger than the model assumed.

Responses teach the capacity (`learn_cached`, `learned_capacity.py`), KV events correct the content (`add`, `remove`,
`clear`), and a capacity that the engine reports replaces the learned one (`resize`). Memory is bounded by the capacity:
about 10 bytes per block, times `1 + REMEMBERED_FACTOR`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from gateway.prefix.block_ages import BlockAges
from gateway.prefix.cache_runs import CachePrediction, KnownBlocks, Run, Walk, known_parts, shared_blocks
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.learned_capacity import CapacityGroup, LearnedCapacity, Part, Piece, is_cut, pieces_of

REMEMBERED_FACTOR = 3  # times the capacity: evicted blocks that are remembered
REMEMBERED_MIN_BLOCKS = 32_768  # remembered at least, so that a capacity is found that was guessed much too small


class CacheModel:
    """A bounded tree of chains in order of use. Lengths are in blocks unless a name says tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity = _blocks(capacity_tokens)
        self._root = Run(None, array("Q"), 0)
        self._cached: OrderedDict[Run, None] = OrderedDict()  # cached runs, least recently used first
        self._remembered: OrderedDict[Run, None] = OrderedDict()  # evicted runs, first evicted first
        self.cached_blocks = 0  # predicted to be cached now
        self._remembered_blocks = 0
        self._ages = BlockAges()  # of all runs, cached or remembered, except those that are gone
        # By the clock at which a call in flight was added: the blocks that it used last. The engine evicts none of them
        self._in_use: dict[int, int] = {}
        self._in_use_blocks = 0  # the sum of these
        self.clock = 0  # counts uses: each `add` and `touch`
        self.version = 0  # counts changes of any kind
        self.removals = 0  # counts chains that `remove` has removed
        self._learned: LearnedCapacity | None = LearnedCapacity(self.capacity)  # None if the engine reports it
        self._lost_until = 0  # the clock: a response showed that what was last used until then is gone

    def __len__(self) -> int:
        return self.cached_blocks

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

    def predict_after(self, chain: Sequence[int], evictions: int) -> CachePrediction:
        """What will be cached of a chain after `evictions` blocks have been evicted. Changes nothing."""
        return self._predict(chain, self._victims(evictions))

    def _predict(self, chain: Sequence[int], leaving: Mapping[Run, int]) -> CachePrediction:
        walk = self._walk(chain)
        path, depth, _ = walk
        if not path:
            return CachePrediction(0, 0, (), self.version, walk)
        matched, end = 0, 0
        remembered = depth
        ages: list[tuple[int, int]] = []
        reused: list[tuple[int, int]] = []
        for run in path:
            length = len(run.blocks)
            staying = (length - leaving.get(run, 0) if leaving else length) if run.is_cached else 0
            next_end = end + length if end + length < depth else depth
            if matched == end:
                matched = end + staying if end + staying < depth else depth
            if run.is_gone and end < remembered:
                remembered = end
            if run.is_cached:
                if run.settled_blocks:
                    settled_end = end + run.settled_blocks
                    ages.append((settled_end if settled_end < depth else depth, run.settled))
                if run.settled_blocks < length:
                    ages.append((next_end, 0))
            reused.append((self.clock - run.last_used, next_end - end))
            end = next_end
        return CachePrediction(matched, remembered, tuple(ages), self.version, walk, tuple(reused), depth)

    def _victims(self, blocks: int) -> dict[Run, int]:
        """The runs that are evicted next, for so many blocks, and how many blocks of each."""
        leaving: dict[Run, int] = {}
        for run in self._cached:
            if blocks <= 0:
                break
            if run.last_used not in self._in_use:
                leaving[run] = min(blocks, len(run.blocks))
                blocks -= len(run.blocks)
        return leaving

    def eviction_loss(
        self,
        evictions: int,
        blocks: int,
        reuse_share: Callable[[float], float],
        idle_uses: float = 0.0,
    ) -> float:
        """How many evicted blocks will be wanted again, as an expected number, if `blocks` more are evicted.

        The first `evictions` blocks are evicted before and do not count. Evicted blocks count
        `reuse_share(age + idle_uses)`, where `age` is how many uses ago they were last used. Blocks for which nothing
        can be evicted count fully. `idle_uses` is how many times the deployment would have been used since its last
        call, had the calls continued at the former rate: it lets an idle deployment's content age.
        """
        lost_blocks = 0.0
        for run in self._cached:
            if blocks <= 0:
                return lost_blocks
            if run.last_used in self._in_use:
                continue
            leaving = max(0, min(len(run.blocks) - evictions, blocks))
            evictions = max(0, evictions - len(run.blocks))
            if leaving:
                blocks -= leaving
                lost_blocks += leaving * reuse_share(self.clock - run.last_used + idle_uses)
        return lost_blocks + blocks

    def pin(self, chain: Sequence[int]) -> int:
        """The chain, which was added just now, belongs to a call in flight: it is not evicted until `unpin`.

        Returns what `unpin` needs.
        """
        blocks = len(chain)
        blocks = blocks if blocks < self.capacity else self.capacity
        self._in_use_blocks += blocks - self._in_use.get(self.clock, 0)
        self._in_use[self.clock] = blocks
        return self.clock

    def unpin(self, pin: int) -> None:
        """The call ended."""
        self._in_use_blocks -= self._in_use.pop(pin, 0)

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
        self._make_room()

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
        self._make_room(added=self.clock)

    def _grow(self, path: list[Run], rest: array[int]) -> None:
        """Append unknown blocks: to the last run if nothing continues it, or as a new run behind it."""
        tip = path[-1] if path else self._root
        if tip.children or tip is self._root:
            run = tip.children[rest[0]] = Run(tip, rest, self.clock)
            self._cached[run] = None
            path.append(run)
        else:
            self._mark_used(tip)  # before it grows, because `_mark_used` counts its blocks
            run = tip
            tip.blocks += rest
        self._change_count(run, len(rest))

    def remove(self, chain: Sequence[int]) -> None:
        """The last block of this chain was evicted, and with it every block that continues it. They are remembered."""
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
        kept_blocks = len(chain) - before - 1
        if kept_blocks:
            tip = self._cut_off(tip, kept_blocks)
        for run in (*reversed(removed_runs), tip):
            self._lose(run)
        self._forget_oldest()

    def give_up(self, chain: Sequence[int], kept: int) -> None:
        """The deployment drops the end of the chain, from block `kept` on, as far as no other chain has it.

        What its responses then lack teaches nothing about its capacity.
        """
        path, begin, cut = self._walk(chain)
        last = len(path) - 1
        for place in range(last, -1, -1):
            run = path[place]
            begin -= cut if cut and place == last else len(run.blocks)
            is_shared = len(run.children) > (place < last)
            if is_shared or begin + len(run.blocks) <= kept or run.last_used in self._in_use:
                return
            if run.is_cached:
                self.version += 1
                self._lose(self._cut_off(run, kept - begin) if kept > begin else run)

    def clear(self) -> None:
        """The engine was restarted, or dropped its cache. Its capacity is unchanged."""
        self.version += 1
        self._root.children.clear()
        self._cached.clear()
        self._remembered.clear()
        self._ages.clear()
        self.cached_blocks = self._remembered_blocks = 0

    def share_capacity(self, group: CapacityGroup) -> None:
        """Learn the capacity together with other deployments, which the policy describes as equal."""
        if self._learned is not None:
            self._learned.group = group

    def resize(self, capacity_tokens: int) -> None:
        """The engine reported its capacity. From now on, responses no longer change it."""
        self.version += 1
        self.capacity = _blocks(capacity_tokens)
        self._learned = None
        self._make_room()

    def known_parts(self, prediction: CachePrediction) -> tuple[KnownBlocks, ...]:
        """The known blocks of a chain that have certainly been computed, as `learn_cached` needs them. Changes nothing.

        `prediction` must be current. Call it before the chain is added.
        """
        return known_parts(prediction.walk, self._reuse_distance, self._lost_until) if prediction.walk else ()

    def _reuse_distance(self, clock: int) -> int:
        """How many blocks are evicted after those that were last used at this clock."""
        newer, in_use = self._ages.newer_blocks(clock), self._in_use
        if in_use and next(iter(in_use)) < clock:
            newer += self._in_use_blocks
            for used in reversed(in_use):  # in the order of the clock
                if used < clock:
                    break
                newer -= in_use[used]
        return newer

    def learn_cached(
        self, prediction: CachePrediction, reported_blocks: int, known: Sequence[KnownBlocks] | None = None
    ) -> None:
        """Correct the model: a response reported `reported_blocks` of a prompt as cached, instead of `prediction`.

        `known` is the result of `known_parts` when the prompt was sent.

        If fewer blocks were cached than predicted, everything that was used before the first missing run is taken to be
        lost. That shows nothing if no call that used the missing run has ended: it may still be computed.
        """
        is_surprise = reported_blocks != prediction.matched
        if reported_blocks < prediction.matched:
            settled = next(settled for end, settled in prediction.ages if end > reported_blocks)
            if not settled:
                return
            self.version += 1
            self._evict_older(settled)
        self._learn_capacity(known or (), reported_blocks, is_surprise=is_surprise)

    def _learn_capacity(self, known: Sequence[KnownBlocks], cached_blocks: int, *, is_surprise: bool) -> None:
        """A response reported so many of these blocks as cached."""
        parts: list[Part] = []
        start = 0
        found_from = self._lost_until + 1
        for part in known:
            if part.is_lost:
                if cached_blocks <= start:
                    break
                if cached_blocks >= start + part.blocks:
                    found_from = min(found_from, part.last_used)
            parts.append((part.distance, part.blocks))
            start += part.blocks
        forgets = found_from <= self._lost_until  # blocks that were used so long ago are not lost: newer ones neither
        if forgets:
            self._lost_until = found_from - 1
        pieces = [(distance, length) for part in parts for distance, _, length in pieces_of(*part)]
        cut = is_cut(parts, cached_blocks)
        is_changed = self.learn_capacity(pieces, cached_blocks, is_surprise=is_surprise, ends_guess=cut)
        if forgets and not is_changed:
            self._set_capacity(self.capacity)

    def learn_capacity(
        self, pieces: Sequence[Piece], found: float, *, responses: int = 1, is_surprise: bool, ends_guess: bool
    ) -> bool:
        """So many responses found so much of these pieces cached, as was reported or is concluded from times.

        True if the capacity changed. `LearnedCapacity.note` describes the arguments.
        """
        learned = self._learned
        if learned is None or not learned.note(
            pieces, found, responses=responses, is_surprise=is_surprise, ends_guess=ends_guess
        ):
            return False
        self._set_capacity(learned.blocks)
        return True

    def _set_capacity(self, capacity: int) -> None:
        self.version += 1
        self.capacity = capacity
        self._make_room()
        while (run := self._newest_evicted()) is not None:  # perhaps too early
            if run.last_used <= self._lost_until or self.cached_blocks + len(run.blocks) > capacity:
                return
            self._restore(run)
            self._cached.move_to_end(run, last=False)

    def _newest_evicted(self) -> Run | None:
        return next((run for run in reversed(self._remembered) if not run.is_gone), None)

    def _walk(self, chain: Sequence[int]) -> Walk:
        path: list[Run] = []
        run, depth, length = self._root, 0, len(chain)
        while depth < length and (child := run.children.get(chain[depth])) is not None:
            path.append(child)
            end = depth + len(child.blocks)
            if end > length or chain[end - 1] != child.blocks[-1]:
                cut = shared_blocks(child.blocks, chain, depth)
                return path, depth + cut, cut
            run, depth = child, end
        return path, depth, 0

    def _split(self, run: Run, length: int) -> Run:
        """Cut a run after `length` blocks. `run` itself becomes the tail and keeps its place in the order."""
        assert run.parent is not None
        head = Run(run.parent, run.blocks[:length], run.last_used)
        head.is_cached, head.is_gone, head.settled = run.is_cached, run.is_gone, run.settled
        head.settled_blocks = min(run.settled_blocks, length)
        run.settled_blocks -= head.settled_blocks
        run.parent.children[head.blocks[0]] = head
        run.parent = head
        del run.blocks[:length]
        head.children[run.blocks[0]] = run
        (self._cached if head.is_cached else self._remembered)[head] = None
        return head

    def _cut_off(self, run: Run, length: int) -> Run:
        """Cut a run after `length` blocks, and return the rest. The head keeps its place in the order of eviction.

        If the run is only remembered, the head moves behind it: ends of chains are forgotten before their beginnings.
        """
        if not run.is_cached:
            self._split(run, length)
            return run
        rest = Run(run, run.blocks[length:], run.last_used)
        rest.settled = run.settled
        rest.settled_blocks = max(0, run.settled_blocks - length)
        run.settled_blocks -= rest.settled_blocks
        rest.children = run.children
        for child in rest.children.values():
            child.parent = rest
        del run.blocks[length:]
        run.children = {rest.blocks[0]: rest}
        self._cached[rest] = None
        return rest

    def _mark_used(self, run: Run) -> None:
        blocks = len(run.blocks)
        if run.is_gone:
            self._ages.change(self.clock, blocks)
        else:
            self._ages.move(run.last_used, self.clock, blocks)
        if run.last_used in self._in_use:  # another call uses the run, too
            self._in_use[run.last_used] -= blocks
            self._in_use_blocks -= blocks
        run.last_used = self.clock
        if run.is_cached:
            self._cached.move_to_end(run)
        else:
            run.settled = run.settled_blocks = 0  # it is computed again, and was not for longer than the call takes
            self._restore(run)

    def _restore(self, run: Run) -> None:
        """A remembered run is cached."""
        run.is_cached, run.is_gone = True, False
        del self._remembered[run]
        self._cached[run] = None
        self._remembered_blocks -= len(run.blocks)
        self.cached_blocks += len(run.blocks)

    def _make_room(self, added: int = 0) -> None:
        """Evict the least recently used runs, but none of calls in flight, and not what was `added` at this clock.

        If nothing else is left, an engine lets the last of these calls wait until another one has ended, and then
        evicts what that one used. So the model holds more than its capacity until then.
        """
        spared = 0
        while self.cached_blocks > self.capacity:
            run = next(iter(self._cached))
            if run.last_used in self._in_use or run.last_used == added:
                if spared >= len(self._cached):
                    return
                self._spare(run)
                spared += 1
                continue
            excess = self.cached_blocks - self.capacity
            if excess < len(run.blocks):  # evict its end; its beginning stays the oldest
                head = self._split(run, len(run.blocks) - excess)
                self._cached.move_to_end(head, last=False)
            self._evict(run)
        if self._remembered_blocks > REMEMBERED_MIN_BLOCKS:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Bound what is remembered."""
        while (
            self._remembered_blocks > REMEMBERED_MIN_BLOCKS
            and self._remembered_blocks > REMEMBERED_FACTOR * self.capacity
        ):
            self._drop(next(iter(self._remembered)))

    def _spare(self, run: Run) -> None:
        """Move a run, and those before it in its chain, to the end of the order: a call in flight uses them."""
        part: Run | None = run
        while part is not None and part is not self._root:
            self._cached.move_to_end(part)
            part = part.parent

    def _evict_older(self, last_used: int) -> None:
        """Evict everything that was last used at that time or earlier: it is gone, whatever the capacity is."""
        self._lost_until = last_used
        while self._cached and (run := next(iter(self._cached))).last_used <= last_used:
            self._evict(run)

    def _evict(self, run: Run) -> None:
        run.is_cached = False
        del self._cached[run]
        self._remembered[run] = None
        self.cached_blocks -= len(run.blocks)
        self._remembered_blocks += len(run.blocks)

    def _lose(self, run: Run) -> None:
        """The deployment has dropped a run: it takes no room, which teaches nothing about the capacity."""
        run.settled = run.settled_blocks = 0
        if not run.is_gone:
            run.is_gone = True
            self._ages.change(run.last_used, -len(run.blocks))
        if run.is_cached:
            self._evict(run)

    def _drop(self, run: Run) -> None:
        """Forget a run that no other run continues."""
        assert run.parent is not None and not run.children
        del run.parent.children[run.blocks[0]]
        del (self._cached if run.is_cached else self._remembered)[run]
        self._change_count(run, -len(run.blocks))

    def _change_count(self, run: Run, blocks: int) -> None:
        if not run.is_gone:
            self._ages.change(run.last_used, blocks)
        if run.is_cached:
            self.cached_blocks += blocks
        else:
            self._remembered_blocks += blocks


def _blocks(tokens: int) -> int:
    return max(1, tokens // BLOCK_TOKENS)
