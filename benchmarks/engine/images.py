"""What images cost another stream of the engine, and how long the first token after an image takes, on a CPU.

    python -m benchmarks.engine.images [--rounds 5] [--sides 448 1120] [--num-threads N] [--result FILE]

One request generates tokens all the time. The figures are the gaps between its tokens: alone, while images are encoded
by the encoder's thread (as the engine does), and while they are encoded on the engine's thread before a step, for
comparison. The images follow each other without a pause, each in a request of its own. The model has random weights in
bfloat16: 50 M parameters and an image encoder of 40 M. Each round measures all modes in random order; percentiles are
over the gaps of all rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.prompt_images import PromptImages
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams

IMAGE_TOKEN, VOCAB_SIZE = 4_095, 4_096
IMAGES = 4  # of a mode, in a round
ALONE_TOKENS = 200
STREAM_TOKENS = 16_000  # more than a mode takes
MODEL: dict[str, Any] = {
    "text_config": {
        "vocab_size": VOCAB_SIZE, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 7,
        "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6},
    },
    "vision_config": {
        "depth": 8, "hidden_size": 640, "num_heads": 8, "intermediate_size": 1712, "out_hidden_size": 768,
        "fullatt_block_indexes": [3, 7],
    },
    "image_token_id": IMAGE_TOKEN, "tie_word_embeddings": True,
}  # fmt: skip


class Bench:
    """One engine with a stream that never ends."""

    def __init__(self, engine: Engine) -> None:
        assert engine.images
        self.engine, self.encoder = engine, engine.images
        self._ids = itertools.count()
        self._stream = self._request([5, 6, 7], STREAM_TOKENS)
        self.restart()

    def restart(self) -> None:
        """Ends the stream and starts another one, so that its context does not grow from mode to mode."""
        self.engine.abort(self._stream.request_id)
        self._stream = self._request([5, 6, 7], STREAM_TOKENS)
        self.engine.add(self._stream)
        for _ in range(20):
            self.engine.step()

    def _request(self, token_ids: list[int], num_tokens: int, images: PromptImages | None = None) -> Request:
        return Request(
            f"r{next(self._ids)}", token_ids, SamplingParams(max_tokens=num_tokens, temperature=0.0), images=images
        )

    def alone(self) -> list[float]:
        return [gap for gap, _ in itertools.islice(self._gaps(), ALONE_TOKENS)]

    def beside(self, side: int, *, uses_thread: bool) -> tuple[list[float], list[float]]:
        """The gaps of the stream, and the times to first token of the images' requests, in seconds."""
        self.encoder.uses_thread = uses_thread
        gaps, first_tokens = [], []
        for _ in range(IMAGES):
            pixels = np.random.default_rng().integers(0, 256, (side, side, 3), dtype=np.uint8)
            image = self.encoder.image(pixels, os.urandom(32))
            count = image.rows * image.columns
            request = self._request([8, *[IMAGE_TOKEN] * count, 9], 1, PromptImages([(image, 1)]))
            began = time.perf_counter()
            self.engine.add(request)
            for gap, ended in self._gaps():
                gaps.append(gap)
                if request.request_id in ended:
                    break
            first_tokens.append(time.perf_counter() - began)
        return gaps, first_tokens

    def _gaps(self) -> Iterator[tuple[float, set[str]]]:
        """The time between two tokens of the stream, and which requests have ended meanwhile."""
        last, ended = time.perf_counter(), set()
        while True:
            outputs = self.engine.step()
            ended |= {each.request_id for each in outputs if each.finish_reason}
            if any(each.request_id == self._stream.request_id for each in outputs):
                now = time.perf_counter()
                yield now - last, ended
                last, ended = now, set()


def measure(bench: Bench, side: int, rounds: int) -> dict[str, float]:
    gaps: dict[str, list[float]] = {"alone": [], "thread": [], "engine's thread": []}
    first: dict[str, list[float]] = {"thread": [], "engine's thread": []}
    for _ in range(rounds):
        for mode in random.sample([*gaps], len(gaps)):
            bench.restart()
            if mode == "alone":
                gaps[mode] += bench.alone()
                continue
            found, times = bench.beside(side, uses_thread=mode == "thread")
            gaps[mode] += found
            first[mode] += times
    figures: dict[str, float] = {"tokens of an image": (side // 28) ** 2}
    for mode, found in gaps.items():
        ordered = sorted(found)
        for name, place in (("p50", len(ordered) // 2), ("p99", len(ordered) * 99 // 100), ("max", len(ordered) - 1)):
            figures[f"gap {mode} {name}, ms"] = 1e3 * ordered[min(place, len(ordered) - 1)]
    for mode, times in first.items():
        figures[f"first token after an image, {mode}, p50, ms"] = 1e3 * sorted(times)[len(times) // 2]
    return {name: round(value, 2) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", type=int, nargs="+", default=[448, 1120], help="of square images, in pixels")
    parser.add_argument("--num-threads", type=int, help="threads per step (default: the engine's choice)")
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model("qwen2_5_vl", **MODEL))
        model.to(torch.bfloat16).save_pretrained(directory)
        engine = Engine.load(EngineConfig(model_dir=directory, num_threads=args.num_threads, num_blocks=4_096))
        bench = Bench(engine)
        figures = {str(side): measure(bench, side, args.rounds) for side in args.sides}
        engine.close()
    for side, each in figures.items():
        print(f"images of {side} x {side} pixels, {engine.config.num_threads} threads")
        for name, value in each.items():
            print(f"  {name:45} {value:>10.2f}")
    if args.result:
        result = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "load": os.getloadavg()[0], "images": figures}
        args.result.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
