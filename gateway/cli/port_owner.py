"""Which server listens on the engine's port: the bundled engine with the right model, or another program."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ENGINE = "warmpath"  # the engine's `owned_by` in its list of models
ANSWER_SECONDS = 2.0
ANSWER_BYTES_MAX = 1 << 20
COMMAND_CHARS_MAX = 80
PORTS_TRIED = 100


@dataclass(frozen=True, slots=True)
class PortOwner:
    """The program at a port. `description` is for error messages, as in `process 12 (python3 -m http.server)`."""

    is_our_engine: bool
    description: str


def port_owner(root: str, model: str) -> PortOwner | None:
    """What listens at this root URL; None if nothing does."""
    address = urlsplit(root)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    try:
        socket.create_connection((host, port), ANSWER_SECONDS).close()
    except OSError:
        return None
    served = _served_models(root)
    if served is not None and model in served:
        return PortOwner(True, f"an engine that serves {model}")
    process = _process_at(port) or "another program"
    if served is not None:
        return PortOwner(False, f"{process}, an engine that serves {', '.join(served)} instead of {model}")
    return PortOwner(False, f"{process}, which is not the bundled engine")


def next_free_port(port: int) -> int:
    """Return the first of the next `PORTS_TRIED` ports on which no process listens, or 0 if all are taken."""
    for candidate in range(port + 1, min(port + 1 + PORTS_TRIED, 65536)):
        with suppress(OSError), socket.create_server(("127.0.0.1", candidate)):
            return candidate
    return 0


def _served_models(root: str) -> list[str] | None:
    """The models of the bundled engine. None if another program answers, or none."""
    try:
        with urllib.request.urlopen(f"{root}/v1/models", timeout=ANSWER_SECONDS) as reply:
            models = json.loads(reply.read(ANSWER_BYTES_MAX))["data"]
        if not all(model["owned_by"] == ENGINE for model in models):
            return None
        return [str(model["id"]) for model in models]
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError):
        return None


def _process_at(port: int) -> str | None:
    """The process that listens on a port, from /proc. None elsewhere, or if it is another user's."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # listening
                    inodes.add(f"socket:[{fields[9]}]")
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(str(link.readlink()) in inodes for link in (folder / "fd").iterdir()):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {folder.name} ({command[:COMMAND_CHARS_MAX]})"
    return None
