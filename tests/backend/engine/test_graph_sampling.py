"""Decode steps over fixed buffers give what requests ask for: the same tokens and log-probabilities as plain steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.engine import engine as engine_module
from backend.engine import graphs
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.grammar import TokenSet
from backend.engine.graph_runner import GraphRunner, create_runner
from backend.engine.graph_sampling import GraphSampling
from backend.engine.graphs import NoCapture
from backend.engine.launched_step import LaunchedStep
from backend.engine.outputs import FinishReason, TokenLogprob
from backend.engine.plan import ScheduledRequest
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.engine.token_arrays import NOTHING_UNKNOWN
from backend.ops.sampling import MAX_BIASES, MAX_SEEN
from tests.backend.checkpoints import VOCAB_SIZE

Load = Callable[..., Engine]
Found = dict[str, tuple[list[int], list[TokenLogprob]]]


@pytest.fixture
def load(checkpoint_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Load:
    def load(*, ahead: bool, **options: Any) -> Engine:
        create = (lambda config: GraphRunner(config, NoCapture())) if ahead else create_runner
        monkeypatch.setattr(engine_module, "create_runner", create)
        limits: dict[str, Any] = {"num_blocks": 96, "block_size": 4, "num_threads": 1, "max_num_seqs": 6}
        return Engine.load(EngineConfig(model_dir=checkpoint_dir("llama"), device="cpu", **(limits | options)))

    return load


def some_params(dice: random.Random) -> dict[str, Any]:
    """A few of all parameters, in any combination."""
    stops = frozenset(range(0, VOCAB_SIZE, 9))
    words = tuple((dice.randrange(VOCAB_SIZE), dice.randrange(VOCAB_SIZE)) for _ in range(MAX_BIASES + 1))
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 0.7, 1.3],
        "top_p": [1.0, 0.9],
        "top_k": [0, 0, 30],
        "presence_penalty": [0.0, 0.0, 0.8],
        "frequency_penalty": [0.0, 0.0, -0.6, 0.9],
        "repetition_penalty": [1.0, 1.0, 1.5, 0.8],
        "logit_bias": [{}, {}, {3: 4.0, 77: -100.0, 9: 2.5}],
        "bad_words": [(), (), (), tuple((token,) for token in range(60)), words],
        "min_tokens": [0, 0, 3],
        "stop_token_ids": [frozenset(), stops],
        "logprobs": [None, None, 0, 2, 20],
    }
    return {name: dice.choice(values) for name, values in choices.items()}


def make_requests(seed: int) -> list[Request]:
    dice = random.Random(seed)
    requests = []
    for number in range(12):
        prompt = [dice.randrange(VOCAB_SIZE) for _ in range(dice.randrange(1, 12))]
        sampling = SamplingParams(max_tokens=dice.randrange(4, 20), seed=number, **some_params(dice))
        is_constrained = dice.random() < 0.2
        allowed = TokenSet(range(0, VOCAB_SIZE, 2), VOCAB_SIZE) if is_constrained else None
        requests.append(Request(f"r{number}", prompt, sampling, grammar=allowed))
    return requests


def results(engine: Engine, requests: Sequence[Request], steps_between: int) -> Found:
    found: Found = {request.request_id: ([], []) for request in requests}

    def step() -> None:
        for output in engine.step():
            found[output.request_id][0].extend(output.new_token_ids)
            found[output.request_id][1].extend(output.logprobs)

    for request in requests:
        engine.add(request)
        for _ in range(steps_between):
            if engine.has_unfinished:
                step()
    while engine.has_unfinished:
        step()
    return found


@pytest.mark.parametrize("seed", range(8))
def test_all_parameters_give_the_results_of_plain_steps(load: Load, seed: int) -> None:
    """Requests arrive, end and are preempted, so that they change their rows; the plain engine runs one at a time."""
    num_blocks = [30, 96][seed % 2]
    ours = results(load(ahead=True, num_blocks=num_blocks, max_model_len=64), make_requests(seed), seed % 4)
    plain = load(ahead=False, enable_prefix_caching=False)
    for request in make_requests(seed):
        assert results(plain, [request], 0)[request.request_id] == ours[request.request_id], request.sampling
    assert any(logprobs for _, logprobs in ours.values())


@pytest.mark.parametrize(
    ("params", "is_ahead"),
    [
        ({"presence_penalty": 0.5, "repetition_penalty": 1.2}, True),
        ({"logprobs": 5, "logit_bias": {4: 1.0}}, True),
        ({"min_tokens": 5, "stop_token_ids": frozenset({1})}, True),
        ({"bad_words": ((3,),)}, False),
        ({"grammar": TokenSet(range(50), VOCAB_SIZE)}, False),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
)
def test_steps_are_launched_before_their_tokens_are_known(
    load: Load, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], is_ahead: bool
) -> None:
    engine, launched = load(ahead=True), list[bool]()
    launch = graphs.DecodeGraphs.launch

    def noted(self: graphs.DecodeGraphs, plan: Any, unknown: Any = NOTHING_UNKNOWN) -> LaunchedStep:
        launched.append(bool(unknown))
        return launch(self, plan, unknown)

    monkeypatch.setattr(graphs.DecodeGraphs, "launch", noted)
    grammar = params.pop("grammar", None)
    request = Request("r", [5, 6], SamplingParams(max_tokens=9, **params), grammar=grammar)
    results(engine, [request], 0)
    # The host samples the first token of a request that is not plain, after the step with its prompt.
    assert launched == [request.is_plain and grammar is None, *[is_ahead] * 7]


def test_marks_are_written_once_while_a_request_keeps_its_row(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    fill = torch.Tensor.index_fill_

    def noted(self: torch.Tensor, dim: int, rows: torch.Tensor, value: int) -> torch.Tensor:
        written.extend(rows.tolist())
        return fill(self, dim, rows, value)

    engine = load(ahead=True)
    monkeypatch.setattr(torch.Tensor, "index_fill_", noted)
    penalties: dict[str, Any] = {"frequency_penalty": 0.4, "min_tokens": 6, "stop_token_ids": frozenset({1})}
    requests = [Request(f"r{i}", [5, i], SamplingParams(max_tokens=6 + 4 * i, **penalties)) for i in range(2)]
    results(engine, requests, 0)
    # Both at first. When both have reached `min_tokens`, the second one continues alone, in the row of the first.
    assert written == [0, 1, 0]


class LateOnce(TokenSet):
    """A grammar whose mask is late in one step, and which fails in another one."""

    num_calls, late_at, fails_at = 0, 0, 0

    def is_ready(self, seconds: float = 0.0) -> bool:
        self.num_calls += 1
        return self.num_calls != self.late_at

    def fill_mask(self, address: int, num_bytes: int) -> str:
        return "it is full" if self.num_calls >= self.fails_at > 0 else super().fill_mask(address, num_bytes)


def test_late_masks_and_errors_concern_their_own_row(load: Load) -> None:
    late, failing = LateOnce(range(0, 90, 3), VOCAB_SIZE), LateOnce(range(0, 90, 3), VOCAB_SIZE)
    late.late_at, failing.fails_at = 4, 3
    penalties: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "frequency_penalty": 0.4}

    def requests(*grammars: Any) -> list[Request]:
        sampling = SamplingParams(**penalties)
        return [Request(f"r{i}", [7, i], sampling, grammar=grammar) for i, grammar in enumerate(grammars)]

    found = requests(late, None, failing)
    ours = results(load(ahead=True), found, 0)
    expected = results(load(ahead=False), requests(TokenSet(range(0, 90, 3), VOCAB_SIZE), None), 0)
    assert {name: ours[name] for name in expected} == expected
    assert late.num_calls > 8
    assert [request.finish_reason for request in found] == [FinishReason.LENGTH] * 2 + [FinishReason.ERROR]
    assert len(ours["r2"][0]) == 2


def test_which_plans_fit() -> None:
    def fits(**params: Any) -> bool:
        request = Request("r", [1], SamplingParams(**({"max_tokens": 8} | params)))
        return GraphSampling.fits([ScheduledRequest(request, 0, 1)])

    assert fits(logit_bias=dict.fromkeys(range(MAX_BIASES), 1.0))
    assert not fits(logit_bias=dict.fromkeys(range(MAX_BIASES + 1), 1.0))
    assert not fits(logit_bias={1: 1.0}, bad_words=tuple((token,) for token in range(MAX_BIASES)))
    assert not fits(logit_bias={1: 1.0}, stop_token_ids=frozenset(range(MAX_BIASES)), min_tokens=1)
    assert fits(logit_bias={1: 1.0}, stop_token_ids=frozenset(range(MAX_BIASES)))
    assert fits(max_tokens=MAX_SEEN)
    assert not fits(max_tokens=MAX_SEEN, frequency_penalty=1.0)
