"""The adapters of one engine, by name: loads them from files, and bounds how many there are.

An adapter is complete once `read` has returned it. Requests refer to it directly, so the engine keeps no list of
adapters, and an unloaded one stays in memory until its last request has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from weakref import WeakSet

from backend.engine.adapter import Adapter
from backend.engine.errors import AdapterError
from backend.engine.resolved_config import ResolvedConfig
from backend.layers.lora import LoraAdapter, LoraPart, LoraTarget
from backend.model_files.lora_files import LoraConfig, digest, open_tensors


class AdapterStore:
    """The loaded adapters by name. Not thread-safe, except for `read`."""

    def __init__(self, config: ResolvedConfig, targets: Mapping[str, LoraTarget]) -> None:
        """targets: the modules of the model that adapters may change."""
        self._config = config
        self._targets = targets
        self._adapters: dict[str, LoraAdapter] = {}
        self._in_memory: WeakSet[LoraAdapter] = WeakSet()  # also those that were removed and still have requests
        self._numbers = count(1)

    @property
    def adapters(self) -> list[LoraAdapter]:
        """All adapters, in the order in which they were added."""
        return list(self._adapters.values())

    def get(self, name: str) -> LoraAdapter | None:
        return self._adapters.get(name)

    def read(self, name: str, folder: Path) -> LoraAdapter:
        """Reads an adapter from a directory in PEFT's format, without adding it. Raises `AdapterError`."""
        config = LoraConfig.read(folder)
        total = digest(folder)
        parts: defaultdict[str, list[LoraPart]] = defaultdict(list)
        with open_tensors(folder) as tensors:
            for module in tensors.modules:
                if (target := self._targets.get(module)) is None:
                    raise AdapterError(
                        f"{folder}: the adapter changes {module}, which is not one of this model's linear layers in "
                        "attention, in an MLP without experts or in shared experts"
                    )
                rank = config.rank_of(module)
                if rank > self._config.max_lora_rank:
                    raise AdapterError(
                        f"{folder}: rank {rank} of {module} exceeds max_lora_rank, which is "
                        f"{self._config.max_lora_rank}"
                    )
                a = tensors.take(module, "A", rank, target.ins)
                b = tensors.take(module, "B", target.outs, rank)
                if target.order is not None:
                    b = b[target.order]
                a, b = (  # copies: the file may be mapped, and may change
                    matrix.to(self._config.device, self._config.dtype, copy=True).contiguous()
                    for matrix in (a, b.float() * config.scale_of(module))
                )
                parts[target.layer].append(LoraPart(a, b, target.first))
        return LoraAdapter(name, next(self._numbers), total, dict(parts))

    def check_new(self, name: str) -> None:
        """Raises `AdapterError` if the name is taken, or if there are as many adapters as allowed."""
        if name in self._adapters:
            raise AdapterError(f"an adapter named {name!r} is already loaded", param="lora_name")
        if len(self._in_memory) >= self._config.max_loras:
            held = len(self._in_memory) - len(self._adapters)
            unloaded = f", {held} of them unloaded but still used by requests" if held else ""
            raise AdapterError(
                f"{len(self._in_memory)} adapters are in memory{unloaded}, and max_loras is {self._config.max_loras}",
                param="max_loras",
            )

    def add(self, adapter: LoraAdapter) -> None:
        """Adds an adapter that `read` has returned. Raises what `check_new` raises."""
        self.check_new(adapter.name)
        self._adapters[adapter.name] = adapter
        self._in_memory.add(adapter)

    def remove(self, name: str) -> Adapter | None:
        """Removes an adapter; its requests continue. None if there is none of this name."""
        return self._adapters.pop(name, None)
