"""A real Redis Cluster and a real Redis that a Sentinel watches, for tests: processes on ports of this machine."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import redis

from tests.ports import free_port

START_SECONDS = 60.0
NODES = 3
SLOTS = 16384
NODE_TIMEOUT_MS = 1000  # after which a silent node counts as failed
SERVICE = "wp"


class Node:
    """One redis-server process."""

    def __init__(self, folder: Path, *options: str, file: Path | None = None) -> None:
        self.port, self.bus_port = free_port(), free_port()  # the latter is that between the nodes of a cluster
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "redis.log"
        self._command = [
            "redis-server", *([str(file)] if file else []), "--port", str(self.port), "--bind", "127.0.0.1",
            "--dir", str(folder),
            "--logfile", str(self._log), "--cluster-port", str(self.bus_port), *options,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        until(lambda: self.answers() or self._ended())

    def _ended(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self._log.read_text()
        return False

    def answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, decode_responses=True, protocol=2)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


class Cluster:
    """Three primaries, of which each has a third of the slots, and a replica of the first one."""

    def __init__(self, folder: Path) -> None:
        options = [
            "--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS),
            "--cluster-replica-validity-factor", "0", "--save", "", "--appendonly", "no",
        ]  # fmt: skip
        self.nodes = [Node(folder / str(number), *options) for number in range(NODES + 1)]
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        first = self.nodes[0].client()
        for number, node in enumerate(self.nodes[:NODES]):
            begin, end = SLOTS * number // NODES, SLOTS * (number + 1) // NODES - 1
            node.client().execute_command("CLUSTER ADDSLOTSRANGE", begin, end)
            node.client().execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            first.execute_command("CLUSTER MEET", "127.0.0.1", node.port, node.bus_port)
        primary, replica = first.execute_command("CLUSTER MYID"), self.nodes[NODES].client()
        until(lambda: primary in str(replica.execute_command("CLUSTER NODES")))
        until(lambda: all(self._is_whole(node) for node in self.nodes))
        replica.execute_command("CLUSTER REPLICATE", primary)
        until(lambda: replica.info("replication").get("master_link_status") == "up")

    def _is_whole(self, node: Node) -> bool:
        info = node.client().execute_command("CLUSTER INFO")
        return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == len(self.nodes)

    def owner_of(self, key: str) -> Node:
        """The primary that has a key's slot."""
        slot = self.nodes[1].client().execute_command("CLUSTER KEYSLOT", key)
        return self.nodes[next(n for n in range(NODES) if slot < SLOTS * (n + 1) // NODES)]

    def fail_over(self) -> None:
        """Kill the first primary. Its replica takes its slots."""
        replica = self.nodes[NODES].client()
        self.nodes[0].kill()
        until(lambda: replica.info("replication")["role"] == "master")

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()


class Watched:
    """A primary, its replica, and a Sentinel that makes the replica primary if the primary fails."""

    def __init__(self, folder: Path) -> None:
        plain = ["--save", "", "--appendonly", "no"]
        self.primary = Node(folder / "primary", *plain)
        self.replica = Node(folder / "replica", *plain, "--replicaof", "127.0.0.1", str(self.primary.port))
        file = folder / "sentinel.conf"
        file.write_text(
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary.port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} {NODE_TIMEOUT_MS}\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
        )
        self.sentinel = Node(folder / "sentinel", "--sentinel", file=file)
        self.url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{self.sentinel.port}/{SERVICE}"

    def start(self) -> None:
        self.primary.start()
        self.replica.start()
        until(lambda: self.replica.client().info("replication").get("master_link_status") == "up")
        self.sentinel.start()
        watching = self.sentinel.client()
        until(lambda: cast("dict[str, Any]", watching.sentinel_master(SERVICE))["num-slaves"] == 1)

    def fail_over(self) -> None:
        """Kill the primary. The Sentinel makes the replica primary."""
        replica = self.replica.client()
        self.primary.kill()
        until(lambda: replica.info("replication")["role"] == "master")

    def stop(self) -> None:
        for node in (self.sentinel, self.replica, self.primary):
            node.kill()


@contextlib.contextmanager
def started(kind: type[Cluster] | type[Watched]) -> Iterator[Cluster | Watched]:
    with tempfile.TemporaryDirectory(prefix="wp") as folder:
        redises = kind(Path(folder))
        try:
            redises.start()
            yield redises
        finally:
            redises.stop()
