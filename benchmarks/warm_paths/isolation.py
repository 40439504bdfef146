"""What a tenant can infer about another one's prompts from response times and headers. Runs real processes.

A gateway that caches answers and prefixes stands in front of two engines. In every round, tenant ada sends a new
prompt. Then bob sends the same prompt (*probe*) and a new one of the same length (*control*), in random order. Then ada
sends a follow-up to hers (*own*), which shows the signal that a tenant's own cache hits produce.

The figure for each kind is the AUC of its times to first chunk against those of the control: the probability that a
request of this kind is faster than a control request. At 0.5 the times carry no information, at 1.0 they separate the
kinds completely. The bounds contain 99 % of the values that chance produces if the times carry no information. All
headers must be equal for probe and control, except those that differ in every reply.

    python -m benchmarks.warm_paths.isolation --rounds 60
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.warm_paths.run import RESULTS, machine
from benchmarks.warm_paths.stack import DEMO_WEIGHTS, MODEL, engine, gateway, key_of

WORDS = 250
NUM_BLOCKS = 6_000
Z_99 = 2.576
UNIQUE_HEADERS = {"date", "x-request-id", "x-trace-id", "x-warmpath-overhead-ms", "content-length", "traceparent"}
RATE_HEADERS = ("x-ratelimit-",)  # depend on the time and on the tenant's own calls
KINDS = ("probe", "control", "own")


def prompt(rng: random.Random) -> str:
    return " ".join("".join(rng.choices("etaoinshrdlu", k=6)) for _ in range(WORDS))


class Client:
    """A blocking client that times the first chunk of each stream."""

    def __init__(self, url: str) -> None:
        self._http = httpx2.Client(base_url=url, timeout=120)

    def send(self, tenant: str, system: str, user: str) -> tuple[float, dict[str, str]]:
        """Send one streaming request. Returns the seconds to the first chunk and the headers to compare."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0, "stream": True}
        headers = {"authorization": f"Bearer {key_of(tenant)}"}
        began = time.perf_counter()
        with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
            if reply.status_code != 200:
                raise SystemExit(f"{reply.status_code}: {reply.read().decode()}")
            chunks = reply.iter_bytes()
            next(chunks)
            seconds = time.perf_counter() - began
            for _ in chunks:
                pass
        compared = {
            name: value
            for name, value in reply.headers.items()
            if name not in UNIQUE_HEADERS and not name.startswith(RATE_HEADERS)
        }
        return seconds, compared


def auc(one: Sequence[float], other: Sequence[float]) -> float:
    """The AUC: the probability that a value of the first is less than one of the second. A tie counts half."""
    wins = sum((a < b) + 0.5 * (a == b) for a in one for b in other)
    return wins / len(one) / len(other)


def chance_margin(rounds: int) -> float:
    """Half the width of the 99 % interval of the AUC around 0.5 for equal distributions (Mann-Whitney U)."""
    return Z_99 * math.sqrt((2 * rounds + 1) / (12 * rounds * rounds))


def measure(client: Client, rounds: int, rng: random.Random) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    # Counts requests that were routed to the deployment that has ada's prompt in its cache.
    same_deployment: dict[str, int] = dict.fromkeys(KINDS, 0)
    headers_of: dict[str, set[tuple[tuple[str, str], ...]]] = {kind: set() for kind in KINDS}
    for _ in range(rounds):
        first, second = prompt(rng), prompt(rng)
        _, headers = client.send("ada", first, "Why?")
        requests = [("probe", "bob", first, "Why?"), ("control", "bob", second, "Why?")]
        rng.shuffle(requests)
        for kind, tenant, system, user in [*requests, ("own", "ada", first, "And then?")]:
            took, compared = client.send(tenant, system, user)
            seconds[kind].append(took)
            same_deployment[kind] += compared.pop("x-warmpath-deployment") == headers["x-warmpath-deployment"]
            headers_of[kind].add(tuple(sorted(compared.items())))
    return {
        "rounds": rounds,
        "ttft_p50_ms": {kind: round(1000 * statistics.median(seconds[kind]), 2) for kind in KINDS},
        "auc_beside_control": {kind: round(auc(seconds[kind], seconds["control"]), 3) for kind in ("probe", "own")},
        "by_chance": [round(0.5 - chance_margin(rounds), 3), round(0.5 + chance_margin(rounds), 3)],
        "where_it_is_warm": {kind: round(same_deployment[kind] / rounds, 3) for kind in KINDS},
        "headers_alike": headers_of["probe"] == headers_of["control"],
        "headers_of_ones_own_alike": headers_of["own"] == headers_of["control"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for the result (default: benchmarks/warm_paths/results)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with (
            engine(folder / "a", DEMO_WEIGHTS, NUM_BLOCKS) as a,
            engine(folder / "b", DEMO_WEIGHTS, NUM_BLOCKS) as b,
            gateway(folder / "gw", [a, b], ["ada", "bob"], cache={"scope": "tenant"}) as url,
        ):
            measured = measure(Client(url), args.rounds, random.Random(args.seed))
    low, high = measured["by_chance"]
    measured["holds"] = low <= measured["auc_beside_control"]["probe"] <= high and measured["headers_alike"]
    print(json.dumps(measured, indent=1))
    now = datetime.datetime.now(datetime.UTC)
    out = args.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    result = {"at": now.isoformat(timespec="seconds"), "machine": machine(), **measured}
    (out / f"isolation-{now:%Y%m%d-%H%M%S}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
