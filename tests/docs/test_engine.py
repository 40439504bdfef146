import re
from dataclasses import asdict, fields

from backend.engine.config import EngineConfig
from backend.engine.step_limits import CPU
from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "explanation" / "engine.md"


def test_the_numbers_are_the_defaults() -> None:
    text = PAGE.read_text(encoding="utf-8")
    documented = {name: int(value) for name, value in re.findall(r"`(\w+)`(?: tokens)? \((\d+)(?: on a CPU)?\)", text)}
    documented |= {name: int(value) for value, name in re.findall(r"(\d+) tokens \(`(\w+)`\)", text)}
    defaults = {field.name: field.default for field in fields(EngineConfig)} | asdict(CPU)
    assert documented.keys() == {"block_size", "max_num_batched_tokens", "max_num_seqs", "max_waiting"}
    assert documented == {name: defaults[name] for name in documented}
