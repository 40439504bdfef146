"""The Batch API: files of calls, worked through behind everybody else. `run.py` is the life of one batch."""

from __future__ import annotations

from dataclasses import replace

from gateway.auth.authenticator import Authenticator
from gateway.batches.api import BatchApi
from gateway.batches.records import OVER, Status
from gateway.batches.store import open_store
from gateway.batches.worker import BatchWorker
from gateway.batches.workshop import Workshop
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.serve import Components
from gateway.settings import Settings


class Batches:
    """The Batch API's parts, put together. Lines run with the gateway's own `components`, except for the authenticator
    and the canonicaliser given besides: see `inside`.
    """

    def __init__(
        self, settings: Settings, components: Components, *, authenticator: Authenticator, canonicaliser: Canonicaliser
    ) -> None:
        self._store = open_store(settings.storage, settings.data_dir)
        inside = replace(components, authenticator=authenticator, canonicaliser=canonicaliser)
        self._worker = BatchWorker(Workshop(inside, self._store, settings.ledger_dir, settings.replica))
        api = BatchApi(
            components.authenticator,
            components.policies,
            self._store,
            self._worker,
            max_file_bytes=settings.max_file_bytes,
            max_line_bytes=components.max_body_bytes,
        )
        self.routes = api.routes()

    def counts(self) -> dict[str, int]:
        """Batches in the store that are not over, by status."""
        return {status.value: self._worker.open_batches[status] for status in Status if status not in OVER}

    def ended(self) -> dict[str, int]:
        """Batches that were ended here, by status."""
        return {status.value: self._worker.ended[status] for status in Status if status in OVER}

    def lines(self) -> dict[str, int]:
        """Of the batches that are worked on here."""
        waiting, running = self._worker.lines
        return {"waiting": waiting, "running": running}

    async def open(self) -> None:
        await self._store.open()
        await self._worker.take_over()
        self._worker.start()

    def drain(self) -> None:
        """Lines in flight may end, and no others begin."""
        self._worker.drain()

    async def close(self) -> None:
        await self._worker.close()
        await self._store.close()
