"""Lines of Markdown have at most 120 characters, as lines of code have, so that they can be read and compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown import DOCUMENTS, ROOT

CHARACTERS_MAX = 120
NOT_EDITED = "Do not edit this page. -->"  # generated pages say so in their first line
WRITTEN = [page for page in DOCUMENTS if NOT_EDITED not in page.read_text(encoding="utf-8").partition("\n")[0]]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_not_too_long(page: Path) -> None:
    """Rows of tables, code and lines without a space to break at may be longer."""
    too_long, in_code = list[str](), False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        in_code ^= line.lstrip().startswith("```")
        can_break = " " in line.strip() and not line.lstrip().startswith("|")
        if len(line) > CHARACTERS_MAX and can_break and not in_code:
            too_long.append(f"{number}: {line}")
    assert not too_long
