"""Encodes images beside the engine's steps, and keeps embeddings that may be needed again.

On a CPU, a thread of low priority encodes one image after the other, so that the steps of other requests continue: an
image of a thousand tokens can take as long as hundreds of decode steps. torch computes without Python's lock. On a GPU,
where an image takes milliseconds, the engine's thread launches at most one before each step.

An error while an image is encoded belongs to this image: the engine ends the requests that have it (waiting.py), and
continues. With several ranks, only rank 0 encodes images, so the others need not know.
"""

from __future__ import annotations

import heapq
import logging
import os
import sys
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.engine.image_options import IMAGE_CACHE_BYTES, encoder_dtype
from backend.engine.resolved_config import ResolvedConfig
from backend.models.qwen_vision import QwenVisionEncoder
from backend.models.weights import Checkpoint

# Added to the thread's niceness on Linux. Beside steps that use all cores, it gets about a quarter of them: with 10, an
# image would take ten times as long as on idle cores, and without, steps twice as long.
NICE = 5
CacheKey = tuple[str, bytes]  # the salt of the request, and the digest of the image

logger = logging.getLogger(__name__)


class _Closed(Exception):
    """The engine ends."""


class EncoderImage:
    """An image of a request: its pixels, and its embeddings while they are needed. See `prompt_images.Image`."""

    def __init__(self, encoder: ImageEncoder, pixels: NDArray[np.uint8], digest: bytes, cache_salt: str) -> None:
        self.digest = digest
        self.cache_key = cache_salt, digest
        self.pixels = pixels  # [H, W, 3]
        self.rows, self.columns = (side // encoder.config.token_side for side in pixels.shape[:2])
        self.token_id = encoder.config.image_token_id  # stands for a token of an image in prompts
        self.kept: Tensor | None = None  # the embeddings; written under the encoder's lock
        self.is_queued = False
        self.has_failed = False  # written under the encoder's lock, as `is_queued`
        self._encoder = encoder

    @property
    def embeddings(self) -> Tensor:
        """[rows * columns, hidden_size]. Only while `is_ready`."""
        assert self.kept is not None, "the image has not been encoded"
        return self.kept

    def is_ready(self, priority: int, seconds: float = 0.0) -> bool:
        """Raises the error that ended the encoder's thread, if there was one."""
        return self.kept is not None or self._encoder.prepare(self, priority, seconds)

    def release(self) -> None:
        self.kept = None


class ImageEncoder:
    """Makes embeddings of images. Methods are for the engine's thread, except `image`."""

    def __init__(self, config: ResolvedConfig) -> None:
        """Loads the weights. Raises `WeightsError` if the checkpoint does not fit the model."""
        assert config.model.vision is not None
        self.config = config.model.vision
        self.num_encoded = 0
        self.uses_thread = config.device.type == "cpu"  # otherwise `encode_next` encodes
        self._num_threads, self._dtype = config.num_threads, config.dtype
        dtype = encoder_dtype(config.device, config.dtype)
        with Checkpoint(config.model_dir, dtype, config.device, of_image_encoder=True) as checkpoint:
            self._encode = QwenVisionEncoder(self.config, checkpoint)
            checkpoint.finish()
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int, weakref.ref[EncoderImage]]] = []  # a heap, by priority and arrival
        self._arrivals = count()
        self._cache: OrderedDict[CacheKey, Tensor] = OrderedDict()
        self._cached_bytes = 0
        self._has_failures = False
        self._error: BaseException | None = None  # of the thread, outside of any image
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def image(self, pixels: NDArray[np.uint8], digest: bytes, cache_salt: str = "") -> EncoderImage:
        """An image of a request. pixels: [H, W, 3] uint8, as `qwen_vision.image_size` scales it. From any thread.

        Requests with another `cache_salt` do not find its embeddings: the time would tell them that it was sent before.
        """
        return EncoderImage(self, pixels, digest, cache_salt)

    def prepare(self, image: EncoderImage, priority: int, seconds: float) -> bool:
        """Has an image encoded, unless its embeddings are in the cache. Returns whether it has embeddings now."""
        with self._changed:
            if self._error is not None:
                raise RuntimeError("the image encoder has failed") from self._error
            if image.has_failed:
                self._has_failures = True  # of a request that was added since
                return False
            if (cached := self._cached(image.cache_key)) is not None:
                image.kept = cached
            elif not image.is_queued:
                image.is_queued = True
                heapq.heappush(self._queue, (priority, next(self._arrivals), weakref.ref(image)))
                self._start()
            if image.kept is None and seconds:
                self._changed.wait_for(lambda: image.kept is not None or image.has_failed or self._error, seconds)
            return image.kept is not None

    def take_failures(self) -> bool:
        """Whether images have failed since the last call, so that there may be requests to end."""
        if not self._has_failures:
            return False
        with self._changed:
            self._has_failures = False
        return True

    def encode_next(self) -> None:
        """Encodes one queued image, unless the thread does."""
        if not self.uses_thread and self._queue:
            self._encode_one()

    def close(self) -> None:
        """Ends the thread, and waits for it for at most one layer of an image."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join()

    def _start(self) -> None:
        if self.uses_thread:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="image encoder", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        if sys.platform == "linux":
            with suppress(OSError):
                thread = threading.get_native_id()  # this thread, and those that it starts
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)
        torch.set_num_threads(self._num_threads)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._queue)
                if self._is_closed:
                    return
            try:
                self._encode_one()
            except _Closed:
                return
            except Exception as error:  # noqa: BLE001  raised by `prepare`, on the engine's thread
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return

    def _encode_one(self) -> None:
        with self._changed:
            image = heapq.heappop(self._queue)[2]()
            if image is None:
                return  # its request has ended
            embeddings = self._cached(image.cache_key)
        if embeddings is None:
            try:
                embeddings = self._encode(torch.tensor(image.pixels), self._raise_if_closed).to(self._dtype)
            except _Closed:
                raise
            except Exception:  # noqa: BLE001  which ends the requests with this image
                self._fail(image)
                return
            self.num_encoded += 1
        with self._changed:
            image.kept, image.is_queued = embeddings, False
            self._keep(image.cache_key, embeddings)
            self._changed.notify_all()

    def _fail(self, image: EncoderImage) -> None:
        """Notes an error of an image, which is being handled."""
        height, width = image.pixels.shape[:2]
        logger.exception("Cannot encode an image (%d x %d pixels, SHA-256 %s)", width, height, image.digest.hex())
        with self._changed:
            image.has_failed, image.is_queued, self._has_failures = True, False, True
            self._changed.notify_all()

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise _Closed

    def _cached(self, key: CacheKey) -> Tensor | None:
        if (embeddings := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
        return embeddings

    def _keep(self, key: CacheKey, embeddings: Tensor) -> None:
        if key in self._cache or embeddings.nbytes > IMAGE_CACHE_BYTES:
            return
        self._cache[key] = embeddings
        self._cached_bytes += embeddings.nbytes
        while self._cached_bytes > IMAGE_CACHE_BYTES:
            self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
