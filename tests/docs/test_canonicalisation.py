"""The page on canonicalisation says what the code has, and its blocks are run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
import yaml

from gateway.diagnosis import breaks
from gateway.policy import Policy
from gateway.policy.traffic import OptIn
from gateway.prompts.transforms import VERSION, VERSIONS
from tests.docs.markdown import ROOT, Block, blocks, code_spans, section, table_rows
from tests.gateway.calls import a_policy
from tests.gateway.cli.conftest import Warmpath, warmpath
from tests.gateway.cli.test_doctor import write_policy
from tests.gateway.diagnosis.test_breaks import STABLE, DiagnosisRig, chat

__all__ = ["warmpath"]

PAGE = ROOT / "docs" / "explanation" / "canonicalisation.md"
BLOCKS = blocks(PAGE)


def test_every_transform_is_documented_with_its_class() -> None:
    documented: dict[str, str] = {}
    safety = ""
    for row in table_rows(section(PAGE, "The transforms")):
        safety = row[0] or safety
        documented[row[2].strip("`")] = safety
    assert documented == {transform.name: f"P{transform.safety}" for transform in VERSIONS[VERSION]}
    assert set(get_args(OptIn)) == {name for name, safety in documented.items() if safety == "P3"}


def test_every_kind_of_break_is_documented() -> None:
    documented = [span for row in table_rows(section(PAGE, "What breaks prefixes")) for span in code_spans(row[0])]
    in_the_code = re.findall(r"^    ([a-z_, ]+?)  +", breaks.__doc__ or "", re.MULTILINE)
    names = {name for names in in_the_code for name in names.split(", ")} - {"kind"}
    assert set(documented) == names
    assert len(documented) == len(set(documented))


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda block: f"line {block.line}")
def test_policies_are_policies(block: Block) -> None:
    names = ["agents", "research", "dev"]
    fields = {"tenants": [{"name": name} for name in names], **yaml.safe_load(block.text)}
    models = [{"name": name, "deployments": ["a"]} for name in ("m", "llama-3.1-8b")]
    assert isinstance(a_policy(models=models, **fields), Policy)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=lambda block: f"line {block.line}")
def test_commands_run(warmpath: Warmpath, tmp_path: Path, block: Block) -> None:
    rig = DiagnosisRig(tmp_path / ".warmpath" / "diagnosis")
    rig.now_ns = 2 * 10**18  # later than any day on which this runs
    for time in ("09:41", "09:42"):
        rig.call(chat(f"Current time: {time}\n{STABLE}"))
    (tmp_path / "request.json").write_text(json.dumps(chat() | {"model": "demo"}))
    write_policy(tmp_path)
    for line in block.text.splitlines():
        _, *arguments = shlex.split(line)
        result = warmpath(*(str(ROOT / a) if (ROOT / a).is_file() else a for a in arguments), stdin="y\n")
        assert result.exit_code == 0, result.stderr
        assert "opt_in: [volatile_to_" in result.stdout or "json_form" in result.stdout
