"""The example of docs/how-to/hooks.md does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gateway.hooks import Answer, Reject, Request

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "hooks.md"


@pytest.fixture
def example() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(compile(code, PAGE, "exec"), names)
    return names


def request(body: dict[str, Any]) -> Request:
    return Request("c", "t", "k", "chat/completions", "m", body)


def test_personal_data_is_masked_in_requests_and_answers(example: dict[str, Any]) -> None:
    text = "Write to ann.lee@example.com, call +44 20 7946 0958, or pay to DE89 3704 0044 0532 0130 00 by 2026-11-26."
    masked = "Write to [masked], call [masked], or pay to [masked] by 2026-11-26."
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}], "n": 1}
    changed = example["mask_request"](request(body))
    assert changed["messages"][0]["content"][0]["text"] == masked and changed["n"] == 1
    assert example["mask_answer"](Answer("c", "t", "k", "m", "d", (text, "fine"))) == [masked, "fine"]


def test_a_key_is_rejected(example: dict[str, Any]) -> None:
    with pytest.raises(Reject) as rejected:
        example["mask_request"](request({"api_key": "sk-1"}))
    assert rejected.value.status == 422
