"""Which prompt's text an engine's blocks hold, so that what it evicts is known to be gone.

An engine names its blocks by hashes over tokens; a fingerprint names prefixes by hashes over text. No tokenizer runs
here, and none is needed: what matters is which call a block was computed for, and how far into its prompt it reaches.

*Which call.* The gateway sends each call's id as `x-session-id`, and engines that know sessions (vLLM from 0.32, the
bundled engine) put it into the events of the blocks that were stored for it. Of other engines, a call's blocks are
those that make one path of the length that its usage tells: it found `cached` tokens, and computed all but the last of
`prompt + output`. Where more than one path would fit, none is taken.

*How far.* When a call is over, its usage says how many tokens its prompt had; its text has a known length. Between two
points that are known, tokens and bytes are proportional. The end of every prompt is such a point, and a conversation
has one for each of its turns. An error of a block or two only matters at the very edge of what was evicted.

*What is left.* A call is believed to be cached from when it is sent. Once it is over and its blocks have been told,
what the engine still has of them is what is believed; from then on every block that is removed takes the text that it
holds, and all behind it, out of the cache model. Neither needs the other to come first: a block that is gone before
its call is over is remembered until then. What could not be attributed changes nothing: there the model goes on as it
does without events, and `cached_tokens` corrects it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from gateway.prefix.cache_model import CacheModel
from gateway.prefix.events.base import BlockHash, BlocksRemoved, BlocksStored
from gateway.prefix.fingerprint import BLOCK_BYTES

BLOCKS_MAX = 1 << 19  # followed of one engine: 8M tokens in blocks of 16; the oldest are forgotten first
GONE_MAX = 1 << 18  # blocks that are gone, and remembered for calls that are not over yet
CALLS_MAX = 256  # that are over, and remembered for events that come late
SESSIONS_MAX = 4096  # whose last block is remembered until their calls are over
ALL_KNOWN_SHARE = 0.95  # of an engine's blocks, of which we know, is all of them: some are empty or not full
UNCLAIMED_MAX = 256  # ends of paths that belong to no call yet, of engines that do not tell sessions

K = TypeVar("K")
V = TypeVar("V")


class FinishedCall(NamedTuple):
    """A call that is over, with the engine's own count of its tokens."""

    id: str
    chain: Sequence[int]  # its fingerprint
    text_bytes: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class _Text:
    """A prompt's fingerprint, shared by the blocks that hold it. It grows with its conversation.

    `ends` are points where both are known, in tokens and in bytes: the beginning, and where its prompts ended. A text
    that begins like another one, its `trunk`, has blocks of its own behind the `shared` ones.
    """

    __slots__ = ("anchors", "chain", "present", "shared", "trunk")

    def __init__(
        self, chain: Sequence[int], ends: list[tuple[float, float]], trunk: _Text | None = None, shared: int = 0
    ) -> None:
        self.chain = chain
        self.anchors = ends
        self.trunk = trunk
        self.shared = shared
        self.present: dict[int, _Block] = {}  # its own blocks that the engine has, by their depth

    @property
    def tokens(self) -> float:
        """Of all of it that the fingerprint covers."""
        tokens, text_bytes = self.anchors[-1]
        whole = len(self.chain) * BLOCK_BYTES
        return tokens * whole / text_bytes if text_bytes > whole else tokens

    def bytes_at(self, token: float) -> float:
        """Where in the text a token begins."""
        before, after = (0.0, 0.0), self.anchors[-1]
        for end in self.anchors:
            if end[0] > token:
                after = end
                break
            before = end
        tokens, text_bytes = after[0] - before[0], after[1] - before[1]
        return before[1] + (token - before[0]) * text_bytes / tokens if tokens > 0 else before[1]

    def is_prefix_of(self, chain: Sequence[int]) -> bool:
        return len(chain) >= len(self.chain) and chain[len(self.chain) - 1] == self.chain[-1]

    def covers(self, chain: Sequence[int]) -> bool:
        return len(chain) <= len(self.chain) and self.chain[len(chain) - 1] == chain[-1]

    def anchors_up_to(self, token: float) -> list[tuple[float, float]]:
        """The points of what comes before a token, where another text leaves this one."""
        ends = [end for end in self.anchors if end[0] < token]
        return [*ends, (token, self.bytes_at(token))]

    def cached_blocks_up_to(self, depth: int) -> int:
        """How many of its first `depth` blocks the engine has, from the beginning to the first that is missing."""
        first, trunk = self.shared, self.trunk
        if trunk is not None and (reached := trunk.cached_blocks_up_to(min(first, depth))) < first:
            return reached
        while first < depth and first + 1 in self.present:
            first += 1
        return first


class _Block:
    """`depth` counts blocks from the prompt's beginning, this one included; 0: unknown, its parent never was told.

    Once attributed, `text` is the prompt that it is part of; or an answer to it, behind its end.
    """

    __slots__ = ("__weakref__", "depth", "parent", "present", "text")

    def __init__(self, parent: _Block | None, depth: int) -> None:
        self.parent = parent
        self.depth = depth
        self.present = True
        self.text: _Text | None = None

    def assign_text(self, text: _Text, depth: int) -> None:
        """Instead of whatever it held, and of what was there: an answer that nobody went on from."""
        self.detach_text()
        self.text, self.depth = text, depth
        if self.present:
            if (other := text.present.get(depth)) is not None:
                other.text = None
            text.present[depth] = self

    def detach_text(self) -> _Text | None:
        """It is gone; returns the text that misses it now."""
        text = self.text
        if text is None or text.present.get(self.depth) is not self:
            return None
        del text.present[self.depth]
        return text


class BlockIndex:
    """Of one engine. A `Listener`; corrects `cache`. Owned by the event loop."""

    def __init__(self, cache: CacheModel) -> None:
        self._cache = cache
        self._blocks: OrderedDict[BlockHash, _Block] = OrderedDict()  # that are there
        self._known: WeakValueDictionary[BlockHash, _Block] = WeakValueDictionary()  # and those that lead to others
        self._block_tokens = 0
        self._reports_sessions = False
        self._in_doubt = False  # events were lost: it may hold blocks whose removal will mean nothing to us
        self._capacity_tokens = 0  # of the engine, where it has told
        self._calls: OrderedDict[str, FinishedCall] = OrderedDict()
        self._tips: OrderedDict[str, _Block] = OrderedDict()  # by session: its last block
        self._unclaimed: OrderedDict[BlockHash, _Block] = OrderedDict()  # ends of paths that came without a session
        self.calls_attributed = 0
        self.calls_finished = 0
        self.blocks_removed = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def present_tokens(self) -> int:
        """How many of the engine's tokens are in its cache, as far as is known; in doubt, it is taken to be full."""
        known = len(self._blocks) * self._block_tokens
        return max(known, self._capacity_tokens) if self._in_doubt else known

    @property
    def in_doubt(self) -> bool:
        """Whether events were lost, and what was in the cache then may be there still. Not for ever: once all of a
        cache is known again, nothing else can be in it."""
        if self._in_doubt and self._capacity_tokens:
            self._in_doubt = len(self._blocks) * self._block_tokens < ALL_KNOWN_SHARE * self._capacity_tokens
        return self._in_doubt

    @property
    def reports_all_evictions(self) -> bool:
        """Whether what is gone is known, so that nothing need be concluded from what replies say."""
        return self._reports_sessions and not self.in_doubt

    def set_capacity(self, engine_tokens: int) -> None:
        self._capacity_tokens = engine_tokens

    # -- what the engine tells -------------------------------------------------------------------------------------

    def stored(self, event: BlocksStored) -> None:
        self._block_tokens = event.block_tokens or self._block_tokens
        tip = self._grow(event)
        if event.session:
            self._reports_sessions = True
            _remember(self._tips, event.session, tip, SESSIONS_MAX)
            if (call := self._calls.get(event.session)) is not None:
                self._attribute(call, tip)
        elif not self._reports_sessions and not self._is_attributed(tip):
            _remember(self._unclaimed, event.hashes[-1], tip, UNCLAIMED_MAX)
            self._match_unclaimed([call for call in self._calls.values() if self._expected_shape(call)[0] == tip.depth])

    def _grow(self, event: BlocksStored) -> _Block:
        """Note an event's blocks; returns the last one."""
        above = self._known.get(event.parent) if event.parent is not None else None
        depth = above.depth if above else 0
        counted = event.parent is None or depth > 0
        if event.parent is not None:
            self._unclaimed.pop(event.parent, None)
        for block_hash in event.hashes:
            depth += counted
            block = self._known.get(block_hash)
            if block is None:
                block = self._known[block_hash] = _Block(above, depth)
            elif not block.depth:
                block.parent, block.depth = above, depth
            block.present = True
            if block.text is not None:
                block.text.present.setdefault(block.depth, block)
            self._blocks[block_hash] = above = block
        while len(self._blocks) > BLOCKS_MAX:
            self._blocks.popitem(last=False)
        while self._tips and len(self._known) - len(self._blocks) > GONE_MAX:
            self._tips.popitem(last=False)
        assert above is not None
        return above

    def removed(self, event: BlocksRemoved) -> None:
        for block_hash in event.hashes:
            block = self._blocks.pop(block_hash, None) or self._known.get(block_hash)
            if block is None or not block.present:
                continue
            block.present = False
            self.blocks_removed += 1
            if (text := block.detach_text()) is not None:
                self._withdraw(text, block.depth - 1)

    def _withdraw(self, text: _Text, kept: int) -> None:
        """Of this text there are `kept` blocks at most."""
        kept_text = int(text.bytes_at(kept * self._block_tokens)) // BLOCK_BYTES
        if kept_text < len(text.chain):
            self._cache.remove(text.chain[: kept_text + 1])

    def cleared(self) -> None:
        self.events_lost()
        self._in_doubt = False
        self._cache.clear()

    def events_lost(self) -> None:
        """The cache model stays as it is: as good as one without events, and corrected by replies."""
        self._in_doubt = True
        self._blocks.clear()
        self._known.clear()
        self._tips.clear()
        self._unclaimed.clear()

    # -- what the gateway knows ------------------------------------------------------------------------------------

    def call_finished(self, call: FinishedCall) -> None:
        """A call was answered by this engine. The events of its blocks may have come already, or come yet."""
        if not call.chain or not call.prompt_tokens:
            return
        self.calls_finished += 1
        if self._block_tokens:
            blocks, cached = self._expected_shape(call)
            if blocks <= cached:  # it was all there: nothing is told of it
                self.calls_attributed += 1
                return
        _remember(self._calls, call.id, call, CALLS_MAX)
        tip = self._tips.pop(call.id, None)
        if tip is not None:
            self._attribute(call, tip)
        elif not self._reports_sessions:
            self._match_unclaimed([call])

    def _is_attributed(self, block: _Block) -> bool:
        """Whether it holds text that is known. An answer's blocks do once the next turn of a conversation tells it."""
        return block.text is not None and block.depth * self._block_tokens <= block.text.tokens

    def _attribute(self, call: FinishedCall, tip: _Block) -> None:
        """The path to `tip` is this call's: its blocks that hold no known text hold the call's. Where all of the call's
        blocks have been told, what is left of them is what is believed."""
        path, above = self._unattributed_path(tip)
        if above is None and path and path[0].depth != 1:  # it begins in what we never were told of
            depth = call.cached_tokens // self._block_tokens
        else:
            depth = above.depth if above else 0
        text = self._text_of(call, above, depth)
        wanted = call.prompt_tokens // self._block_tokens
        for i, block in enumerate(path, start=depth + 1):
            if i <= wanted or i not in text.present:  # another answer to an old prompt is no part of what followed
                block.assign_text(text, i)
        reached = text.cached_blocks_up_to(wanted)
        if reached < wanted and depth + len(path) < wanted:
            return  # others are to be told yet
        del self._calls[call.id]
        self.calls_attributed += 1
        if reached < wanted:
            self._withdraw(text, reached)
        kept_bytes = text.bytes_at(reached * self._block_tokens) if reached < wanted else call.text_bytes
        kept = min(int(kept_bytes) // BLOCK_BYTES, len(call.chain))
        if self._cache.match(call.chain) < kept:  # a removal of before was told while this was computed
            self._cache.add(call.chain[:kept])

    def _text_of(self, call: FinishedCall, above: _Block | None, depth: int) -> _Text:
        """The call's, joined to what is known of its beginning: the first `depth` blocks."""
        end = (float(call.prompt_tokens), float(call.text_bytes))
        if above is None or above.text is None:
            return _Text(call.chain, [(0.0, 0.0), end], None, depth)
        text = above.text
        if text.is_prefix_of(call.chain):
            text.chain = call.chain
        elif not text.covers(call.chain):
            text = _Text(call.chain, text.anchors_up_to(depth * self._block_tokens), text, depth)
        if end[0] > text.anchors[-1][0] and end[1] > text.anchors[-1][1]:
            text.anchors.append(end)
        return text

    def _unattributed_path(self, tip: _Block) -> tuple[list[_Block], _Block | None]:
        """The blocks that lead to `tip` and hold no known text, from the first one on; and the one before them."""
        path: list[_Block] = []
        block: _Block | None = tip
        while block is not None and (block.text is None or not self._is_attributed(block)) and len(path) < BLOCKS_MAX:
            path.append(block)
            block = block.parent
        return path[::-1], block

    def _match_unclaimed(self, calls: Sequence[FinishedCall]) -> None:
        """For engines that do not tell sessions: calls and ends of paths that fit each other, and nothing else."""
        if self._reports_sessions or not self._block_tokens:
            return
        for call in calls:
            fitting = [name for name, tip in self._unclaimed.items() if self._fits(call, tip)]
            rivals = sum(self._expected_shape(other) == self._expected_shape(call) for other in self._calls.values())
            if len(fitting) == 1 and rivals == 1:
                self._attribute(call, self._unclaimed.pop(fitting[0]))

    def _fits(self, call: FinishedCall, tip: _Block) -> bool:
        blocks, cached = self._expected_shape(call)
        if tip.depth != blocks:
            return False
        path, _ = self._unattributed_path(tip)
        return len(path) >= blocks - cached

    def _expected_shape(self, call: FinishedCall) -> tuple[int, int]:
        """How many blocks deep its path is, and how many of them were there before it."""
        computed = call.prompt_tokens + call.output_tokens - 1
        return computed // self._block_tokens, call.cached_tokens // self._block_tokens


def _remember(memory: OrderedDict[K, V], key: K, value: V, at_most: int) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > at_most:
        memory.popitem(last=False)
