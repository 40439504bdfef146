"""The parts of a machine that fail: a disk that fills, and a clock that steps.

The disk is a tmpfs of a few MB in a mount namespace of this program's own, so a write to it fails with a real ENOSPC.
Where user namespaces are allowed, that needs no root. A limit of the file size (RLIMIT_FSIZE) would not do: it also
forbids writes to space that was allocated in advance, which a full disk does not.

The clock is that of the C library: a small library, loaded before it (LD_PRELOAD), adds the seconds of a file to the
time of day. The monotonic clock does not step, as on a real machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

DISK_BYTES = 256 * 2**20
IN_NAMESPACE = "CHAOS_IN_NAMESPACE"  # set once this program runs in its own mount namespace

_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *step_seconds;

static long long stepped(void) {
    static const long long none = 0;
    if (!step_seconds) {
        const char *path = getenv("CHAOS_CLOCK");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        void *map = file < 0 ? MAP_FAILED : mmap(0, sizeof none, PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        step_seconds = map == MAP_FAILED ? &none : map;
    }
    return *step_seconds;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += stepped();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *into) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (into) *into = exact.tv_sec;
    return exact.tv_sec;
}
"""


def enter_namespace() -> None:
    """Run this program again in a mount namespace of its own, if it can. Returns in that run, or where it cannot."""
    if IN_NAMESPACE in os.environ or shutil.which("unshare") is None:
        return
    unshare = ["unshare", "--mount", *(() if os.geteuid() == 0 else ("--user", "--map-root-user"))]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode == 0:
        os.environ[IN_NAMESPACE] = "1"
        os.execvp(unshare[0], [*unshare, sys.executable, "-m", "benchmarks.chaos", *sys.argv[1:]])


class Disk:
    """A small file system that can be filled. `real` is False where none can be mounted: then it never fills."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.real = False
        if IN_NAMESPACE in os.environ:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
            self.real = subprocess.run(mount, capture_output=True).returncode == 0
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            for size in (2**20, 4096):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Keep the files, and unmount it."""
        if self.real:
            kept = self.folder.with_name(self.folder.name + ".kept")
            shutil.copytree(self.folder, kept)
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False)
            self.folder.rmdir()
            kept.rename(self.folder)


class Clock:
    """The clock of one process, which can be stepped. `environment` is what the process needs to use it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self._file.write_bytes(struct.pack("q", 0))
        library = folder / "clock.so"
        self.real = False
        compiler = shutil.which("cc")
        if compiler and sys.platform == "linux":
            command = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library), "-ldl"]
            self.real = subprocess.run(command, input=_CLOCK.encode(), capture_output=True).returncode == 0
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._file)} if self.real else {}

    def step(self, seconds: int) -> None:
        """Set how far the clock is ahead of the right time."""
        with contextlib.closing(os.fdopen(os.open(self._file, os.O_WRONLY), "wb", buffering=0)) as file:
            file.write(struct.pack("q", seconds))
