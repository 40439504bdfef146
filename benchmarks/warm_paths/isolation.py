"""Measures what a tenant can learn, from times and headers, about what another tenant has sent.

Real processes: a gateway that caches answers and prefixes, in front of two engines. In every round, ada sends a new
prompt. Then bob sends the same one (*probe*), and one of his own that is as long and new (*control*), in random
order. Then ada continues with hers (*own*), which shows the effect that there would be to see. The results are the
times to first chunk, and for each kind against control the AUC: how often one of its times was below one of the
control's. 0.5 means that times reveal nothing, and 1.0 that they reveal everything. The bounds contain 99 of 100
results if times reveal nothing. All headers whose values do not change with every reply must be equal.

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
OF_EVERY_REPLY = {"date", "x-request-id", "x-trace-id", "x-warmpath-overhead-ms", "content-length", "traceparent"}
OF_THE_CLOCK = ("x-ratelimit-",)  # of the tenant's own calls
KINDS = ("probe", "control", "own")


def prompt(rng: random.Random) -> str:
    return " ".join("".join(rng.choices("etaoinshrdlu", k=6)) for _ in range(WORDS))


class Client:
    def __init__(self, url: str) -> None:
        self._http = httpx2.Client(base_url=url, timeout=120)

    def ask(self, tenant: str, system: str, user: str) -> tuple[float, dict[str, str]]:
        """Seconds to the first chunk, and the headers that are to be compared."""
        said = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        body = {"model": MODEL, "messages": said, "max_tokens": 2, "temperature": 0, "stream": True}
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
        kept = {
            name: value
            for name, value in reply.headers.items()
            if name not in OF_EVERY_REPLY and not name.startswith(OF_THE_CLOCK)
        }
        return seconds, kept


def faster(one: Sequence[float], other: Sequence[float]) -> float:
    """The AUC: how often one of the first is less than one of the second; a tie is half."""
    won = sum((a < b) + 0.5 * (a == b) for a in one for b in other)
    return won / len(one) / len(other)


def by_chance(rounds: int) -> float:
    """By how much the AUC of equal kinds differs from 0.5 in one of a hundred cases (Mann and Whitney's U)."""
    return Z_99 * math.sqrt((2 * rounds + 1) / (12 * rounds * rounds))


def measure(client: Client, rounds: int, rng: random.Random) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    places: dict[str, int] = dict.fromkeys(KINDS, 0)  # times that it went where ada's prompt is warm
    told: dict[str, set[tuple[tuple[str, str], ...]]] = {kind: set() for kind in KINDS}
    for _ in range(rounds):
        first, second = prompt(rng), prompt(rng)
        _, headers = client.ask("ada", first, "Why?")
        asked = [("probe", "bob", first, "Why?"), ("control", "bob", second, "Why?")]
        rng.shuffle(asked)
        for kind, tenant, system, user in [*asked, ("own", "ada", first, "And then?")]:
            took, these = client.ask(tenant, system, user)
            seconds[kind].append(took)
            places[kind] += these.pop("x-warmpath-deployment") == headers["x-warmpath-deployment"]
            told[kind].add(tuple(sorted(these.items())))
    return {
        "rounds": rounds,
        "ttft_p50_ms": {kind: round(1000 * statistics.median(seconds[kind]), 2) for kind in KINDS},
        "auc_beside_control": {kind: round(faster(seconds[kind], seconds["control"]), 3) for kind in ("probe", "own")},
        "by_chance": [round(0.5 - by_chance(rounds), 3), round(0.5 + by_chance(rounds), 3)],
        "where_it_is_warm": {kind: round(places[kind] / rounds, 3) for kind in KINDS},
        "headers_alike": told["probe"] == told["control"],
        "headers_of_ones_own_alike": told["own"] == told["control"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where the result goes; default: benchmarks/warm_paths/results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with (
            engine(folder / "a", DEMO_WEIGHTS, NUM_BLOCKS) as a,
            engine(folder / "b", DEMO_WEIGHTS, NUM_BLOCKS) as b,
            gateway(folder / "gw", [a, b], ["ada", "bob"], cache={"scope": "tenant"}) as url,
        ):
            told = measure(Client(url), args.rounds, random.Random(args.seed))
    low, high = told["by_chance"]
    told["holds"] = low <= told["auc_beside_control"]["probe"] <= high and told["headers_alike"]
    print(json.dumps(told, indent=1))
    now = datetime.datetime.now(datetime.UTC)
    out = args.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    result = {"at": now.isoformat(timespec="seconds"), "machine": machine(), **told}
    (out / f"isolation-{now:%Y%m%d-%H%M%S}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
