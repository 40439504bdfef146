"""Decode steps over fixed buffers, launched early: the same tokens as from one plain step after the other.

Without a GPU, a step is not captured but run as it is, over the same buffers and in the same order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.engine import captured_steps, graphs
from backend.engine import engine as engine_module
from backend.engine.captured_steps import DecodeStep
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.graph_runner import GraphRunner, create_runner
from backend.engine.graphs import MAX_SIZE, GraphCapture, sizes_up_to
from backend.engine.interruption import Interruption
from backend.engine.launched_step import LaunchedStep
from backend.engine.plan import ScheduledRequest
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.engine.token_arrays import NOTHING_UNKNOWN
from tests.backend.checkpoints import VOCAB_SIZE

Load = Callable[..., Engine]


@dataclass
class CountingCapture(GraphCapture):
    """Does not capture, but counts the steps. Runs each once, as a capture does."""

    sizes: list[int] = field(default_factory=list)

    def __call__(self, step: DecodeStep, size: int) -> DecodeStep:
        step((1,) * size)

        def counted(seq_lens: Sequence[int]) -> None:
            self.sizes.append(size)
            step(seq_lens)

        return counted


@pytest.fixture
def capture() -> CountingCapture:
    return CountingCapture()


@pytest.fixture
def load(checkpoint_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capture: CountingCapture) -> Load:
    def load(*, ahead: bool, **options: Any) -> Engine:
        create = (lambda config: GraphRunner(config, capture)) if ahead else create_runner
        monkeypatch.setattr(engine_module, "create_runner", create)
        defaults: dict[str, Any] = {"num_blocks": 96, "block_size": 4, "num_threads": 1, "max_num_seqs": 6}
        return Engine.load(EngineConfig(model_dir=checkpoint_dir("llama"), device="cpu", **(defaults | options)))

    return load


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.6, "seed": 2, "stop_token_ids": frozenset(range(0, VOCAB_SIZE, 12))},
    {"temperature": 1.2, "seed": 3, "stop_token_ids": frozenset(range(0, VOCAB_SIZE, 40)), "min_tokens": 5},
    {"temperature": 0.7, "seed": 2, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.8, "seed": 5, "min_p": 0.1},
]
SPECIAL: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 4, "logprobs": 2},
]


def make_request(random: random.Random, number: int, samplings: Sequence[dict[str, Any]]) -> Request:
    shared = [(5 * i * i + i) % VOCAB_SIZE for i in range(random.choice([0, 8, 21]))]
    prompt = [*shared, *(random.randrange(VOCAB_SIZE) for _ in range(random.randrange(1, 12)))]
    max_tokens = random.randrange(5, 30)
    sampling = SamplingParams(max_tokens=max_tokens, **random.choice(samplings))
    return Request(f"r{number}", prompt, sampling, priority=random.choice([0, 0, 0, 1]))


def copied(request: Request) -> Request:
    return Request(request.request_id, request.prompt_token_ids, request.sampling, priority=request.priority)


def output(request: Request) -> list[int]:
    return request.token_ids[request.num_prompt_tokens :]


def alone(engine: Engine, request: Request) -> list[int]:
    request = copied(request)
    engine.add(request)
    while engine.has_unfinished:
        engine.step()
    return output(request)


class RegularInterruption(Interruption):
    """Interrupts one step in eleven."""

    num_checks = 0

    def _is_due(self) -> bool:
        self.num_checks += 1
        self.num_interrupted += self.num_checks % 11 == 0
        return self.num_checks % 11 == 0


@pytest.mark.parametrize("seed", range(24))
def test_random_histories(
    load: Load,
    capture: CountingCapture,
    checkpoint_dir: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Requests arrive, end, are aborted and preempted at any time; prompts are chunked, and steps interrupted.

    Sizes are captured between the steps.
    """
    monkeypatch.setattr(captured_steps, "CAPTURE_AFTER", 2)
    monkeypatch.setattr(captured_steps, "PAUSE_SECONDS", 0.0)
    rolled = random.Random(seed)
    samplings = [SAMPLINGS, [*SAMPLINGS, *SPECIAL]][seed % 2]
    has_cache = rolled.random() < 0.7
    block_size = rolled.choice([1, 4, 16])
    drafts = {"speculation": "draft_model", "draft_model_dir": checkpoint_dir("llama")} if seed % 8 == 7 else {}
    engine = load(
        ahead=True,
        block_size=block_size,
        num_blocks=rolled.choice([70, 100, 300]) // block_size + 1,
        max_model_len=64,
        max_num_batched_tokens=rolled.choice([8, 64]),
        enable_prefix_caching=has_cache,
        kv_host_bytes=1 << 17 if has_cache and seed % 4 == 0 else None,
        **drafts,
    )
    if seed % 3 == 0:
        engine.interruption = RegularInterruption()
    requests, aborted = [], set()
    for number in range(rolled.randrange(4, 16)):
        requests.append(make_request(rolled, number, samplings))
        engine.add(requests[-1])
        for _ in range(rolled.choice([0, 1, 4, 12])):
            if engine.has_unfinished:
                engine.step()
            else:
                engine.runner.use_idle_time()
        if rolled.random() < 0.2:
            aborted.add(rolled.choice(requests).request_id)
            engine.abort(sorted(aborted)[-1])
        if rolled.random() < 0.1:
            stopped = rolled.choice(requests)
            aborted.add(stopped.request_id)
            engine.stop_early(stopped, stopped.num_output_tokens)
    while engine.has_unfinished:
        engine.step()
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert capture.sizes

    plain = load(ahead=False, enable_prefix_caching=False)
    for request in requests:
        expected = alone(plain, request)
        ours = output(request)
        assert ours == (expected[: len(ours)] if request.request_id in aborted else expected)


def run(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    return [output(request) for request in requests]


def test_every_step_but_the_first_is_launched_early(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(ahead=True)
    launched: list[tuple[int, bool]] = []
    launch = graphs.DecodeGraphs.launch

    def noted(self: graphs.DecodeGraphs, plan: Any, unknown: Any = NOTHING_UNKNOWN) -> LaunchedStep:
        launched.append((len(plan), bool(unknown)))
        return launch(self, plan, unknown)

    monkeypatch.setattr(graphs.DecodeGraphs, "launch", noted)
    lengths = [9, 6, 12]
    run(engine, [Request(f"r{i}", [i + 1], SamplingParams(max_tokens=n)) for i, n in enumerate(lengths)])
    # No token is computed twice, and none for requests that have ended.
    assert launched == [(sum(n > i for n in lengths), i > 0) for i in range(12)]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """What happens to steps, in order: "launched" or "read", and how many tokens each part computes."""
    noted: list[tuple[str, list[int]]] = []
    outputs = LaunchedStep.outputs
    launch = GraphRunner._launch

    def launched(self: GraphRunner, plan: Any, *args: Any, **options: Any) -> LaunchedStep:
        noted.append(("launched", [scheduled.num_tokens for scheduled in plan]))
        return launch(self, plan, *args, **options)

    def read(self: LaunchedStep) -> Any:
        noted.append(("read", self.lens))
        return outputs(self)

    monkeypatch.setattr(GraphRunner, "_launch", launched)
    monkeypatch.setattr(LaunchedStep, "outputs", read)
    return noted


def greedy(name: str, length: int, max_tokens: int) -> Request:
    prompt = [(3 * i + len(name)) % VOCAB_SIZE for i in range(length)]
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))


def test_chunks_of_a_prompt_beside_decodes_are_launched_early(load: Load, events: list[tuple[str, list[int]]]) -> None:
    engine = load(ahead=True, max_num_batched_tokens=8)
    requests = [greedy("short", 2, 6), greedy("long one", 18, 3)]
    ours = run(engine, requests)
    steps = [[2, 6], [1, 7], [1, 5], [1, 1], [1, 1], [1]]
    expected = [("launched", steps[0])]
    for step, following in pairwise(steps):
        expected += [("launched", following), ("read", step)]
    assert events == [*expected, ("read", steps[-1])]
    assert ours == [alone(load(ahead=False), request) for request in requests]


def test_a_prompt_that_arrives_is_launched_in_addition(load: Load, events: list[tuple[str, list[int]]]) -> None:
    """The step after it includes the token that the prompt samples, and is launched before both are read."""
    engine = load(ahead=True)
    first, second = greedy("first", 3, 9), greedy("second", 5, 4)
    engine.add(first)
    engine.step()
    engine.step()
    events.clear()
    engine.add(second)
    engine.step()
    assert events == [("launched", [5]), ("launched", [1, 1]), ("read", [1]), ("read", [5])]
    while engine.has_unfinished:
        engine.step()
    plain = load(ahead=False)
    assert [output(first), output(second)] == [alone(plain, first), alone(plain, second)]


def test_two_prompts_that_arrive_one_after_the_other(load: Load) -> None:
    """Three steps with prompts are in flight, each of which needs tokens of the two before it."""
    engine = load(ahead=True, max_num_batched_tokens=8)
    requests = [greedy("first", 6, 8), greedy("second", 19, 5), greedy("third one", 21, 5)]
    for request in requests:
        engine.add(request)
        engine.step()
        engine.step()
    while engine.has_unfinished:
        engine.step()
    plain = load(ahead=False)
    assert [output(request) for request in requests] == [alone(plain, request) for request in requests]


@pytest.mark.parametrize("end", ["abort", "stop_early", "expire"])
def test_a_request_that_ends_in_the_middle_of_its_prompt(load: Load, end: str) -> None:
    """Its next chunk has been launched, and the step's other tokens count."""
    engine = load(ahead=True, max_num_batched_tokens=8)
    short, long = greedy("short", 2, 9), greedy("long one", 30, 3)
    long.deadline = 1.0 if end == "expire" else math.inf
    for request in (short, long):
        engine.add(request)
    engine.step()
    engine.step()
    match end:
        case "abort":
            engine.abort("long one")
        case "stop_early":
            engine.stop_early(long, 0)
        case _:
            engine.expire(2.0)
    while engine.has_unfinished:
        engine.step()
    engine.check_integrity()
    assert output(short) == alone(load(ahead=False), short)
    assert not output(long)


def test_an_error_in_a_launch_ends_the_step(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(ahead=True, max_num_batched_tokens=8)
    engine.add(greedy("long one", 30, 3))
    engine.step()

    def failing(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.runner._prompts, "run", failing)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()


def test_a_token_launched_after_a_stop_token_is_dropped(load: Load) -> None:
    """The stop token is seen when the next step has been launched. That step's other rows count."""
    plain = load(ahead=False)
    prompts = [[3, 1, 4], [1, 5, 9], [2, 6, 5]]
    unstopped = [SamplingParams(max_tokens=20, temperature=0.0)] * 3
    expected = run(plain, [Request(f"r{i}", p, s) for i, (p, s) in enumerate(zip(prompts, unstopped, strict=True))])
    stop = SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=frozenset([expected[1][7]]))
    samplings = [unstopped[0], stop, unstopped[2]]
    ours = run(
        load(ahead=True), [Request(f"r{i}", p, s) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True))]
    )
    ended = expected[1].index(expected[1][7]) + 1
    assert ours == [expected[0], expected[1][:ended], expected[2]]


def test_a_launched_step_covers_exactly_its_tokens_in_their_slots() -> None:
    request, namesake = (Request("same", [1, 2, 3], SamplingParams(max_tokens=9)) for _ in range(2))
    request.block_table = namesake.block_table = [4, 5]
    part = ScheduledRequest(request, 5, 1)
    launched = LaunchedStep([part], [0], torch.tensor([7]), 0, torch.zeros(2, dtype=torch.int64))
    assert launched.computes([part])
    assert not launched.computes([part, part])
    request.block_table += [6]  # grows in place
    assert launched.covers(part, 0)
    assert not launched.covers(part, None)
    assert not launched.covers(ScheduledRequest(namesake, 5, 1), 0)
    assert not launched.covers(ScheduledRequest(request, 4, 1), 0)
    assert not launched.covers(ScheduledRequest(request, 5, 2), 0)
    request.block_table = [9, 5]
    assert not launched.covers(part, 0)  # preempted and resumed in other blocks since


@pytest.mark.parametrize("most", [1, 2, 3, 6, 8, 9, 64, 200, 1000])
def test_sizes(most: int) -> None:
    sizes = sizes_up_to(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, MAX_SIZE)
    for count in range(1, sizes[-1] + 1):
        size = next(size for size in sizes if size >= count)
        assert size < count + 8


def test_a_step_uses_the_next_larger_size(load: Load, capture: CountingCapture) -> None:
    engine = load(ahead=True, max_num_seqs=12, max_num_batched_tokens=64)
    for count in (1, 2, 3, 5, 9):
        capture.sizes.clear()
        run(engine, [Request(f"{i}", [i + 1, 2], SamplingParams(max_tokens=3, temperature=0.0)) for i in range(count)])
        decodes = {size for size in capture.sizes if size <= 12}  # the prompts' sizes count tokens, from 16 on
        assert decodes == {{1: 1, 2: 2, 3: 4, 5: 8, 9: 12}[count]}


def test_a_size_is_captured_while_requests_run(
    load: Load, capture: CountingCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture overwrites the buffers of steps, so none is in flight: one step is not launched early."""
    monkeypatch.setattr(captured_steps, "CAPTURE_AFTER", 3)
    monkeypatch.setattr(captured_steps, "PAUSE_SECONDS", 0.0)
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "num_blocks": 200}
    engine = load(ahead=True, **limits)
    requests = [
        Request(f"{i}", [(i * i + j) % VOCAB_SIZE for j in range(9)], SamplingParams(max_tokens=13, temperature=0.0))
        for i in range(20)
    ]
    ours = run(engine, requests)
    # The prompts in one step, then the model and the sampling of each step of decodes.
    assert capture.sizes == [256, *[32] * 6, *[24] * 18]
    plain = load(ahead=False, **limits)
    assert ours == run(plain, [copied(request) for request in requests])
