"""Rank 0's model: a `PagedModel` of which the followers compute their parts, too.

Every method that computes with divided weights first announces that to the followers. What is computed on rank 0 alone,
such as sampling, needs no message.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from backend.engine.batch import Batch
from backend.engine.graphs import GraphCapture
from backend.engine.paged_model import PagedModel
from backend.engine.resolved_config import ResolvedConfig
from backend.native.recording import StopCheck, raise_if_interrupted
from backend.parallel.captures import Announcer, RankCapture
from backend.parallel.config import config_of_rank, create_division
from backend.parallel.processes import Followers
from backend.parallel.wire import Forward, Logits, tensors_of


class LeaderModel(PagedModel):
    """Rank 0's part, and the followers. Methods raise `RankFailed` if a follower has ended."""

    def __init__(self, config: ResolvedConfig) -> None:
        """Starts the followers and loads all parts. Raises `RankFailed` too."""
        self._followers = Followers(config)
        try:
            group = self._followers.group
            assert group is not None
            self._group = group
            super().__init__(config_of_rank(config, 0), division=create_division(config, 0, group))
            self._followers.wait_until_loaded()
        except BaseException:
            self._followers.close()
            raise
        self._announcer = Announcer(self._followers)
        self._device = config.device
        self._hidden: Tensor | None = None  # the last result of `forward`, which the followers have, too

    def watch(self, fail: Callable[[str], None]) -> None:
        self._followers.watch(fail)

    def check(self) -> None:
        self._followers.check()

    def close(self) -> None:
        self._followers.close()

    def capture_of_ranks(self, capture: GraphCapture) -> GraphCapture:
        return RankCapture(capture, self._announcer, self._followers)

    def forward(self, batch: Batch, is_interrupted: StopCheck | None = None) -> Tensor:
        """As `PagedModel.forward`, but a step is not interrupted once it has begun: all ranks would have to agree."""
        raise_if_interrupted(is_interrupted)
        forward = Forward.of(batch)
        with self._followers.computing():
            whole, views = forward.buffer(self._device)
            for view, tensor in zip(views, tensors_of(batch), strict=True):
                view.copy_(tensor)
            self._announcer.send(forward)
            self._group.broadcast(whole)
            self._hidden = super().forward(batch)
        return self._hidden

    def next_tokens(self, batch: Batch, is_interrupted: StopCheck | None = None) -> Tensor:
        return self.greedy_tokens(self.forward(batch, is_interrupted))

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        with self._followers.computing():
            self._announce_logits(hidden)
            return super().greedy_tokens(hidden)

    def scores(self, hidden: Tensor) -> Tensor:
        with self._followers.computing():
            self._announce_logits(hidden)
            return super().scores(hidden)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        with self._followers.computing():
            self._announce_logits(hidden)
            return super().logits(hidden, out)

    def _announce_logits(self, hidden: Tensor) -> None:
        if hidden is self._hidden:
            self._announcer.send(Logits(None))
            return
        self._announcer.send(Logits(len(hidden)))
        self._group.broadcast(hidden.contiguous())
