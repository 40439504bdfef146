"""A follower: a process that repeats the forward passes of rank 0 on its part of the model.

`python -m backend.parallel.follower FD`, where FD is its end of the socket pair. It ends when rank 0 ends. Any error
ends it too, and rank 0 then ends the engine.
"""

from __future__ import annotations

from backend import early_imports  # noqa: F401

# isort: split
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from itertools import takewhile

import torch

from backend.engine.errors import EngineError
from backend.engine.paged_model import PagedModel
from backend.engine.resolved_config import ResolvedConfig
from backend.parallel.captures import CudaFollowerCapture, FollowerCapture, RepeatedMessages
from backend.parallel.config import config_of_rank, create_division
from backend.parallel.group import ExchangeFailed, RankGroup
from backend.parallel.wire import (
    BeginCapture,
    EndCapture,
    Forward,
    Imported,
    Link,
    Loaded,
    Logits,
    Message,
    Replay,
    Start,
)

POLL_SECONDS = 0.2  # between two looks whether rank 0 still exists
END_SECONDS = 30.0  # that rank 0 has to end this process
FAILED = 1

logger = logging.getLogger(__name__)


class Follower:
    """One follower's model, and its end of the group."""

    def __init__(self, config: ResolvedConfig, rank: int, group: RankGroup) -> None:
        torch.set_num_threads(config.num_threads)
        own = config_of_rank(config, rank)
        self._group = group
        self._device = own.device
        self._block_size = config.block_size
        self._model = PagedModel(own, division=create_division(config, rank, group))
        self._captured: dict[int, Callable[[], None]] = {}
        self._capture: FollowerCapture = RepeatedMessages(self.execute)
        if own.device.type == "cuda":
            self._capture = CudaFollowerCapture(self.execute, own.device)
        self._hidden = torch.empty((0, config.model.hidden_size), dtype=own.dtype, device=own.device)

    @torch.inference_mode()
    def execute(self, message: Message) -> None:
        """Takes part in a computation of rank 0."""
        match message:
            case Forward():
                whole, views = message.buffer(self._device)
                self._group.broadcast(whole)
                self._hidden = self._model.forward(message.make(views, self._block_size))
            case Logits(num_rows=None):
                self._model.scores(self._hidden)
            case Logits(num_rows=int(num_rows)):
                hidden = self._hidden.new_empty((num_rows, self._hidden.shape[1]))
                self._group.broadcast(hidden)
                self._model.scores(hidden)
            case Replay(number):
                self._captured[number]()
            case _:
                raise TypeError(f"unexpected message {message!r}")

    @torch.inference_mode()
    def capture(self, number: int, messages: Iterable[Message]) -> None:
        """Captures the execution of messages, for `Replay`."""
        self._captured[number] = self._capture(messages)


def run(link: Link) -> None:
    """Loads the model and executes messages until rank 0 ends."""
    link.send(Imported())
    start = link.receive(None)
    assert isinstance(start, Start)
    config = start.config
    if config.device.type == "cuda":
        torch.cuda.set_device(config_of_rank(config, start.rank).device)
    try:
        group = RankGroup(start.rank, config.tensor_parallel_size, start.store, config.device)
        follower = Follower(config, start.rank, group)
    except EngineError as error:
        link.send(Loaded(error.message))
        return
    link.send(Loaded())
    messages = link.messages()
    for message in messages:
        if isinstance(message, BeginCapture):
            follower.capture(message.number, takewhile(lambda each: not isinstance(each, EndCapture), messages))
        else:
            follower.execute(message)


def _end_with_parent(parent: int) -> None:
    """Ends this process when rank 0 has ended, even if this process waits for an exchange that never happens."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(FAILED)


def main() -> None:
    """Runs a follower. Signals that end a server are sent to all its processes, but rank 0 decides when to end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    try:
        run(Link(socket.socket(fileno=int(sys.argv[1]))))
    except (EOFError, ConnectionError):
        return  # rank 0 has ended
    except ExchangeFailed as error:
        logger.warning("%s", error)
        # Another rank is the cause. Rank 0 names the first one that ends, and then ends this one.
        time.sleep(END_SECONDS)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
