"""Fits what it takes to load a prompt's blocks from another engine: `python -m benchmarks.simulator.loads [--write]`.

Two bundled engines serve the demo model with a longer context. One computes a prompt, and the other one loads its
blocks; then the second one finds them in its own cache. The difference of the two requests' processor time, of both
engines and the client, is what the load takes:

    load + load_token * tokens

These are the two constants of `EngineSpeed` of this name. They are fitted by least squares to the medians of several
lengths. With `--write`, they are added to the newest result of `calibrate.py`, which must be of the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np

from benchmarks.simulator.calibrate import NUM_BLOCKS, REQUEST_SECONDS_MAX, RESULTS
from benchmarks.simulator.processor_time import Stopwatch, descendants
from benchmarks.warm_paths.stack import MODEL, TRANSFERS, engine, long_demo_model

WORDS = (100, 300, 700, 1400, 2400)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="add the constants to the newest calibration")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        model = long_demo_model(folder)
        holder, loader = (stack.enter_context(engine(folder / one, model, NUM_BLOCKS, *TRANSFERS)) for one in "ab")
        client = stack.enter_context(httpx2.Client(timeout=REQUEST_SECONDS_MAX))
        points = [_measure(client, holder["base_url"], loader["base_url"], words, args.rounds) for words in WORDS]
    for tokens, seconds in points:
        print(f"{tokens:6} tokens  {1000 * seconds:.1f} ms")
    load_token, load = np.polyfit([tokens for tokens, _ in points], [seconds for _, seconds in points], 1)
    constants = {"load": max(0.0, float(load)), "load_token": max(0.0, float(load_token))}
    print(json.dumps(constants))
    if args.write:
        file = max(RESULTS.glob("calibration-*.json"))
        result = json.loads(file.read_text())
        result["timing"] |= constants
        file.write_text(json.dumps(result, indent=1) + "\n")


def _measure(client: httpx2.Client, holder: str, loader: str, words: int, rounds: int) -> tuple[int, float]:
    """The tokens that are loaded of a prompt, and the processor time that this takes, as medians."""
    tokens, seconds = list[int](), list[float]()
    for number in range(rounds):
        rng = random.Random(1000 * words + number)
        text = " ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(words))
        _ask(client, holder, text)
        found, loaded_seconds = _ask(client, loader, text, source=holder)
        _, cached_seconds = _ask(client, loader, text, source=holder)
        tokens.append(found)
        seconds.append(loaded_seconds - cached_seconds)
    return round(statistics.median(tokens)), statistics.median(seconds)


def _ask(client: httpx2.Client, url: str, text: str, source: str | None = None) -> tuple[int, float]:
    """The cached tokens of a prompt, and the processor time of the request."""
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    if source is not None:
        address = urlsplit(source)
        params = {"do_remote_prefill": True, "remote_host": address.hostname, "remote_port": address.port}
        body["kv_transfer_params"] = params
    stopwatch = Stopwatch(descendants())
    reply = client.post(f"{url}/chat/completions", json=body).raise_for_status().json()
    cached: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, sum(stopwatch.seconds().values())


if __name__ == "__main__":
    main()
