"""One thread for the work on large request bodies, so that the event loop serves other requests meanwhile.

Python runs one thread at a time. A call into C, such as one of the JSON decoder, keeps the others waiting until it
returns. So the work must consist of calls that take some milliseconds each. One thread does all of it, because the
event loop would wait for a call of each of several threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LARGE_BYTES = 512 * 1024  # work on fewer bytes takes some milliseconds, and is done by the event loop itself

Result = TypeVar("Result")

_thread = ThreadPoolExecutor(1, thread_name_prefix="large bodies")  # starts when it is needed


async def in_thread(work: Callable[..., Result], *arguments: object) -> Result:
    """Run `work(*arguments)` in the thread. Work that has begun is completed even if the caller is cancelled."""
    return await asyncio.get_running_loop().run_in_executor(_thread, work, *arguments)
