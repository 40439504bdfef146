"""Measures the first start: from an installed wheel and empty caches to the first token of a streamed answer.

    python -m benchmarks.first_start [--wheel FILE]
    unshare --map-root-user --net python -m benchmarks.first_start --wheel FILE    without a network

The wheel (by default built now, with the kernels of this CPU) is installed in a new virtual environment, which takes
its dependencies from the environment that runs this. `warmpath up` then runs in an empty folder with an empty home.
Every line that it prints is shown with the seconds since the start and the CPU seconds of all processes until then. The
last row is the first token of a streamed chat, which is sent as soon as `up` says that it is up.
CPU seconds depend little on the other load of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEY = "wp-dev-0123456789abcdef"
BODY = (
    b'{"model": "warmpath-demo", "stream": true, "messages": [{"role": "user", "content": "What is prefix caching?"}]}'
)
UP_SECONDS_MAX = 600.0
TICKS = os.sysconf("SC_CLK_TCK")
SIOCSIFFLAGS = 0x8914
LOOPBACK_UP = b"lo".ljust(16, b"\0") + b"\1\0" + bytes(22)  # struct ifreq, with IFF_UP


def build_wheel(folder: Path) -> Path:
    """A wheel of the working copy in this folder."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def install(wheel: Path, folder: Path) -> Path:
    """A new virtual environment with the wheel and, by a path file, the dependencies of this one. Returns its bin/."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / python / "site-packages" / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True)
    return folder / "bin"


def cpu_seconds(root: int) -> float:
    """CPU seconds of a process and all its descendants, those that have ended included."""
    total, seen = 0, [root]
    parents: dict[int, list[int]] = {}
    fields_of: dict[int, list[str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        fields_of[int(stat.parent.name)] = fields
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    while seen:
        pid = seen.pop()
        seen.extend(parents.get(pid, ()))
        if pid in fields_of:
            total += sum(map(int, fields_of[pid][11:15]))  # utime, stime, and those of ended children
    return total / TICKS


def measure(bin_folder: Path, folder: Path) -> None:
    """Start `warmpath up` and print its stages, and the first token."""
    (folder / "home").mkdir(parents=True)
    (folder / "empty").mkdir()
    env = {
        "PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(folder / "home"), "WARMPATH_DEV_KEY": KEY, "COLUMNS": "100",
    }  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    up = subprocess.Popen(
        [bin_folder / "warmpath", "up", "--port", str(port)],
        cwd=folder / "empty", env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert up.stdout is not None
    watchdog = threading.Timer(UP_SECONDS_MAX, up.kill)
    watchdog.start()

    def row(text: str) -> None:
        print(f"{time.monotonic() - began:7.2f} s {cpu_seconds(up.pid):7.2f} s CPU  {text}", flush=True)

    try:
        for line in up.stdout:
            if line.strip():
                row(line.rstrip())
            if "is up" in line:
                break
        else:
            sys.exit("`warmpath up` has ended")
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", data=BODY, headers=headers)
        with urllib.request.urlopen(request) as answer:
            for event in answer:
                if b'"content":"' in event.replace(b" ", b"") and b'"content":""' not in event.replace(b" ", b""):
                    row(f"first token: {event.decode().strip()[:60]}")
                    break
    finally:
        watchdog.cancel()
        up.send_signal(signal.SIGINT)
        threading.Thread(target=up.stdout.read, daemon=True).start()
        up.wait()


def raise_loopback() -> None:
    """Bring the loopback device up, which is down in a new network namespace."""
    with socket.socket() as one, contextlib.suppress(OSError):
        fcntl.ioctl(one, SIOCSIFFLAGS, LOOPBACK_UP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="instead of one that is built now")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warmpath-first-start-") as temporary:
        folder = Path(temporary)
        bin_folder = install(options.wheel or build_wheel(folder), folder / "venv")
        raise_loopback()
        measure(bin_folder, folder)


if __name__ == "__main__":
    main()
