"""GET /admin/diagnosis: the report of `warmpath doctor` over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from starlette.applications import Starlette

from gateway.admin import diagnosis
from gateway.admin.diagnosis import MAX_QUEUED, DiagnosisEndpoint
from gateway.endpoints.replies import EXCEPTION_HANDLERS
from gateway.policy.file import PolicyHolder
from tests.gateway.cli.conftest import Warmpath, warmpath
from tests.gateway.cli.test_doctor import write_summaries
from tests.gateway.diagnosis.test_breaks import DiagnosisRig, chat
from tests.gateway.harness import policy_of

__all__ = ["warmpath"]


def application(folder: Path, **policy: Any) -> Starlette:
    """By the summaries in `folder/data`."""
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy_of(**policy)))
    route = DiagnosisEndpoint(PolicyHolder(folder / "policy.yaml"), folder / "data" / "diagnosis").route()
    return Starlette(routes=[route], exception_handlers=EXCEPTION_HANDLERS)


async def ask(app: Starlette, query: str = "") -> httpx2.Response:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://admin") as client:
        return await client.get(f"/admin/diagnosis{query}")


async def test_the_report_equals_that_of_the_command(warmpath: Warmpath, tmp_path: Path) -> None:
    write_summaries(tmp_path)
    told = (await ask(application(tmp_path, diagnosis={"sample": 0.1}))).json()
    assert told.pop("enabled") is True
    assert told == json.loads(warmpath("doctor", "--data", "data", "--json").stdout)
    assert len(told["findings"]) == 2 and told["findings"][0]["fix"].startswith("canonicalise: ")


async def test_only_recent_calls(tmp_path: Path) -> None:
    write_summaries(tmp_path)  # in November 2025
    assert (await ask(application(tmp_path), "?since=1h")).json()["calls"] == 0
    assert (await ask(application(tmp_path), "?since=90000d")).json()["calls"] == 5


@pytest.mark.parametrize(("policy", "enabled"), [({}, False), ({"diagnosis": {"sample": 0.5}}, True)])
async def test_without_summaries_the_report_is_empty(tmp_path: Path, policy: dict[str, Any], enabled: bool) -> None:
    reply = await ask(application(tmp_path, **policy), "?since=24h")
    nothing = {"calls": 0, "prompt_tokens": 0, "cached_tokens": 0, "findings": [], "enabled": enabled}
    assert (reply.status_code, reply.json()) == (200, nothing)


@pytest.mark.parametrize("since", ["yesterday", "", "24", "-1h", "99999999999d"])
async def test_an_invalid_duration_is_rejected_by_name(tmp_path: Path, since: str) -> None:
    reply = await ask(application(tmp_path), f"?since={since}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "since")


async def test_one_report_at_a_time_is_made_in_a_thread_and_few_requests_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DiagnosisRig(tmp_path / "data" / "diagnosis").call(chat())
    app, read, may_go_on = application(tmp_path), [0], threading.Event()
    original = diagnosis.read_summaries

    def slow(folder: Path) -> Any:
        read[0] += 1
        assert may_go_on.wait(10)
        return original(folder)

    monkeypatch.setattr(diagnosis, "read_summaries", slow)
    asked = [asyncio.create_task(ask(app)) for _ in range(MAX_QUEUED)]
    while not read[0]:
        await asyncio.sleep(0)
    refused = await ask(app)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert read[0] == 1
    may_go_on.set()
    assert [reply.json()["calls"] for reply in await asyncio.gather(*asked)] == [1] * MAX_QUEUED
    assert (await ask(app)).status_code == 200
