"""Writes the bill of materials and the licences of what requirements.lock installs, into build/sbom.

    make sbom

`warmpath.cdx.json` is a CycloneDX bill of materials with the hashes of the lock. `licences.md` and `licences.json` list
the licence of each of its packages that is installed in the given environment.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

LOCK = Path("requirements.lock")
FOLDER = Path("build/sbom")
TOOLS = Path(sys.executable).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", required=True, help="Python of the environment whose licences are read.")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    bill = FOLDER / "warmpath.cdx.json"
    subprocess.run(
        [
            str(TOOLS / "cyclonedx-py"), "requirements", str(LOCK), "--pyproject", "pyproject.toml", "--mc-type",
            "application", "--output-reproducible", "--of", "JSON", "--output-file", str(bill),
        ],
        check=True,
    )  # fmt: skip
    names = re.findall(r"^([A-Za-z0-9._-]+)==", LOCK.read_text(), re.MULTILINE)
    for form, suffix in (("markdown", "md"), ("json", "json")):
        subprocess.run(
            [
                str(TOOLS / "pip-licenses"), f"--python={options.environment}", f"--format={form}", "--from=mixed",
                "--output-file", str(FOLDER / f"licences.{suffix}"), "--packages", *names,
            ],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    print(f"{bill}, {FOLDER / 'licences.md'} and {FOLDER / 'licences.json'} written")


if __name__ == "__main__":
    main()
