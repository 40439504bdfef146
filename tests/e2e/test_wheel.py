"""The wheel in a clean virtual environment and an empty folder, without the repository, a compiler and the network."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import PATIENCE_SECONDS, ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow(seconds=12)]

KEY = "wp-dev-0123456789abcdef"
OFFLINE = ("unshare", "--map-root-user", "--net")
BODY = (
    '{"model": "warmpath-demo", "stream": true, "messages": [{"role": "user", "content": "What is prefix caching?"}]}'
)
SCRIPT = """
ip link set lo up 2>/dev/null || python -c "import fcntl, socket, struct; s = socket.socket(); \
fcntl.ioctl(s, 0x8914, struct.pack('16sh14s', b'lo', 1, b''))"
warmpath up --port 18080 > out 2> err &
up=$!
trap 'kill -INT $up; wait $up' EXIT
for i in $(seq 600); do grep -q 'is up' out && break; kill -0 $up || exit 1; sleep 0.1; done
python - <<'END'
import urllib.request
headers = {"authorization": "Bearer KEY", "content-type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:18080/v1/chat/completions", data=b'BODY', headers=headers)
print(urllib.request.urlopen(request).read().decode())
END
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment with the wheel, and with the dependencies of this environment.

    A line in a .pth file adds a folder, but not the .pth files in it, such as that of an editable installation.
    """
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    built = subprocess.run(
        [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], capture_output=True, text=True
    )
    if "hatchling" in built.stderr and "No matching distribution" in built.stderr:
        pytest.skip("the build needs hatchling, which cannot be downloaded here")
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "venv" / "lib" / version / "site-packages"
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([*pip, "--python", str(folder / "venv"), "install", "--quiet", "--no-deps", str(wheel)], check=True)
    yield folder / "venv"


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*OFFLINE, "true"], capture_output=True).returncode != 0,
    reason="the network can be cut only with unshare, and the rights for it",
)
def test_up_from_the_wheel_in_an_empty_folder(environment: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"  # everything on the path but compilers
    tools.mkdir()
    for name in ("sh", "bash", "ip", "grep", "seq", "sleep", "cat"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    empty = tmp_path / "empty"
    empty.mkdir()
    env = {"PATH": f"{environment / 'bin'}:{tools}", "HOME": str(tmp_path / "home"), "WARMPATH_DEV_KEY": KEY}
    done = subprocess.run(
        [shutil.which("unshare") or "", *OFFLINE[1:], str(tools / "bash"), "-c",
         SCRIPT.replace("KEY", KEY).replace("BODY", BODY)],
        cwd=empty, env=env, capture_output=True, text=True, timeout=PATIENCE_SECONDS + 60,
    )  # fmt: skip
    shown = (empty / "out").read_text()
    assert done.returncode == 0, (done.stderr, shown, (empty / "err").read_text())
    assert "data: [DONE]" in done.stdout
    assert "compiling" not in shown and "torch computes" not in (empty / ".warmpath/engine.log").read_text()
    where = subprocess.run(
        [environment / "bin" / "python", "-c", "import gateway, backend; print(gateway.__file__, backend.__file__)"],
        cwd=empty, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert str(ROOT) not in where.stdout
