"""Finds out which prompt's text each block of an engine holds, so that evictions can be applied to the cache model.

An engine identifies blocks by hashes over tokens, a fingerprint identifies prefixes by hashes over text. No tokenizer
runs here, and none is needed. It is enough to know for which call a block was computed, and how far into the prompt the
block reaches.

*Which call.* The gateway sends each call's id as `x-session-id`. Engines that know sessions (vLLM from 0.32, the
bundled engine) put it into the events of the blocks that they stored for the call. For other engines, a call's blocks
are those that form one path of the length that its usage implies: `cached` tokens were found, and all of `prompt +
output` except the last token were computed. If more than one path fits, none is taken.

*How far.* When a call ends, its usage reports its prompt's tokens, and its text has a known length. Between two such
anchors, tokens and bytes are proportional. Each prompt's end is an anchor, so a conversation has one for each turn. An
error of a block or two only matters at the very edge of an eviction.

*What is left.* A call counts as cached from the moment when it is sent. Once the call has ended and its blocks have
been reported, only the blocks that the engine still holds count as cached. From then on, each removed block takes its
text, and all text behind it, out of the cache model. The two may come in either order: a block that is removed before
its call ends is remembered until then. Blocks that cannot be attributed change nothing: there the cache model works as
without events, and `cached_tokens` of responses corrects it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from gateway.prefix.cache_model import CacheModel
from gateway.prefix.events.base import BlockHash, BlocksRemoved, BlocksStored
from gateway.prefix.fingerprint import BLOCK_BYTES

BLOCKS_MAX = 1 << 19  # tracked per engine: 8M tokens in blocks of 16; the oldest are forgotten first
GONE_MAX = 1 << 18  # removed blocks that are remembered for calls that have not ended
CALLS_MAX = 256  # finished calls that are remembered for late events
SESSIONS_MAX = 4096  # whose last block is remembered until their call ends
ALL_KNOWN_SHARE = 0.95  # of the capacity: if so many blocks are known, all are; the others are free or incomplete
UNCLAIMED_MAX = 256  # last blocks of paths without a call yet, of engines that do not report sessions

K = TypeVar("K")
V = TypeVar("V")


class FinishedCall(NamedTuple):
    """A finished call, with the engine's own token counts."""

    id: str
    chain: Sequence[int]  # its fingerprint
    text_bytes: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class _Text:
    """A prompt's fingerprint, shared by the blocks that hold its text. It grows with its conversation.

    `anchors` are points known in tokens and in bytes: the beginning, and the ends of its prompts. A text that begins
    like another one, its `trunk`, has the first `shared` blocks in common with it, and blocks of its own behind them.
    """

    __slots__ = ("anchors", "chain", "present", "shared", "trunk")

    def __init__(
        self, chain: Sequence[int], ends: list[tuple[float, float]], trunk: _Text | None = None, shared: int = 0
    ) -> None:
        self.chain = chain
        self.anchors = ends
        self.trunk = trunk
        self.shared = shared
        self.present: dict[int, _Block] = {}  # its own blocks that the engine has cached, by depth

    @property
    def tokens(self) -> float:
        """The tokens of all text that the fingerprint covers."""
        tokens, text_bytes = self.anchors[-1]
        whole = len(self.chain) * BLOCK_BYTES
        return tokens * whole / text_bytes if text_bytes > whole else tokens

    def bytes_at(self, token: float) -> float:
        """The position in the text, in bytes, at which a token begins."""
        before, after = (0.0, 0.0), self.anchors[-1]
        for end in self.anchors:
            if end[0] > token:
                after = end
                break
            before = end
        tokens, text_bytes = after[0] - before[0], after[1] - before[1]
        return before[1] + (token - before[0]) * text_bytes / tokens if tokens > 0 else before[1]

    def is_prefix_of(self, chain: Sequence[int]) -> bool:
        """Whether `chain` begins with this text's whole chain."""
        return len(chain) >= len(self.chain) and chain[len(self.chain) - 1] == self.chain[-1]

    def covers(self, chain: Sequence[int]) -> bool:
        """Whether this text's chain begins with `chain`."""
        return len(chain) <= len(self.chain) and self.chain[len(chain) - 1] == chain[-1]

    def anchors_up_to(self, token: float) -> list[tuple[float, float]]:
        """The anchors before a token, and one at that token, where another text branches off."""
        ends = [end for end in self.anchors if end[0] < token]
        return [*ends, (token, self.bytes_at(token))]

    def cached_blocks_up_to(self, depth: int) -> int:
        """How many of its first `depth` blocks the engine has cached without a gap."""
        first, trunk = self.shared, self.trunk
        if trunk is not None and (reached := trunk.cached_blocks_up_to(min(first, depth))) < first:
            return reached
        while first < depth and first + 1 in self.present:
            first += 1
        return first


class _Block:
    """A block of the engine's cache.

    `depth` counts blocks from the prompt's beginning, including this one; 0 if unknown, because its parent was never
    reported. Once attributed, `text` is the prompt whose text it holds, or whose answer, behind the prompt's end.
    """

    __slots__ = ("__weakref__", "depth", "parent", "present", "text")

    def __init__(self, parent: _Block | None, depth: int) -> None:
        self.parent = parent
        self.depth = depth
        self.present = True
        self.text: _Text | None = None

    def assign_text(self, text: _Text, depth: int) -> None:
        """Attribute the block to a position of a text.

        Replaces its former text, and the block that was at that position.
        """
        self.detach_text()
        self.text, self.depth = text, depth
        if self.present:
            if (other := text.present.get(depth)) is not None:
                other.text = None
            text.present[depth] = self

    def detach_text(self) -> _Text | None:
        """Detach a removed block from its text. Returns the text that lacks the block now."""
        text = self.text
        if text is None or text.present.get(self.depth) is not self:
            return None
        del text.present[self.depth]
        return text


class BlockIndex:
    """The blocks of one engine, attributed to texts.

    A `CacheEventListener`; corrects `cache`. Owned by the event loop.
    """

    def __init__(self, cache: CacheModel) -> None:
        self._cache = cache
        self._blocks: OrderedDict[BlockHash, _Block] = OrderedDict()  # cached by the engine
        # The cached blocks, and removed ones that other objects still refer to.
        self._known: WeakValueDictionary[BlockHash, _Block] = WeakValueDictionary()
        self._block_tokens = 0
        self._reports_sessions = False
        self._in_doubt = False  # events were lost, so the engine may have blocks that are unknown here
        self._capacity_tokens = 0  # in engine tokens, if the engine reports it
        self._calls: OrderedDict[str, FinishedCall] = OrderedDict()
        self._tips: OrderedDict[str, _Block] = OrderedDict()  # the last block of each session
        self._unclaimed: OrderedDict[BlockHash, _Block] = OrderedDict()  # the last blocks of paths without a session
        self.calls_attributed = 0
        self.calls_finished = 0
        self.blocks_removed = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def present_tokens(self) -> int:
        """How many engine tokens are cached, as far as is known. In doubt, the cache is taken to be full."""
        known = len(self._blocks) * self._block_tokens
        return max(known, self._capacity_tokens) if self._in_doubt else known

    @property
    def in_doubt(self) -> bool:
        """Whether events were lost and the engine may have blocks that are unknown here.

        It ends once the known blocks fill the cache, because then there is no room for others.
        """
        if self._in_doubt and self._capacity_tokens:
            self._in_doubt = len(self._blocks) * self._block_tokens < ALL_KNOWN_SHARE * self._capacity_tokens
        return self._in_doubt

    @property
    def reports_all_evictions(self) -> bool:
        """Whether every eviction is reported, so that none need be concluded from responses."""
        return self._reports_sessions and not self.in_doubt

    def set_capacity(self, engine_tokens: int) -> None:
        """Set the engine's reported cache capacity."""
        self._capacity_tokens = engine_tokens

    # -- events of the engine --------------------------------------------------------------------------------------

    def stored(self, event: BlocksStored) -> None:
        """Add the blocks, and attribute them if their call has ended already."""
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
        """Add an event's blocks to the index. Returns the last one."""
        block_before = self._known.get(event.parent) if event.parent is not None else None
        depth = block_before.depth if block_before else 0
        counted = event.parent is None or depth > 0  # otherwise the depth is unknown, and stays 0
        if event.parent is not None:
            self._unclaimed.pop(event.parent, None)
        for block_hash in event.hashes:
            depth += counted
            block = self._known.get(block_hash)
            if block is None:
                block = self._known[block_hash] = _Block(block_before, depth)
            elif not block.depth:
                block.parent, block.depth = block_before, depth
            block.present = True
            if block.text is not None:
                block.text.present.setdefault(block.depth, block)
            self._blocks[block_hash] = block_before = block
        while len(self._blocks) > BLOCKS_MAX:
            self._blocks.popitem(last=False)
        # Removed blocks live as long as a session's last block leads to them, so forgetting sessions frees them.
        while self._tips and len(self._known) - len(self._blocks) > GONE_MAX:
            self._tips.popitem(last=False)
        assert block_before is not None
        return block_before

    def removed(self, event: BlocksRemoved) -> None:
        """Remove the blocks, and the text that they held, from the cache model."""
        for block_hash in event.hashes:
            block = self._blocks.pop(block_hash, None) or self._known.get(block_hash)
            if block is None or not block.present:
                continue
            block.present = False
            self.blocks_removed += 1
            if (text := block.detach_text()) is not None:
                self._withdraw(text, block.depth - 1)

    def _withdraw(self, text: _Text, kept: int) -> None:
        """At most the first `kept` blocks of this text are left: remove the rest from the cache model."""
        kept_text = int(text.bytes_at(kept * self._block_tokens)) // BLOCK_BYTES
        if kept_text < len(text.chain):
            self._cache.remove(text.chain[: kept_text + 1])

    def cleared(self) -> None:
        """The cache is empty: forget all blocks, and clear the cache model."""
        self.events_lost()
        self._in_doubt = False
        self._cache.clear()

    def events_lost(self) -> None:
        """Forget all blocks. The cache model stays: it is as good as one without events, and responses correct it."""
        self._in_doubt = True
        self._blocks.clear()
        self._known.clear()
        self._tips.clear()
        self._unclaimed.clear()

    # -- calls of the gateway --------------------------------------------------------------------------------------

    def call_finished(self, call: FinishedCall) -> None:
        """A call at this engine has ended. The events of its blocks may come before or after this."""
        if not call.chain or not call.prompt_tokens:
            return
        self.calls_finished += 1
        if self._block_tokens:
            blocks, cached = self._expected_shape(call)
            if blocks <= cached:  # everything was cached, so there are no events
                self.calls_attributed += 1
                return
        _remember(self._calls, call.id, call, CALLS_MAX)
        tip = self._tips.pop(call.id, None)
        if tip is not None:
            self._attribute(call, tip)
        elif not self._reports_sessions:
            self._match_unclaimed([call])

    def _is_attributed(self, block: _Block) -> bool:
        """Whether the block holds known text.

        An answer's blocks do only after the next turn's prompt has repeated it.
        """
        return block.text is not None and block.depth * self._block_tokens <= block.text.tokens

    def _attribute(self, call: FinishedCall, tip: _Block) -> None:
        """Attribute the path that ends in `tip` to the call: its blocks without known text hold the call's.

        Once all of the call's blocks have been reported, the cache model is corrected to what the engine still has of
        them.
        """
        path, block_before = self._unattributed_path(tip)
        if block_before is None and path and path[0].depth != 1:  # the path's beginning was never reported
            depth = call.cached_tokens // self._block_tokens
        else:
            depth = block_before.depth if block_before else 0
        text = self._text_of(call, block_before, depth)
        prompt_blocks = call.prompt_tokens // self._block_tokens
        for i, block in enumerate(path, start=depth + 1):
            # Behind the prompt is the answer. If the conversation continued with another answer, that one stays.
            if i <= prompt_blocks or i not in text.present:
                block.assign_text(text, i)
        reached = text.cached_blocks_up_to(prompt_blocks)
        if reached < prompt_blocks and depth + len(path) < prompt_blocks:
            return  # more of its blocks will be reported
        del self._calls[call.id]
        self.calls_attributed += 1
        if reached < prompt_blocks:
            self._withdraw(text, reached)
        kept_bytes = text.bytes_at(reached * self._block_tokens) if reached < prompt_blocks else call.text_bytes
        kept = min(int(kept_bytes) // BLOCK_BYTES, len(call.chain))
        if self._cache.match(call.chain) < kept:  # an earlier eviction was reported while this was being computed
            self._cache.add(call.chain[:kept])

    def _text_of(self, call: FinishedCall, block_before: _Block | None, depth: int) -> _Text:
        """The call's text, joined to the known text of its first `depth` blocks."""
        end = (float(call.prompt_tokens), float(call.text_bytes))
        if block_before is None or block_before.text is None:
            return _Text(call.chain, [(0.0, 0.0), end], None, depth)
        text = block_before.text
        if text.is_prefix_of(call.chain):
            text.chain = call.chain
        elif not text.covers(call.chain):
            text = _Text(call.chain, text.anchors_up_to(depth * self._block_tokens), text, depth)
        if end[0] > text.anchors[-1][0] and end[1] > text.anchors[-1][1]:
            text.anchors.append(end)
        return text

    def _unattributed_path(self, tip: _Block) -> tuple[list[_Block], _Block | None]:
        """The blocks that lead to `tip` and hold no known text, first one first, and the block before them."""
        path: list[_Block] = []
        block: _Block | None = tip
        while block is not None and (block.text is None or not self._is_attributed(block)) and len(path) < BLOCKS_MAX:
            path.append(block)
            block = block.parent
        return path[::-1], block

    def _match_unclaimed(self, calls: Sequence[FinishedCall]) -> None:
        """Without sessions: match calls with unclaimed paths. A match must be unique on both sides."""
        if self._reports_sessions or not self._block_tokens:
            return
        for call in calls:
            fitting = [name for name, tip in self._unclaimed.items() if self._fits(call, tip)]
            similar_calls = sum(
                self._expected_shape(other) == self._expected_shape(call) for other in self._calls.values()
            )
            if len(fitting) == 1 and similar_calls == 1:
                self._attribute(call, self._unclaimed.pop(fitting[0]))

    def _fits(self, call: FinishedCall, tip: _Block) -> bool:
        """Whether a path has the call's depth, and its new blocks begin where the call's cached ones end."""
        blocks, cached = self._expected_shape(call)
        if tip.depth != blocks:
            return False
        path, _ = self._unattributed_path(tip)
        return len(path) >= blocks - cached

    def _expected_shape(self, call: FinishedCall) -> tuple[int, int]:
        """The depth of the call's path in blocks, and how many of those blocks were cached before."""
        computed = call.prompt_tokens + call.output_tokens - 1  # the last output token's keys are never computed
        return computed // self._block_tokens, call.cached_tokens // self._block_tokens


def _remember(memory: OrderedDict[K, V], key: K, value: V, at_most: int) -> None:
    """Put an entry into a bounded mapping. The oldest entries are forgotten first."""
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > at_most:
        memory.popitem(last=False)
