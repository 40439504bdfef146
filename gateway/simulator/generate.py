"""Generates traffic of the two recorded kinds, for tests and for users without recordings. Equal seeds, equal traffic.

The distributions follow the recordings, in round numbers. Chats share little but their first block and their own
history. Agents' prompts grow for hours, are edited at their ends, and are summarised when they get too long.
"""

from __future__ import annotations

import math
import random
from itertools import count

from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.simulator.traces import TraceRequest, TraceSession, TrafficTrace

SHARED_TOKENS = 512  # at the beginning of every chat's prompt: a system prompt
CHAT_TOKENS_MEDIAN, CHAT_TOKENS_SIGMA, CHAT_TOKENS_MAX = 6_000, 1.2, 126_000
CHAT_TURN_TOKENS_MEDIAN, CHAT_TURN_TOKENS_SIGMA = 700, 1.0
CHAT_CONTINUES = 0.4  # probability of another turn
CHAT_THINK_SECONDS = 180.0
CHAT_OUTPUT_TOKENS = 340

AGENT_TURNS_MEDIAN, AGENT_TURNS_SIGMA = 42, 1.0
AGENT_START_TOKENS = (14_000, 40_000)
AGENT_TURN_TOKENS_MEDIAN, AGENT_TURN_TOKENS_SIGMA = 900, 1.4
AGENT_SUMMARISES_AT_TOKENS = 160_000
AGENT_EDITS = 0.05  # probability that a turn rewrites the end of the turn before
AGENT_THINK_MEDIAN_SECONDS, AGENT_THINK_SIGMA = 10.0, 1.7
AGENT_OUTPUT_TOKENS = 440


def conversation(seed: int, *, chats: int = 7000, duration_seconds: float = 3600.0) -> TrafficTrace:
    """Chats that begin at random times. Open loop: later turns, too, come at their own times."""
    rng, new_blocks = random.Random(seed), count(SHARED_TOKENS // BLOCK_TOKENS)
    shared: tuple[range, ...] = (range(SHARED_TOKENS // BLOCK_TOKENS),)
    sessions = []
    for chat in range(chats):
        at = rng.uniform(0, duration_seconds)
        blocks, tokens = shared, SHARED_TOKENS
        added_tokens = draw_lognormal(rng, CHAT_TOKENS_MEDIAN, CHAT_TOKENS_SIGMA)
        while at < duration_seconds and tokens + added_tokens <= CHAT_TOKENS_MAX:
            blocks, tokens = grow_prompt(blocks, tokens, added_tokens, new_blocks)
            output_tokens = 1 + int(rng.expovariate(1 / CHAT_OUTPUT_TOKENS))
            sessions.append(TraceSession(f"{chat}", at, (TraceRequest(0.0, tokens, output_tokens, blocks),)))
            if rng.random() > CHAT_CONTINUES:
                break
            at += rng.expovariate(1 / CHAT_THINK_SECONDS) + 5.0
            added_tokens = output_tokens + draw_lognormal(rng, CHAT_TURN_TOKENS_MEDIAN, CHAT_TURN_TOKENS_SIGMA)
    return TrafficTrace(f"conversation-{seed}", sorted(sessions, key=lambda s: s.starts_at_seconds), closed_loop=False)


def agents(seed: int, *, sessions: int = 200, max_requests: int = 150) -> TrafficTrace:
    """Sessions of coding agents, closed loop. All begin at 0; `traces.staggered` spreads them."""
    rng, new_blocks = random.Random(seed), count()
    return TrafficTrace(
        f"agents-{seed}",
        [TraceSession(f"{number}", 0.0, _agent(rng, new_blocks, max_requests)) for number in range(sessions)],
        closed_loop=True,
    )


def _agent(rng: random.Random, new_blocks: count[int], max_requests: int) -> list[TraceRequest]:
    turns = min(max_requests, max(2, draw_lognormal(rng, AGENT_TURNS_MEDIAN, AGENT_TURNS_SIGMA)))
    start = rng.randint(*AGENT_START_TOKENS)
    blocks, tokens = grow_prompt((), 0, start, new_blocks)
    requests: list[TraceRequest] = []
    for _ in range(turns):
        think = draw_lognormal(rng, AGENT_THINK_MEDIAN_SECONDS, AGENT_THINK_SIGMA) if requests else 0
        output_tokens = 1 + int(rng.expovariate(1 / AGENT_OUTPUT_TOKENS))
        requests.append(TraceRequest(float(think), tokens, output_tokens, blocks))
        added_tokens = output_tokens + draw_lognormal(rng, AGENT_TURN_TOKENS_MEDIAN, AGENT_TURN_TOKENS_SIGMA)
        if tokens + added_tokens > AGENT_SUMMARISES_AT_TOKENS:
            blocks, tokens = grow_prompt((), 0, start, new_blocks)
        elif rng.random() < AGENT_EDITS and len(blocks) > 1:
            tokens -= len(blocks[-1]) * BLOCK_TOKENS
            blocks, tokens = grow_prompt(blocks[:-1], tokens, added_tokens, new_blocks)
        else:
            blocks, tokens = grow_prompt(blocks, tokens, added_tokens, new_blocks)
    return requests


def grow_prompt(
    blocks: tuple[range, ...], tokens: int, added_tokens: int, new_blocks: count[int]
) -> tuple[tuple[range, ...], int]:
    """A prompt with `added_tokens` more. What was an incomplete block becomes a full block, so it gets a new hash."""
    missing = (tokens + added_tokens) // BLOCK_TOKENS - sum(map(len, blocks))
    if missing <= 0:
        return blocks, tokens + added_tokens
    first = next(new_blocks)
    last = first
    for _ in range(missing - 1):
        last = next(new_blocks)
    return (*blocks, range(first, last + 1)), tokens + added_tokens


def draw_lognormal(rng: random.Random, median: float, sigma: float) -> int:
    """A whole number with this median, at least 1."""
    return max(1, int(rng.lognormvariate(math.log(median), sigma)))
