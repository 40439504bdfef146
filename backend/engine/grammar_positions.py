"""A position in a grammar: the tokens that it forces next, and the mask after them. And the message that carries it.

A token is forced if the mask allows no other, as in the names and punctuation of a JSON schema. It needs no logits, so
the engine appends forced tokens without a forward pass for each (jump-forward), and computes them together with the
next token. The result is the same as with one step for each.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence

from llguidance import LLMatcher

MAX_FORCED = 32  # tokens in one position
# CPU time for finding them, after the first mask: between two tokens, and at the start, when nothing is warm yet.
FORCED_CPU_SECONDS = 0.001
FIRST_FORCED_CPU_SECONDS = 0.1
COUNT = struct.Struct("<I")  # of the forced tokens


def mask_size(vocab_size: int) -> int:
    """The bytes of one mask: a bit for each token, in whole int32."""
    return -(-vocab_size // 32) * 4


def skip_forced(matcher: LLMatcher, cpu_seconds: float = FORCED_CPU_SECONDS) -> tuple[list[int], bytes]:
    """Advances past the forced tokens, and returns them with the mask after them.

    A token that ends the sequence is not among them. Forced tokens that are not found in time are found later.
    """
    mask = matcher.compute_bitmask()
    begun, forced = time.process_time(), list[int]()
    while len(forced) < MAX_FORCED and time.process_time() - begun < cpu_seconds:
        allowed = int.from_bytes(mask, "little")
        is_forced = allowed and not allowed & (allowed - 1)
        if not is_forced or matcher.is_stopped() or matcher.is_accepting():
            break
        forced.append(allowed.bit_length() - 1)
        matcher.consume_token(forced[-1])
        mask = matcher.compute_bitmask()
    return forced, mask


def pack_position(forced: Sequence[int], mask: bytes) -> bytes:
    """The message of a position."""
    return mask + COUNT.pack(len(forced)) + struct.pack(f"<{len(forced)}I", *forced)


def unpack_position(message: bytes, vocab_size: int) -> tuple[tuple[int, ...], bytes, bytes]:
    """The forced tokens, the mask after them, and what follows in the message."""
    size = mask_size(vocab_size)
    (count,) = COUNT.unpack_from(message, size)
    begin, end = size + COUNT.size, size + COUNT.size * (1 + count)
    return struct.unpack(f"<{count}I", message[begin:end]), message[:size], message[end:]
