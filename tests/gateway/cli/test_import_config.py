"""`warmpath import`: the policy goes to stdout, and what was not carried over to stderr."""

from __future__ import annotations

from pathlib import Path

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
    file.write_text("model_list: [")
    assert warmpath("import", "litellm", str(file)).exit_code == 1
