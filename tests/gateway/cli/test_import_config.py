"""`warmpath import`: the policy goes to stdout, and what was not carried over to stderr."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gateway.policy import Policy
from tests.gateway.cli.conftest import Warmpath
from tests.gateway.policy.test_litellm_config import CONFIG


def test_the_command_prints_a_valid_policy_and_the_report(warmpath: Warmpath, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    result = warmpath("import", "litellm", str(file))
    assert result.exit_code == 0
    assert Policy.model_validate(yaml.safe_load(result.stdout)).models[0].name == "gpt-4o"
    assert "not carried over: litellm_settings.drop_params: " in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model_list: [", "config.yaml:2:1: "),
        (b"\xff\xfe", "config.yaml:1:1: is not UTF-8 text"),
        (b"[1, 2]", "config.yaml: has no model_list"),
        (b"a: " + b"[" * 5000, "nested more than 40 levels deep"),
        (b"model_list: [{1: 2}]", "a key must be text"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_message(
    warmpath: Warmpath, tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    result = warmpath("import", "litellm", str(file))
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr and "Traceback" not in result.stderr
