import re

import pytest

from tests.docs.markdown import ROOT, blocks, code_spans, section, table_rows

PAGE = ROOT / "CONTRIBUTING.md"
TABLES = [cell for row in table_rows(section(PAGE, "How to add")) for cell in row[2].split(",")]


def test_the_commands_are_targets_of_make() -> None:
    (commands,) = blocks(PAGE)
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"^make (\S+)", commands.text, re.MULTILINE)
    named += [span.removeprefix("make ") for span in code_spans(PAGE.read_text()) if span.startswith("make ")]
    assert set(named) <= set(targets)


@pytest.mark.parametrize("cell", [cell for cell in TABLES if " in `" in cell])
def test_a_table_to_register_in_is_in_the_file_that_the_page_names(cell: str) -> None:
    (what, where) = code_spans(cell)[-2:] if len(code_spans(cell)) > 1 else ("", code_spans(cell)[0])
    assert re.search(rf"^(class )?{what}\b", (ROOT / where).read_text(), re.MULTILINE)


def test_every_question_names_files_that_exist() -> None:
    rows = table_rows(section(PAGE, "Where things are"))
    assert len(rows) >= 20
    for question, answer in rows:
        named = [span for span in code_spans(answer) if "/" in span]
        assert question.endswith("?") and named, question
        assert [span for span in named if not (ROOT / span).exists()] == [], question
