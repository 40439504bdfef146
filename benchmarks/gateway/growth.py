"""What a request costs by the length of its prompt, without sockets: `python -m benchmarks.gateway.growth`.

The gateway is `in_process.py`'s. The figures are microseconds of the process's CPU time for one JSON request, the
client's part included: the median and the lowest of `REQUESTS`. Each request begins with other text, so nothing of its
prompt is known from an earlier one. Other load on the machine changes the times, so compare two versions in turns.
"""

from __future__ import annotations

import json
import statistics
import time

from benchmarks.gateway.in_process import Ask, Load, json_load, run
from benchmarks.gateway.mock_server import JSON_REPLY

PROMPT_KB = (1, 10, 100, 1000)
MESSAGE_KB = 25  # of a longer prompt, which has several messages
REQUESTS, WARM_UP = 30, 5
LINE = "The engine keeps the keys and values of a prompt, so a longer prompt with the same beginning, hits.\n"


def load(prompt_kb: int, number: int) -> Load:
    """A request with a prompt of so many KB, which differs from that of any other `number` in its first characters."""
    count = max(1, prompt_kb // MESSAGE_KB)
    text = (LINE * (prompt_kb * 1024 // count // len(LINE) + 1))[: prompt_kb * 1024 // count]
    messages = [{"role": "assistant" if each % 2 else "user", "content": text} for each in range(count)]
    messages[0] = {"role": "user", "content": f"{number:9}{text[9:]}"}
    made = json_load()
    head, _, _ = made.request.partition(b"\r\ncontent-length: ")
    fields = {"model": "mock", "messages": messages, "max_tokens": 64}
    body = json.dumps(fields, separators=(",", ":")).encode()
    made.request = b"%b\r\ncontent-length: %d\r\n\r\n%b" % (head, len(body), body)
    assert made.reads == (JSON_REPLY,)
    return made


async def measure(ask: Ask) -> None:
    print(f"{'prompt':>8} {'median':>10} {'lowest':>10}  us")
    for prompt_kb in PROMPT_KB:
        micros = []
        for request in [load(prompt_kb, number) for number in range(WARM_UP + REQUESTS)]:
            began = time.process_time_ns()
            await ask(request)
            micros.append((time.process_time_ns() - began) / 1000)
        del micros[:WARM_UP]
        print(f"{prompt_kb:5} KB {statistics.median(micros):10,.0f} {min(micros):10,.0f}")


if __name__ == "__main__":
    run(measure)
