"""docs/reference/responses.md against the policy and the bounds in the code."""

from gateway.background.events import RECENT_BYTES_MAX
from gateway.background.lease import LEASE_SECONDS
from gateway.background.service import FOLLOWERS_MAX, RUNS_MAX
from gateway.endpoints.responses.body import ResponsesBody
from gateway.endpoints.responses.stored import HISTORY_BYTES_MAX, RESPONSES_MAX
from gateway.policy import Background, Deployment, Policy
from gateway.policy.located_yaml import load
from gateway.storage.base import DEFAULT_DOCUMENT_BYTES, DISK_DOCUMENT_BYTES
from tests.docs.markdown import ROOT, blocks, code_spans, section, table_rows
from tests.docs.test_limits import AROUND

PAGE = ROOT / "docs" / "reference" / "responses.md"
SELF_EVIDENT = {"model", "stream"}


def test_the_example_is_policy() -> None:
    native, example, background, tools = [load(block.text).data for block in blocks(PAGE) if block.language == "yaml"]
    (passing,) = native["deployments"]
    assert Deployment.model_validate(passing).native_apis == {"responses"}
    policy = Policy.model_validate(AROUND | example | tools)
    assert [policy.responses_of(tenant).keep for tenant in policy.tenants] == [30 * 86400.0, "off"]
    assert Policy.model_validate(AROUND | background).responses.background == Background()


def test_the_bounds_equal_those_in_the_code() -> None:
    text = " ".join(section(PAGE, "What is stored").split())
    assert f"{RESPONSES_MAX:,} responses and {HISTORY_BYTES_MAX // 2**20} MiB" in text
    assert f"{DEFAULT_DOCUMENT_BYTES // 2**20} MiB in memory" in text
    assert f"{DISK_DOCUMENT_BYTES // 2**30} GiB in a SQLite file" in text


def test_the_bounds_of_the_background_equal_those_in_the_code() -> None:
    text = " ".join(section(PAGE, "Responses in the background").split())
    assert f"at most {RUNS_MAX:,} responses in the background and sends at most {FOLLOWERS_MAX:,} streams" in text
    assert f"keeps {RECENT_BYTES_MAX // 1024} KiB" in text and f"within {LEASE_SECONDS:g} seconds" in text
    rows = table_rows(section(PAGE, "Responses in the background"))
    assert {code_spans(row[0])[0] for row in rows} == {*Background.model_fields}


def test_every_accepted_field_is_in_the_table() -> None:
    rows = table_rows(section(PAGE, "How requests are translated"))
    named = {span.partition(".")[0].partition(":")[0] for row in rows for span in code_spans(row[0])}
    assert {*ResponsesBody.__struct_encode_fields__} - SELF_EVIDENT <= named
