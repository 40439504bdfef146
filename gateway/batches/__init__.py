"""The Batch API: runs files of requests with lower priority than interactive traffic. Begin at `run.py`.

`run.py` runs one batch. `api.py` serves /v1/files and /v1/batches. `uploads.py` and `lines.py` check an uploaded file.
`worker.py` claims and runs batches, `line_call.py` runs one line as a call without a socket, and `result_writer.py`
writes results and receipts. `stores/` has the storage interface and its engines. This package may import everything
below `gateway.server`.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.auth.authenticator import Authenticator
from gateway.batches.api import BatchApi
from gateway.batches.operator_api import OperatorBatchApi
from gateway.batches.records import ENDED, BatchStatus
from gateway.batches.runtime import BatchRuntime
from gateway.batches.stores import open_store
from gateway.batches.worker import BatchWorker
from gateway.core.supervision import Supervisor
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.serve import Components
from gateway.settings import Settings


class BatchService:
    """The Batch API of one gateway: its store, worker and routes.

    Lines run with the gateway's own `components`, except for `authenticator` and `canonicaliser`: see `line_call`.
    """

    def __init__(
        self,
        settings: Settings,
        components: Components,
        *,
        authenticator: Authenticator,
        canonicaliser: Canonicaliser,
        supervisor: Supervisor,
    ) -> None:
        self._store = open_store(settings.storage, settings.data_dir)
        line_components = replace(components, authenticator=authenticator, canonicaliser=canonicaliser)
        runtime = BatchRuntime(line_components, self._store, settings.ledger_dir, settings.replica)
        self._worker = BatchWorker(runtime, supervisor)
        api = BatchApi(
            components.authenticator,
            components.policies,
            self._store,
            self._worker,
            max_file_bytes=settings.max_file_bytes,
            max_line_bytes=components.max_body_bytes,
        )
        self.routes = api.routes()
        self.operator_routes = OperatorBatchApi(self._store, self._worker).routes()

    def counts(self) -> dict[str, int]:
        """Return the number of open batches of all gateways in the store, by status."""
        return {status.value: self._worker.open_batches[status] for status in BatchStatus if status not in ENDED}

    def ended(self) -> dict[str, int]:
        """Return the number of batches that this gateway has ended since its start, by status."""
        return {status.value: self._worker.ended[status] for status in BatchStatus if status in ENDED}

    def lines(self) -> dict[str, int]:
        """Return the numbers of waiting and in-flight lines in the batches that this gateway runs."""
        waiting, running = self._worker.lines
        return {"waiting": waiting, "running": running}

    async def open(self) -> None:
        """Open the store, write the missing receipts of a killed predecessor, and start the worker."""
        await self._store.open()
        await self._worker.recover()
        self._worker.start()

    def drain(self) -> None:
        """Let the lines in flight finish, and start no other lines."""
        self._worker.drain()

    async def close(self) -> None:
        """Cancel the lines in flight, and close the store."""
        await self._worker.close()
        await self._store.close()
