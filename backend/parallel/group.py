"""The ranks' exchange of tensors: NCCL on GPUs, gloo on CPUs. One group for the ranks of one engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# How long one exchange may take. The ranks compute the same steps at the same time, so it only has to cover how much
# later the slowest one begins: on a busy machine, or because it has to compile kernels.
COLLECTIVE_SECONDS = 120.0
LOOPBACK = "127.0.0.1"  # all ranks are on this machine, so gloo listens nowhere else
GLOO_THREADS = 1

dist: Any = torch.distributed  # its stubs lack the methods of groups


class ExchangeFailed(Exception):
    """Another rank has ended, or has not taken part in an exchange for COLLECTIVE_SECONDS."""


class RankGroup:
    """One rank's access to the group. All ranks must call the same methods in the same order, with the same shapes.

    Calls raise `ExchangeFailed`. On a GPU, they are queued like kernels, and can be captured in a CUDA graph.
    """

    def __init__(self, rank: int, size: int, store: Path, device: torch.device) -> None:
        """Waits until all ranks have called it. `store`: a file that they share, which must not exist before."""
        self.rank, self.size = rank, size
        with _failures():
            self._group = _create(dist.FileStore(str(store), size), rank, size, device)

    def add_up(self, tensor: Tensor) -> Tensor:
        """Replaces a tensor by the sum of all ranks' tensors, which is the same on all ranks bit for bit."""
        tensor = tensor.contiguous()
        with _failures():
            self._group.allreduce([tensor]).wait()
        return tensor

    def collect(self, rows: Tensor) -> Tensor:
        """Places the columns of all ranks next to each other: [n, c] of each rank -> [n, size * c]."""
        collected = rows.new_empty((self.size * len(rows), rows.shape[1]))
        with _failures():
            self._group._allgather_base(collected, rows.contiguous()).wait()
        return collected.view(self.size, *rows.shape).transpose(0, 1).flatten(1)

    def broadcast(self, tensor: Tensor) -> None:
        """Replaces a contiguous tensor by that of rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with _failures():
            self._group.broadcast([tensor], options).wait()

    def abort(self) -> None:
        """Ends all running exchanges of this rank, which then fail. From any thread."""
        self._group.abort()


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ExchangeFailed(f"an exchange between ranks has failed: {error}") from error


def _create(store: Any, rank: int, size: int, device: torch.device) -> Any:
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = timeout
    gloo._threads = GLOO_THREADS
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return dist.ProcessGroupGloo(store, rank, size, gloo)
