import re
from collections.abc import Iterator

import pytest

from gateway.core import errors
from gateway.core.errors import GatewayError
from gateway.endpoints.messages import MessagesTranslator
from gateway.limits.headers import ratelimit_headers
from gateway.storage.base import RateCharge
from tests.docs.markdown import ROOT, code_spans, section, table_rows

PAGE = ROOT / "docs" / "reference" / "errors.md"
# The beginning of a line that a client puts into prompts, and a header of requests to Gemini
NO_HEADERS = {"x-anthropic-", "x-goog-api-key"}
A_CHARGE = RateCharge("dev/requests", amount=1, limit=1, period_seconds=1.0)


def tree(root: type[GatewayError]) -> Iterator[type[GatewayError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


def documented() -> dict[str, list[str]]:
    text = PAGE.read_text(encoding="utf-8").split("\n## ")[0]
    return {row[0].strip("`"): row[1:5] for row in table_rows(text)}


def test_every_error_is_documented_in_the_order_of_the_tree() -> None:
    assert list(documented()) == [error.__name__ for error in tree(GatewayError)]


@pytest.mark.parametrize("error", list(tree(GatewayError)), ids=lambda error: error.__name__)
def test_an_error_is_as_documented(error: type[GatewayError]) -> None:
    status, kind, code, retry = documented()[error.__name__]
    assert status == ("the deployment's" if error is errors.UpstreamRefused else str(error.status))
    assert kind == f"`{error.type}`"
    assert code == (f"`{error.code}`" if error.code else "none")
    assert retry == ("yes" if error.retryable else "no")


def test_every_header_that_is_sent_or_read_is_documented() -> None:
    limits = ratelimit_headers("requests", A_CHARGE, 1) | ratelimit_headers("tokens", A_CHARGE, 1)
    sent = limits.keys() | errors.retry_after(1.0).keys()
    sent |= MessagesTranslator("req_1").headers(limits).keys()
    for file in (ROOT / "gateway").rglob("*.py"):
        sent |= set(re.findall(r'"(x-[a-z-]+)"', file.read_text(encoding="utf-8"))) - NO_HEADERS
    tables = [table_rows(section(PAGE, title)) for title in ("Headers of a reply", "Headers of a request")]
    assert {name for rows in tables for row in rows for name in code_spans(row[0])} == sent
