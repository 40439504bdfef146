import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.limits import LIMITS
from gateway.limits.budget import PERIODS
from gateway.policy import Policy
from tests.docs.markdown import ROOT, blocks, code_spans, section
from tests.e2e.processes import warmpath

PAGE = ROOT / "docs" / "explanation" / "limits.md"
AROUND: dict[str, Any] = {
    "deployments": [{"name": "a", "base_url": "http://a.invalid/v1", "model": "served"}],
    "models": [{"name": "big-model", "deployments": ["a"]}],
    "tenants": [{"name": "dev"}],
}


@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_are_policy(number: int) -> None:
    examples = [yaml.safe_load(block.text) for block in blocks(PAGE) if block.language == "yaml"]
    assert len(examples) == 2
    Policy.model_validate(AROUND | examples[number])


def test_every_limit_and_period_is_documented() -> None:
    text = section(PAGE, "What can be limited")
    assert all(f"{limit.kind}:" in text for limit in LIMITS)
    assert PERIODS.keys() <= set(code_spans(text))


@pytest.mark.e2e
def test_the_commands_run(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(PAGE) if block.language == "bash")
    commands = [shlex.split(line) for line in block.text.splitlines()]
    assert [command[2] for command in commands] == ["create", "rotate", "list", "revoke"]
    for command in commands:
        result = warmpath(*command[1:], cwd=tmp_path, storage=f"sqlite:///{tmp_path / 'keys.db'}")
        assert result.returncode == 0, result.stderr
