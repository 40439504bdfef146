"""Bills a prompt that a prefill deployment has computed as that deployment counted it.

Two deployments count the prompt of such a call: the prefill deployment, which computes what is not in its cache, and
the decode deployment, which loads the result and counts that as cached. Billed by the second count, a prompt that was
computed for this call would have the price of cached input. So the receipt has the first count, and the row of unbilled
work has the second one. Both deployments have counted the same number of tokens, so the sum of both rows is what the
two engines have counted, to the token, and so is the total of each.

A load that fails costs the tenant nothing: the decode deployment then computes the prompt again, which is its row.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.core.kv_transfer import PREFILLED
from gateway.types import Attempt, Usage


def with_prefill_billed(usage: Usage, attempts: Sequence[Attempt]) -> tuple[Usage, Sequence[Attempt]]:
    """Exchange the counts of the prompt in an answer's usage and in its prefill's unbilled work.

    The last attempt is the one that answered. Changes nothing if the answer was not prepared by the prefill, or if one
    of both counts is an estimate.
    """
    if not usage.exact:
        return usage, attempts
    answer = attempts[-1]
    for number, attempt in enumerate(attempts):
        prefill = attempt.unbilled
        if attempt.outcome != PREFILLED or prefill is None or attempt.deployment != answer.blocks_from:
            continue
        if not prefill.exact or prefill.input != usage.input or prefill.cache_write or usage.cache_write:
            break  # they count differently, so the difference has no meaning
        billed = msgspec.structs.replace(usage, input_uncached=prefill.input_uncached, cache_read=prefill.cache_read)
        loaded = msgspec.structs.replace(prefill, input_uncached=usage.input_uncached, cache_read=usage.cache_read)
        changed = list(attempts)
        changed[number] = msgspec.structs.replace(attempt, unbilled=loaded)
        return billed, changed
    return usage, attempts
