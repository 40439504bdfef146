"""Storage of the Batch API: SQLite or Redis, selected by the gateway's storage URL. `base` defines the interface."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from gateway.batches.stores.base import BatchStore
from gateway.storage import REDIS_SCHEMES

STORES = {
    "redis": "gateway.batches.stores.redis:RedisBatchStore",
    "sqlite": "gateway.batches.stores.sqlite:SqliteBatchStore",
}


def open_store(storage: str, data_dir: Path) -> BatchStore:
    """Return the store for the storage URL: Redis if the URL names one, else a SQLite file in `data_dir`.

    The caller must await `open()` before the first use.
    """
    is_redis = storage.partition("://")[0] in REDIS_SCHEMES
    # The engines are imported on first use, so a gateway without Redis does not load the Redis client.
    module, _, name = STORES["redis" if is_redis else "sqlite"].partition(":")
    store: BatchStore = getattr(import_module(module), name)(storage if is_redis else data_dir / "batches.db")
    return store
