"""LoRA adapters under model names: POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM.

A request selects an adapter by its name in `model`. Adapters of the command line are loaded before the server starts.
The two endpoints exist only with `--allow-runtime-lora-updating`, because a client that can reach them makes the server
read any directory.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

from backend.engine.adapter_store import AdapterStore
from backend.engine.errors import AdapterError
from backend.layers.lora import LoraAdapter
from backend.server.asgi import Endpoint, HttpExchange
from backend.server.errors import InvalidRequest, ModelNotFound
from backend.server.request_body import decode_body

MAX_NAME_CHARACTERS = 256
TEXT = "text/plain; charset=utf-8"


class LoadRequest(Struct, frozen=True, kw_only=True):
    """Body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadRequest(Struct, frozen=True, kw_only=True):
    """Body of /v1/unload_lora_adapter. vLLM ignores `lora_int_id`, too."""

    lora_name: str
    lora_int_id: int | None = None


class ServedAdapters:
    """The adapters that the server offers beside its model. Used on the event loop only."""

    def __init__(self, store: AdapterStore, model_name: str) -> None:
        self.store = store
        self._model_name = model_name
        self._paths: dict[str, str] = {}
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="adapters")  # one at a time, which bounds the memory

    def path_of(self, adapter: LoraAdapter) -> str:
        """The path from which an adapter was loaded, as it was given."""
        return self._paths[adapter.name]

    def load(self, name: str, folder: Path, path: str) -> None:
        """Loads an adapter and adds it. Raises `AdapterError`. `path` is what /v1/models shows."""
        self._check(name)
        self._add(self.store.read(name, folder), path)

    async def load_in_thread(self, name: str, path: str) -> None:
        """Does what `load` does for a directory, in a thread, while other requests continue."""
        self._check(name)
        read = asyncio.get_running_loop().run_in_executor(
            self._loader, lambda: self.store.read(name, Path(path).expanduser())
        )
        self._add(await read, path)

    def unload(self, name: str) -> bool:
        """Removes an adapter. Its requests continue. Returns False if there is none of this name."""
        self._paths.pop(name, None)
        return self.store.remove(name) is not None

    def close(self) -> None:
        """Stops the thread that reads adapters, without waiting for it."""
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _check(self, name: str) -> None:
        if not name.isprintable() or not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise AdapterError(
                f"lora_name must have 1 to {MAX_NAME_CHARACTERS} printable characters, not {name!r}", param="lora_name"
            )
        if name == self._model_name:
            raise AdapterError(f"{name!r} is the name of the model itself", param="lora_name")
        self.store.check_new(name)

    def _add(self, adapter: LoraAdapter, path: str) -> None:
        self.store.add(adapter)
        self._paths[adapter.name] = path


class LoadAdapterEndpoint(Endpoint):
    """Loads an adapter from a directory on the server's machine."""

    def __init__(self, adapters: ServedAdapters, closing: asyncio.Future[None]) -> None:
        self._adapters = adapters
        self.closing = closing

    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        request = decode_body(body, LoadRequest)
        if request.load_inplace:
            raise InvalidRequest("`load_inplace` is not supported; unload the adapter first.", param="load_inplace")
        try:
            await self._adapters.load_in_thread(request.lora_name, request.lora_path)
        except AdapterError as error:
            raise InvalidRequest(f"{error.message}.", param=error.param or "lora_path") from error
        message = f"Success: LoRA adapter '{request.lora_name}' added successfully."
        await exchange.respond(message.encode(), content_type=TEXT)


class UnloadAdapterEndpoint(Endpoint):
    """Removes an adapter."""

    def __init__(self, adapters: ServedAdapters, closing: asyncio.Future[None]) -> None:
        self._adapters = adapters
        self.closing = closing

    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        request = decode_body(body, UnloadRequest)
        if not self._adapters.unload(request.lora_name):
            raise ModelNotFound(f"The lora adapter `{request.lora_name}` cannot be found.", param="lora_name")
        message = f"Success: LoRA adapter '{request.lora_name}' removed successfully."
        await exchange.respond(message.encode(), content_type=TEXT)
