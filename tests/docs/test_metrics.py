import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.docs.conftest import KEY, Stack
from tests.docs.markdown import ROOT, code_spans, section, table_rows
from tests.e2e.processes import chat

PAGE = ROOT / "docs" / "reference" / "metrics.md"
OF_THE_PROCESS = ("process_", "python_")


def documented(title: str) -> dict[str, set[str]]:
    """Labels by name."""
    rows = table_rows(section(PAGE, title))
    return {code_spans(name)[0].removesuffix("_total"): set(code_spans(labels)) for name, _, labels, _ in rows}


def served(url: str) -> dict[str, set[str]]:
    """The metrics that have a value: labels by name."""
    families = text_string_to_metric_families(httpx2.get(f"{url}/metrics").text)
    return {
        family.name.removesuffix("_total"): {label for sample in family.samples for label in sample.labels} - {"le"}
        for family in families
        if family.samples and not family.name.startswith(OF_THE_PROCESS) and not family.name.endswith("_created")
    }


@pytest.mark.slow
@pytest.mark.e2e
def test_what_is_served_is_documented_with_its_labels(stack: Stack) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    httpx2.post(f"{stack.url}/v1/chat/completions", json=chat("Hi", max_tokens=2), headers=headers).raise_for_status()
    for title, url in (("Gateway", stack.url), ("Engine", stack.engine_url)):
        pages, seen = documented(title), served(url)
        assert seen == {name: pages.get(name) for name in seen}
        assert len(seen) > 15
