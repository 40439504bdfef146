import json
import re
from pathlib import Path

import pytest

from tests.gateway.cli.conftest import Warmpath
from tests.gateway.diagnosis.test_breaks import LATER, STABLE, DiagnosisRig, chat

LINE = "{tenant: t, model: m, level: full, opt_in: [volatile_to_end]}"
POLICY = """\
# Ours.
deployments: [{name: a, base_url: "http://a.invalid/v1", model: served}]
models: [{name: m, deployments: [a]}]
tenants: [{name: t},
          {name: u}]   # two
"""


def write_summaries(folder: Path) -> DiagnosisRig:
    """Write summaries of calls with a clock in large prompts, which costs tokens, and a folder in small ones, often."""
    rig = DiagnosisRig(folder / "data" / "diagnosis")
    for minute in range(2):
        rig.call(chat(f"Current time: 09:0{minute}\n{STABLE * 4}", *LATER[: 2 * minute]), key="large")
    for n in range(3):
        rig.call(chat(f"cwd: /home/ada/{n}{n}{n}\n{STABLE}", user=str(n)), key="small")
    return rig


def test_findings_are_ranked_each_with_the_policy_line_that_fixes_it(warmpath: Warmpath, tmp_path: Path) -> None:
    write_summaries(tmp_path)
    result = warmpath("doctor", "--data", "data")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("5 calls, ")
    table = [line.split() for line in lines if line[:2] in ("1.", "2.")]
    assert [(row[-1], row[6:8]) for row in table[:2]] == [("clock", ["t", "large"]), ("cwd", ["t", "small"])]
    assert [line for line in lines if "fixed by" in line] == ["1. fixed by proposal 1", "2. fixed by proposal 1"]
    assert f"1. canonicalise: {{exceptions: [{LINE}]}}" in lines, "which saves as much as moving them further"
    (saved,) = [line for line in lines if line.startswith("   saves ")]
    assert re.fullmatch(r"   saves \d{3,} computed prompt tokens \(\d\d% of those of its calls\), 0\.\d{4} USD", saved)


@pytest.mark.parametrize("by", ["tokens", "seconds", "money"])
def test_rankings(warmpath: Warmpath, tmp_path: Path, by: str) -> None:
    write_summaries(tmp_path)
    found = json.loads(warmpath("doctor", "--data", "data", "--by", by, "--json").stdout)["findings"]
    lost = [float(finding["lost_cost"]["USD"] if by == "money" else finding[f"lost_{by}"]) for finding in found]
    assert lost == sorted(lost, reverse=True)
    assert all(lost)


def test_only_recent_calls(warmpath: Warmpath, tmp_path: Path) -> None:
    write_summaries(tmp_path)  # in November 2025
    assert "0 calls" in warmpath("doctor", "--data", "data", "--since", "1h").stdout


def test_no_findings(warmpath: Warmpath, tmp_path: Path) -> None:
    DiagnosisRig(tmp_path / "data" / "diagnosis").call(chat())
    assert "no broken prefixes found" in warmpath("doctor", "--data", "data").stdout


def test_no_summaries(warmpath: Warmpath) -> None:
    result = warmpath("doctor")
    assert result.exit_code == 1
    assert "enable them in the policy, as in `diagnosis: {sample: 10%}`" in result.stderr


def test_what_no_line_fixes_gets_advice(warmpath: Warmpath, tmp_path: Path) -> None:
    rig = DiagnosisRig(tmp_path / "data" / "diagnosis")
    for n in range(3):
        rig.call(chat(f"Agent #a3f9c21{n}. {STABLE}", *LATER * n))
    result = warmpath("doctor", "--data", "data")
    assert "no policy line is proposed: none would save tokens" in result.stdout
    assert "write it as a short line of its own" in result.stdout
    write_policy(tmp_path)
    applied = warmpath("doctor", "--data", "data", "--policy", "policy.yaml", "--apply", "--yes")
    assert (applied.exit_code, applied.stdout.splitlines()[-1]) == (0, "nothing to apply")


@pytest.mark.parametrize(
    "options",
    [("--by", "weight"), ("--since", "yesterdya"), ("--yes",), ("--only", "1"), ("--apply", "--json"), ("--only", "0")],
)
def test_invalid_options_are_wrong_usage(warmpath: Warmpath, options: tuple[str, ...]) -> None:
    assert warmpath("doctor", *options).exit_code == 2


def write_policy(folder: Path, more: str = "") -> Path:
    """A policy with a comment, for the tenant and the model of the summaries."""
    (folder / "policy.yaml").write_text(POLICY + more)
    return folder / "policy.yaml"


def test_apply_shows_the_diff_asks_and_writes(warmpath: Warmpath, tmp_path: Path) -> None:
    write_summaries(tmp_path)
    file = write_policy(tmp_path)
    options = ("doctor", "--data", "data", "--policy", "policy.yaml", "--apply")
    for answer in ("n\n", ""):  # no, or no terminal
        refused = warmpath(*options, stdin=answer)
        assert refused.exit_code == 1
        assert "policy.yaml is unchanged" in refused.stderr
        assert file.read_text() == POLICY
    accepted = warmpath(*options, stdin="y\n")
    assert accepted.exit_code == 0, accepted.stderr
    assert "--- policy.yaml\n+++ policy.yaml\n@@ -3,3 +3,6 @@\n models" in accepted.stdout
    assert f"\n+canonicalise:\n+  exceptions:\n+    - {LINE}\n" in accepted.stdout
    assert "Write this to policy.yaml? [y/N]" in accepted.stdout
    assert file.read_text() == f"{POLICY}canonicalise:\n  exceptions:\n    - {LINE}\n"
    assert warmpath("check", "policy.yaml").exit_code == 0
    again = warmpath(*options, "--yes")
    assert "the policy has a transform against it since these calls" in again.stdout
    assert again.stdout.splitlines()[-1] == "nothing to apply"


def test_only_some_proposals_are_applied(warmpath: Warmpath, tmp_path: Path) -> None:
    rig = write_summaries(tmp_path)
    for minute in range(3):
        rig.call(chat(f"Current time: 09:0{minute}\n{STABLE}", *LATER * minute), tenant="u")
    file = write_policy(tmp_path)
    options = ("doctor", "--data", "data", "--policy", "policy.yaml", "--apply", "--yes")
    assert "there is no proposal 3; there are 2" in warmpath(*options, "--only", "3").stderr
    assert warmpath(*options, "--only", "2").exit_code == 0
    assert file.read_text().endswith("    - {tenant: u, model: m, level: full, opt_in: [volatile_to_user]}\n")
    assert "tenant: t," not in file.read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("favourite: batch\n", "policy.yaml:6:1: favourite: unknown key"),
        (
            "canonicalise:\n  <<: {level: safe, exceptions: [{tenant: t}]}\n",
            "add to its `exceptions`, as the first: {tenant",
        ),
    ],
)
def test_a_policy_that_cannot_be_changed_stays(warmpath: Warmpath, tmp_path: Path, more: str, message: str) -> None:
    write_summaries(tmp_path)
    file = write_policy(tmp_path, more)
    result = warmpath("doctor", "--data", "data", "--policy", "policy.yaml", "--apply", "--yes")
    assert result.exit_code == 1
    assert message in result.stderr
    assert file.read_text() == POLICY + more


def test_a_missing_policy_is_named_if_it_is_needed(warmpath: Warmpath, tmp_path: Path) -> None:
    write_summaries(tmp_path)
    missing = warmpath("doctor", "--data", "data", "--policy", "none.yaml", "--apply")
    assert missing.exit_code == 1
    assert "none.yaml:1:1: cannot be read" in missing.stderr
    warned = warmpath("doctor", "--data", "data", WARMPATH_POLICY="none.yaml")
    assert warned.exit_code == 0
    assert "none.yaml is not a valid policy; the proposals assume the policy of the recorded calls" in warned.stderr
    write_policy(tmp_path).write_text(POLICY.replace("{name: t}", "{name: v}"))
    assert (
        "has no such tenant or model any more" in warmpath("doctor", "--data", "data", "--policy", "policy.yaml").stdout
    )
