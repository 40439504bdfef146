"""The page of providers and what the README says about it."""

from __future__ import annotations

import re

from gateway.providers import PROVIDERS
from tests.docs.markdown import ROOT, table_rows

PAGE = (ROOT / "docs" / "reference" / "providers.md").read_text()
ROWS = [row for row in table_rows(PAGE) if len(row) == 4 and row[2].startswith("`http")]


def test_the_number_of_documented_hosted_providers_is_true() -> None:
    hosted = {row[0].split()[0].strip(",") for row in ROWS if row[2].startswith("`https://")}
    (counted,) = re.findall(r"^\| Hosted providers \| (\d+) documented \|", (ROOT / "README.md").read_text(), re.M)
    assert len(hosted) == int(counted), sorted(hosted)


def test_every_provider_has_a_row() -> None:
    assert {row[1].strip("`") for row in ROWS} == PROVIDERS.keys()
