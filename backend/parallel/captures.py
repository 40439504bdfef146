"""Captured steps of several ranks: all ranks capture the same graphs in the same order, and replay them together.

Rank 0 captures a step as usual (engine/graphs.py). The step is first run and then captured, and what it announces to
the followers in each phase is run or captured there, too. The broadcast of the batch is a part of the graph, so a
replay needs one short message and no other data from the host.

    rank 0                                   followers
    runs the step         Forward, Logits    run them
    captures the step     BeginCapture       begin to capture
                          Forward, Logits    are captured
                          EndCapture         keep the graph under its number
    replays the step      Replay             replay their graph

A graph of rank 0 alone, such as one that samples, announces nothing, so the followers have none for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import torch

from backend.engine.captured_steps import DecodeStep
from backend.engine.graphs import GraphCapture
from backend.parallel.processes import Followers
from backend.parallel.wire import BeginCapture, EndCapture, Message, Replay

Execute = Callable[[Message], None]


class Announcer:
    """Sends the messages of rank 0, with those that begin and end a capture."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self._is_muted = False
        self._capture: tuple[int, GraphCapture] | None = None  # the one to begin with the next message
        self._has_begun = False

    def send(self, message: Message) -> None:
        """Sends a message, unless it is a part of a replay."""
        if self._is_muted:
            return
        if self._capture and self._capture[1].is_capturing:
            self._followers.send(BeginCapture(self._capture[0]))
            self._capture, self._has_begun = None, True
        self._followers.send(message)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """In the block, the followers replay what rank 0 computes."""
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = False

    def capture(self, number: int, capture: GraphCapture, step: DecodeStep, size: int) -> tuple[DecodeStep, bool]:
        """Captures a step on all ranks. Returns rank 0's part, and whether the followers have one."""
        self._capture = (number, capture)
        try:
            return capture(step, size), self._has_begun
        finally:
            if self._has_begun:
                self._followers.send(EndCapture())
            self._capture, self._has_begun = None, False


class RankCapture(GraphCapture):
    """Captures steps on all ranks."""

    def __init__(self, capture: GraphCapture, announcer: Announcer, followers: Followers) -> None:
        """capture: of rank 0."""
        self._capture, self._announcer, self._followers = capture, announcer, followers
        self._numbers = count()

    def __call__(self, step: DecodeStep, size: int) -> DecodeStep:
        number = next(self._numbers)
        replay, is_shared = self._announcer.capture(number, self._capture, step, size)
        if not is_shared:
            return replay

        def replay_together(seq_lens: Sequence[int]) -> None:
            with self._followers.computing():
                self._announcer.send(Replay(number))
                with self._announcer.muted():
                    replay(seq_lens)

        return replay_together


class FollowerCapture(ABC):
    """Makes a replayable step of messages."""

    @abstractmethod
    def __call__(self, messages: Iterable[Message]) -> Callable[[], None]:
        """Captures the execution of messages."""


class RepeatedMessages(FollowerCapture):
    """Executes the messages in each replay. For tests, and for devices without graphs."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute

    def __call__(self, messages: Iterable[Message]) -> Callable[[], None]:
        captured = []
        for message in messages:
            self._execute(message)
            captured.append(message)

        def replay() -> None:
            for message in captured:
                self._execute(message)

        return replay


class CudaFollowerCapture(FollowerCapture):
    """CUDA graphs, made as `CudaCapture` makes those of rank 0."""

    def __init__(self, execute: Execute, device: torch.device) -> None:
        self._execute = execute
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, messages: Iterable[Message]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            for message in messages:
                self._execute(message)
        return graph.replay
