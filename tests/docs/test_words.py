"""The tool that finds words to avoid looks at what people read, and at nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import words
from tests.docs.markdown import ROOT

STYLE = words.Style.load()

MARKDOWN = "A door.\n\n`door` [text](door.md) <!-- door -->\n\n```python\ndoor = 1\n```\n\n[door](x.md)\n"
PYTHON = '''"""A door, or a `door`."""
door = Door()  # not the door
raise ValueError("the door is closed")
doors = {"door": "doors"}
# one wise
# door
'''
YAML = "door: door  # the door\nother: door\n"
JAVASCRIPT = 'const door = "door"; // a door\nconst text = "a door"; /* `door` */\n`<p>door</p>`;\n'


@pytest.mark.parametrize(
    ("suffix", "source", "lines"),
    [(".md", MARKDOWN, [1, 9]), (".py", PYTHON, [1, 2, 3, 6]), (".yaml", YAML, [1]), (".js", JAVASCRIPT, [1, 2, 3])],
)
def test_prose_is_read_and_code_is_not(suffix: str, source: str, lines: list[int]) -> None:
    found = [
        line + text.count("\n", 0, match.start())
        for line, text in words.READERS[suffix](source)
        for match in re.finditer(r"\bdoors?\b", text)
    ]
    assert sorted(found) == lines


def test_a_phrase_is_found_across_lines_of_a_comment() -> None:
    (word,) = [word for word in STYLE.words if word.avoid.search("in vain")]
    texts = [text for _, text in words.python("x = 1\n# in\n# vain\n")]
    assert [match[0] for text in texts for match in word.found_in(text)] == ["in\n# vain"]


def test_an_allowed_phrase_is_not_found() -> None:
    (word,) = [word for word in STYLE.words if word.avoid.search("races")]
    assert list(word.found_in("a race condition")) == []
    assert len(list(word.found_in("the race is over"))) == 1


def test_every_exempt_and_unclean_pattern_matches_a_file() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    for pattern in [*STYLE.exempt, *STYLE.unclean]:
        assert any(Path(name).match(pattern) or name.startswith(pattern.removesuffix("*")) for name in listed), pattern


def test_clean_files_have_none() -> None:
    """The pages; `make lint` looks at all files before any test."""
    finished = subprocess.run([sys.executable, "-m", "docs.words", "docs"], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout


def test_hits_are_listed_with_their_place_and_what_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("Good.\n\nIt waited in\nvain.\n")
    assert [str(hit) for hit in words.hits("page.md", STYLE.words)] == [
        "page.md:3: 'in vain', instead: without success, unbilled"
    ]
