"""Looks up the known vulnerabilities of what requirements.lock installs.

    make audit

Exit code 0: none is known. 1: some are, and their ids, and the versions that fix them, are printed. 3: the database of
vulnerabilities did not answer for some or all packages, so nothing is known about them, which is also printed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LOCK = Path("requirements.lock")
UNKNOWN = 3
TIMEOUT_SECONDS = 300


def main() -> int:
    pins = re.findall(r"^([A-Za-z0-9._-]+==\S+)", LOCK.read_text(), re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        pinned = Path(folder) / "pins.txt"
        pinned.write_text("\n".join(pins) + "\n")
        try:
            ran = subprocess.run(
                [
                    str(Path(sys.executable).with_name("pip-audit")), "--requirement", str(pinned), "--no-deps",
                    "--disable-pip", "--format", "json", "--progress-spinner", "off",
                ],
                capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return unreachable(pins, f"no answer within {TIMEOUT_SECONDS} s")
    try:
        found = json.loads(ran.stdout)["dependencies"]
    except (ValueError, KeyError):
        return unreachable(pins, (ran.stderr.strip().splitlines() or ["no output"])[-1])
    vulnerable = [package for package in found if package.get("vulns")]
    for package in vulnerable:
        for each in package["vulns"]:
            fixed = ", ".join(each["fix_versions"]) or "no version"
            print(f"{package['name']} {package['version']}: {each['id']}, fixed in {fixed}")
    unknown = [package["name"] for package in found if package.get("skip_reason")]
    if unknown:
        unreachable(unknown, "the database does not have them, or its mirror does not serve them")
    print(f"{len(found) - len(unknown)} packages audited, {len(vulnerable)} of them vulnerable")
    return 1 if vulnerable else UNKNOWN if unknown else 0


def unreachable(packages: list[str], reason: str) -> int:
    print(f"{len(packages)} packages were not audited: {reason}", file=sys.stderr)
    return UNKNOWN


if __name__ == "__main__":
    sys.exit(main())
