import re
from pathlib import Path

import pytest

from tests.docs.markdown import DOCUMENTS, ROOT, code_spans, links


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_are_named_exist(page: Path) -> None:
    for name in code_spans(page.read_text(encoding="utf-8")):
        if re.fullmatch(r"(gateway|backend|tests|docs|policies|benchmarks|scripts|deploy)/[\w./-]*", name):
            assert (ROOT / name).exists(), name


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert not {page for page in pages if f"({page})" not in index}
