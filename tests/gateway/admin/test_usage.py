"""The organization's usage and costs, by OpenAI's own client, and against OpenAI's own description."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from starlette.applications import Starlette

from gateway.admin.usage import MAX_QUEUED, usage_routes
from gateway.endpoints.replies import EXCEPTION_HANDLERS
from tests.gateway.auth.registries import a_registry
from tests.gateway.billing.ledger.receipts import a_correction, a_receipt, write_chain
from tests.openai_spec import Validate, validate

__all__ = ["validate"]


def seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


DAY = seconds("2026-11-20")


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    first = a_receipt(
        cache_write=5, finished="2026-11-20T09:59:59.999999Z", end_user="u", cost="1", audio_input=6, audio_output=1
    )
    rows = [
        first,
        a_receipt(latency_class="batch", finished="2026-11-20T10:00:00.000000Z", model_asked="other", cost="2"),
        a_receipt(operation="embeddings", finished="2026-11-20T10:00:00.000000Z", cost="4"),
        a_receipt(source="cache", finished="2026-11-20T11:00:00.000000Z", cost="0"),
        a_receipt(tenant="b", key_id="key_2", finished="2026-11-22T00:00:00.000000Z", cost="8", service_tier="flex"),
        a_receipt(tenant="b", finished="2026-11-22T00:00:00.000000Z", cost="16", currency="EUR"),
        a_correction(first, cost="0.5"),
    ]
    write_chain(tmp_path / "replica", rows)
    return tmp_path


@pytest.fixture
async def http(ledger: Path) -> AsyncIterator[httpx2.AsyncClient]:
    app = Starlette(routes=usage_routes(ledger, a_registry()), exception_handlers=EXCEPTION_HANDLERS)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://admin/v1") as client:
        yield client


@pytest.fixture
def usage(http: httpx2.AsyncClient) -> Any:
    client = openai.AsyncOpenAI(base_url="http://admin/v1", admin_api_key="k", http_client=http, max_retries=0)
    return client.admin.organization.usage


async def test_usage_by_hour(usage: Any) -> None:
    page = await usage.completions(
        start_time=DAY + 9 * 3600 + 5, end_time=DAY + 12 * 3600, bucket_width="1h", group_by=["model", "batch"]
    )
    assert [(bucket.start_time - DAY, bucket.end_time - DAY) for bucket in page.data] == [
        (hour * 3600, (hour + 1) * 3600) for hour in (9, 10, 11)
    ]
    (first,), (batch,), (cached,) = (bucket.results for bucket in page.data)
    assert (first.model, first.batch, first.project_id) == ("gpt-4o", False, None)
    assert (first.input_tokens, first.input_cached_tokens, first.input_uncached_tokens) == (105, 64, 36)
    assert (first.input_text_tokens, first.input_audio_tokens) == (30, 6)
    assert (first.output_tokens, first.output_text_tokens, first.output_audio_tokens) == (3, 2, 1)
    assert first.num_model_requests == 1
    assert (batch.model, batch.batch, batch.num_model_requests) == ("other", True, 1)
    assert (cached.input_tokens, cached.num_model_requests) == (0, 0)  # answered from the cache
    assert not page.has_more and page.next_page is None


@pytest.mark.parametrize(
    ("only", "requests"),
    [
        ({}, 4),
        ({"project_ids": ["b"]}, 2),
        ({"api_key_ids": ["key_2"]}, 1),
        ({"models": ["other"]}, 1),
        ({"user_ids": ["u", "nobody"]}, 1),
        ({"batch": True}, 1),
        ({"batch": False}, 3),
    ],
)
async def test_usage_with_filters(usage: Any, only: dict[str, Any], requests: int) -> None:
    page = await usage.completions(start_time=DAY, end_time=DAY + 7 * 86_400, **only)
    assert sum(result.num_model_requests for bucket in page.data for result in bucket.results) == requests


async def test_costs_include_corrections_and_are_by_currency(usage: Any) -> None:
    page = await usage.costs(start_time=DAY, end_time=DAY + 3 * 86_400, group_by=["project_id"])
    amounts = [
        (bucket.start_time - DAY, result.project_id, result.amount.value, result.amount.currency)
        for bucket in page.data
        for result in bucket.results
    ]
    assert amounts == [(0, "acme", 7.5, "usd"), (2 * 86_400, "b", 16.0, "eur"), (2 * 86_400, "b", 8.0, "usd")]


async def test_pages(usage: Any) -> None:
    pages = [await usage.completions(start_time=DAY, end_time=DAY + 5 * 86_400, limit=2)]
    while pages[-1].has_more:
        pages.append(
            await usage.completions(start_time=DAY, end_time=DAY + 5 * 86_400, limit=2, page=pages[-1].next_page)
        )
    starts = [bucket.start_time - DAY for page in pages for bucket in page.data]
    assert starts == [day * 86_400 for day in range(5)] and len(pages) == 3


async def test_usage_of_embeddings(usage: Any, http: httpx2.AsyncClient, validate: Validate) -> None:
    page = await usage.embeddings(start_time=DAY, end_time=DAY + 86_400, group_by=["project_id", "model"])
    ((found,),) = (bucket.results for bucket in page.data)
    assert (found.project_id, found.model, found.input_tokens, found.num_model_requests) == ("acme", "gpt-4o", 100, 1)
    validate("UsageResponse", (await http.get(f"organization/usage/embeddings?start_time={DAY}")).json())


async def test_usage_of_moderations_images_and_transcriptions(
    ledger: Path, usage: Any, http: httpx2.AsyncClient, validate: Validate
) -> None:
    when = {"started": "2026-11-20T10:00:00.000000Z", "finished": "2026-11-20T10:00:00.000000Z"}
    nothing = {"input_uncached": 0, "cache_read": 0, "output": 0, **when}
    rows = [
        a_receipt(operation="moderations", **when),
        a_receipt(operation="images/generations", units={"image": "2"}, **nothing),
        a_receipt(operation="images/edits", units={"image": "1"}, tenant="b", **nothing),
        a_receipt(operation="images/edits", units={"image": "1"}, source="cache", **nothing),
        a_receipt(operation="audio/transcriptions", units={"second": "2.5"}, **nothing),
        a_receipt(operation="audio/transcriptions", units={"second": "1"}, **nothing),
    ]
    write_chain(ledger / "media", rows)
    day: dict[str, Any] = {"start_time": DAY, "end_time": DAY + 86_400}
    ((moderations,),) = (bucket.results for bucket in (await usage.moderations(**day)).data)
    assert (moderations.input_tokens, moderations.num_model_requests) == (100, 1)
    (images,) = (bucket.results for bucket in (await usage.images(**day, group_by=["project_id"])).data)
    found = [(each.project_id, each.images, each.num_model_requests) for each in images]
    assert found == [("acme", 2, 1), ("b", 1, 1)]
    ((spoken,),) = (bucket.results for bucket in (await usage.audio_transcriptions(**day)).data)
    assert (spoken.seconds, spoken.num_model_requests) == (4, 2), "rounded up"
    for kind in ("moderations", "images", "audio_transcriptions"):
        validate("UsageResponse", (await http.get(f"organization/usage/{kind}?start_time={DAY}")).json())


async def test_replies_match_openai_s_schema(http: httpx2.AsyncClient, validate: Validate) -> None:
    for path, groups in (
        ("usage/completions", ["project_id", "user_id", "api_key_id", "model", "batch", "service_tier"]),
        ("costs", ["project_id", "line_item", "api_key_id"]),
    ):
        query: dict[str, Any] = {"start_time": DAY, "end_time": DAY + 3 * 86_400, "group_by": groups, "limit": 3}
        reply = await http.get(f"organization/{path}", params=query)
        assert reply.status_code == 200
        validate("UsageResponse", reply.json())
        assert sum(len(bucket["results"]) for bucket in reply.json()["data"]) >= 3


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({}, "start_time"),
        ({"start_time": "soon"}, "start_time"),
        ({"start_time": 1, "bucket_width": "1w"}, "bucket_width"),
        ({"start_time": 1, "limit": 32}, "limit"),
        ({"start_time": 1, "limit": 0}, "limit"),
        ({"start_time": 1, "group_by": "colour"}, "group_by"),
        ({"start_time": 1, "page": "2"}, "page"),
    ],
)
async def test_an_invalid_query_is_rejected_by_parameter(
    http: httpx2.AsyncClient, query: dict[str, Any], param: str
) -> None:
    reply = await http.get("organization/usage/completions", params=query)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


async def test_an_unreadable_row_is_set_aside_and_logged_once(
    http: httpx2.AsyncClient, ledger: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = (await http.get("organization/costs", params={"start_time": DAY})).json()
    with (ledger / "replica" / "0000000001.jsonl").open("ab") as segment:
        segment.write(b"{\n")
    for _ in range(3):
        assert (await http.get("organization/costs", params={"start_time": DAY})).json() == before
    assert caplog.text.count("unreadable ledger row set aside") == 1


async def test_details_of_an_unreadable_ledger_are_not_sent_to_the_client(
    http: httpx2.AsyncClient, ledger: Path
) -> None:
    (ledger / "replica" / "0000000001.jsonl").unlink()
    (ledger / "replica" / "0000000001.parquet").write_bytes(b"PAR1")
    (ledger / "replica" / "0000000001.manifest").write_bytes(b"{}")
    reply = await http.get("organization/costs", params={"start_time": DAY})
    assert reply.status_code == 500 and str(ledger) not in reply.text


async def test_a_request_is_rejected_with_retry_after_while_many_wait(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.admin.usage.MAX_QUEUED", -1)
    app = Starlette(routes=usage_routes(ledger, a_registry()), exception_handlers=EXCEPTION_HANDLERS)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://admin/v1") as client:
        reply = await client.get("organization/costs", params={"start_time": DAY})
    assert reply.status_code == 503 and "retry-after" in reply.headers and MAX_QUEUED > 0
