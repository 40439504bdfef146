import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.limits import LIMITS
from gateway.limits.budget import PERIODS
from gateway.policy import Policy
from gateway.policy.media_formulas import formula_for
from tests.docs.markdown import ROOT, blocks, code_spans, section, table_rows
from tests.e2e.processes import warmpath

PAGE = ROOT / "docs" / "explanation" / "limits.md"
AROUND: dict[str, Any] = {
    "deployments": [{"name": "a", "base_url": "http://a.invalid/v1", "model": "served"}],
    "models": [{"name": "big-model", "deployments": ["a"]}],
    "tenants": [{"name": "dev"}],
}


# The models of each row of the table of families, in the row's order.
FAMILY_ROWS = (
    ("gpt-4o", "gpt-4.1"), ("gpt-4o-mini",), ("gpt-5.1", "o3"), ("gpt-4.1-mini", "gpt-4.1-nano", "o4-mini"),
    ("gpt-5-mini", "gpt-5-nano"), ("gpt-5.4", "gpt-5.5"), ("claude-sonnet-4-5", "claude-opus-4-7"),
    ("gemini-1.5-pro", "gemini-2.5-flash"), ("gemini-3-pro",), ("Qwen2-VL-7B", "Qwen2.5-VL-7B"), ("Qwen3-VL-8B",),
    ("gemma-3-27b",), ("pixtral-12b", "mistral-small-3.1"), ("InternVL3-8B", "llama-4-scout"), ("something-else",),
)  # fmt: skip


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_the_examples_are_policy(number: int) -> None:
    examples = [yaml.safe_load(block.text) for block in blocks(PAGE) if block.language == "yaml"]
    assert len(examples) == 4
    models = [{"name": "big-model", "deployments": [each["name"]]} for each in examples[2]["deployments"]]
    examples[2]["models"] = models
    Policy.model_validate(AROUND | examples[number])


def test_the_table_of_families_is_true() -> None:
    rows = table_rows(section(PAGE, "Images, sound, video and files"))
    assert len(rows) == len(FAMILY_ROWS)
    for (_, image, unknown, minute, page), models in zip(rows, FAMILY_ROWS, strict=True):
        for number, model in enumerate(models):
            formula = formula_for(model, "openai")
            images = numbers_at_the_beginning(image)
            assert formula.image_tokens(1024, 1024, "") == images[min(number, len(images) - 1)], model
            unknowns = images if unknown == "the same" else numbers_at_the_beginning(unknown)
            assert formula.unknown_image == unknowns[min(number, len(unknowns) - 1)], model
            assert (formula.audio_tokens(60), formula.page_tokens(1)) == (number_of(minute), number_of(page)), model


def numbers_at_the_beginning(cell: str) -> list[int]:
    """The counts before the explanation, separated by semicolons."""
    found = re.match(r"[\d,]+(?:; [\d,]+)*", cell)
    assert found, cell
    return [number_of(each) for each in found[0].split("; ")]


def number_of(text: str) -> int:
    return int(text.replace(",", ""))


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
