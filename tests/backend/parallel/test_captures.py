"""Captured steps of two ranks: captured on both in the same order, replayed together, and the tokens of one process.

Without a GPU, a captured step is computed again in a replay, over the same buffers. The messages are those for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from backend.engine import engine as engine_module
from backend.engine.captured_steps import DecodeStep
from backend.engine.graph_runner import GraphRunner
from backend.engine.graphs import GraphCapture, NoCapture
from backend.engine.resolved_config import ResolvedConfig
from backend.engine.runner import Runner
from backend.parallel.wire import BeginCapture, EndCapture, Forward, Logits, Message, Replay
from tests.backend.engine.test_invariance_of_families import outputs, requests
from tests.backend.parallel.conftest import LoadEngine


class RepeatingCapture(GraphCapture):
    """Runs a step, captures it, and computes it again in each replay."""

    def __init__(self) -> None:
        self._is_capturing = False

    @property
    def is_capturing(self) -> bool:
        return self._is_capturing

    def __call__(self, step: DecodeStep, size: int) -> DecodeStep:
        step((1,) * size)
        self._is_capturing = True
        try:
            step((1,) * size)
        finally:
            self._is_capturing = False
        return step


@pytest.mark.parametrize("capture", [RepeatingCapture, NoCapture])
def test_tokens_of_captured_steps(
    capture: Callable[[], GraphCapture],
    load: LoadEngine,
    checkpoint_dir: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = checkpoint_dir("llama")
    expected = outputs(load(directory), requests())

    def create(config: ResolvedConfig) -> Runner:
        model = Runner(config).model
        return GraphRunner(config, model.capture_of_ranks(capture()), model)

    monkeypatch.setattr(engine_module, "create_runner", create)
    options = {"block_size": 4, "num_blocks": 128, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    engine = load(directory, tensor_parallel_size=2, **options)
    sent = _record_messages(engine.runner, monkeypatch)
    assert outputs(engine, requests()) == expected
    kinds = {type(message) for message in sent}
    if capture is RepeatingCapture:
        assert Replay in kinds
        assert sum(isinstance(message, Replay) for message in sent) > len(sent) // 3
    else:
        assert kinds == {Forward, Logits}


def test_only_what_is_captured_on_rank_0_is_captured_on_others(
    load: LoadEngine, checkpoint_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(checkpoint_dir("llama"), tensor_parallel_size=2).runner.model
    sent = _record_messages(model, monkeypatch)
    capture = model.capture_of_ranks(RepeatingCapture())
    replayed = []

    def of_rank_0(seq_lens: Sequence[int]) -> None:
        replayed.append(seq_lens)

    capture(of_rank_0, 1)((7,))
    assert replayed[-1] == (7,)
    assert not sent
    assert {BeginCapture, EndCapture}.isdisjoint(map(type, sent))


def _record_messages(owner: object, monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """What rank 0 sends from now on."""
    followers = getattr(owner, "_followers", None) or owner.model._followers  # type: ignore[attr-defined]
    sent: list[Message] = []
    send = followers.send

    def record(message: Message) -> None:
        sent.append(message)
        send(message)

    monkeypatch.setattr(followers, "send", record)
    return sent
