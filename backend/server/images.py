"""Loads the images of a chat: takes them out of `data:` URLs or downloads them, and decodes them for the engine.

Threads of their own do this, so that neither streams nor prompts of other requests wait for it. Tenants take turns
(`tenant_queue.py`). Every error of an image is a 400 that names the part of the message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256

from backend.engine.image_encoder import EncoderImage, ImageEncoder
from backend.images.decoding import ImageError, data_of_url, decode
from backend.images.fetching import ImageFetcher
from backend.models.qwen_vision import image_size
from backend.server.errors import ImagesBusy, InvalidRequest
from backend.server.messages import ImagePart, Message, image_parts
from backend.server.tenant_queue import QueueBounds, TenantQueue

DECODING = QueueBounds(running=2, running_per_tenant=2, waiting=512, waiting_per_tenant=256)
FETCHING = QueueBounds(running=8, running_per_tenant=4, waiting=512, waiting_per_tenant=256)
FETCH_SECONDS = 5.0  # for the download of an image


class ImageLoader:
    """Loads images for one model. Belongs to the event loop."""

    def __init__(self, encoder: ImageEncoder, max_images: int, fetcher: ImageFetcher | None = None) -> None:
        """`max_images`: of a request. Without a fetcher, images must be in `data:` URLs."""
        self.config = encoder.config
        self._encoder = encoder
        self._max_images = max_images
        self._fetcher = fetcher
        decoding, fetching = _with_room(DECODING, max_images), _with_room(FETCHING, max_images)
        self._decoding = TenantQueue(decoding, "decode image", "images wait to be decoded", ImagesBusy)
        self._fetching = TenantQueue(fetching, "fetch image", "images wait to be downloaded", ImagesBusy)

    def close(self) -> None:
        self._decoding.close()
        self._fetching.close()

    async def load(self, messages: Sequence[Message], cache_salt: str) -> list[EncoderImage]:
        """Returns the images of a chat in their order. Raises InvalidRequest or ImagesBusy."""
        parts = list(image_parts(messages))
        if not parts:
            return []
        if len(parts) > self._max_images:
            raise InvalidRequest(
                f"A request can have at most {self._max_images} images, not {len(parts)}.",
                param=parts[self._max_images][0],
            )
        tasks = [asyncio.ensure_future(self._load(path, part, cache_salt)) for path, part in parts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _load(self, path: str, part: ImagePart, cache_salt: str) -> EncoderImage:
        try:
            if part.url[:5].lower() == "data:":
                return await self._decoding.run(cache_salt, lambda: self._image(data_of_url(part.url), cache_salt))
            async with self._fetching.turn(cache_salt):  # until it is decoded, so that few downloads are in memory
                data = await self._fetch(part.url)
                return await self._decoding.run(cache_salt, lambda: self._image(data, cache_salt))
        except ImageError as error:
            raise InvalidRequest(f"`{path}` {error}.", param=path) from None

    async def _fetch(self, url: str) -> bytes:
        if self._fetcher is None:
            raise ImageError(
                "must be a `data:` URL with base64: this server downloads no images, because its option "
                "--allowed-media-domains names no hosts"
            )
        try:
            async with asyncio.timeout(self._fetcher.max_seconds):
                return await self._fetching.in_thread(partial(self._fetcher.fetch, url))
        except TimeoutError:
            raise ImageError(f"cannot be downloaded within {self._fetcher.max_seconds:g} s") from None

    def _image(self, data: bytes, cache_salt: str) -> EncoderImage:
        pixels = decode(data, lambda width, height: image_size(width, height, self.config))
        return self._encoder.image(pixels, sha256(data).digest(), cache_salt)


def _with_room(bounds: QueueBounds, images: int) -> QueueBounds:
    """All images of a request wait together, so a tenant may have at least so many there."""
    own = max(bounds.waiting_per_tenant, images)
    return replace(bounds, waiting=max(bounds.waiting, 2 * own), waiting_per_tenant=own)


def create_loader(encoder: ImageEncoder, max_images: int, allowed_hosts: Sequence[str]) -> ImageLoader:
    """Creates the loader for a model. Without `allowed_hosts`, no image is downloaded."""
    return ImageLoader(encoder, max_images, ImageFetcher(allowed_hosts, FETCH_SECONDS) if allowed_hosts else None)
