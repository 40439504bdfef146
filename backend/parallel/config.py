"""A rank's configuration, and how its model is divided."""

from __future__ import annotations

from dataclasses import replace

from backend.engine.resolved_config import ResolvedConfig
from backend.parallel.division import RankDivision
from backend.parallel.group import RankGroup
from backend.parallel.limits import device_of_rank
from backend.parallel.shards import Shards, config_of_part


def config_of_rank(config: ResolvedConfig, rank: int) -> ResolvedConfig:
    """The configuration of one rank's `PagedModel`.

    Its decode steps are not recorded on a CPU, because an exchange between ranks cannot be replayed.
    """
    return replace(
        config,
        model=config_of_part(config.model, config.tensor_parallel_size),
        device=device_of_rank(config.device, rank),
        enforce_eager=True,
    )


def create_division(config: ResolvedConfig, rank: int, group: RankGroup) -> RankDivision:
    """How the model of `config` is divided."""
    return RankDivision(Shards(config.model, rank, config.tensor_parallel_size), group)
