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
from gateway.diagnosis import read_summaries
from gateway.endpoints.replies import EXCEPTION_HANDLERS
from gateway.policy.file import PolicyHolder
from gateway.server.policy_checks import IN_SERVICE
from tests.gateway.cli.conftest import Warmpath, warmpath
from tests.gateway.cli.test_doctor import write_summaries
from tests.gateway.diagnosis.test_breaks import DiagnosisRig, chat
from tests.gateway.harness import policy_of

__all__ = ["warmpath"]

EXCEPTION = {"tenant": "t", "model": "m", "level": "full", "opt_in": ["volatile_to_end"]}


def application(folder: Path, **policy: Any) -> Starlette:
    """By the summaries in `folder/data`."""
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy_of(**policy)))
    policies = PolicyHolder(folder / "policy.yaml", checks=IN_SERVICE)
    endpoint = DiagnosisEndpoint(policies, folder / "data" / "diagnosis")
    return Starlette(routes=endpoint.routes(), exception_handlers=EXCEPTION_HANDLERS)


async def ask(app: Starlette, query: str = "") -> httpx2.Response:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://admin") as client:
        return await client.get(f"/admin/diagnosis{query}")


async def test_the_report_equals_that_of_the_command(warmpath: Warmpath, tmp_path: Path) -> None:
    write_summaries(tmp_path)
    told = (await ask(application(tmp_path, diagnosis={"sample": 0.1}))).json()
    assert told.pop("enabled") is True
    assert told == json.loads(warmpath("doctor", "--data", "data", "--policy", "policy.yaml", "--json").stdout)
    assert [finding["proposals"] for finding in told["findings"]] == [[0], [0]]
    (proposal,) = told["proposals"]
    assert proposal["exception"] == EXCEPTION
    assert proposal["line"].startswith("canonicalise: {exceptions: [{tenant: t, model: m, ")
    assert proposal["saved_tokens"] > 1000 and proposal["saved_share"] > 0.2


async def apply(app: Starlette, **body: Any) -> httpx2.Response:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://admin") as client:
        return await client.post("/admin/diagnosis/apply", json=body)


async def test_a_proposal_is_reviewed_written_and_in_force(tmp_path: Path) -> None:
    app, file = application(tmp_path), tmp_path / "policy.yaml"
    before = file.read_text()
    preview = (await apply(app, exceptions=[EXCEPTION])).json()
    assert (preview["applied"], preview["path"], file.read_text()) == (False, str(file), before)
    assert "+    - {tenant: t, model: m, level: full, opt_in: [volatile_to_end]}" in preview["diff"]
    assert [line for line in preview["diff"].splitlines()[2:] if line[0] not in "@+"] == [], "no other lines are shown"
    reply = await apply(app, exceptions=[EXCEPTION], file=preview["file"])
    assert (reply.status_code, reply.json()["applied"], reply.json()["diff"]) == (200, True, preview["diff"])
    assert yaml.safe_load(file.read_text()) == yaml.safe_load(before) | {"canonicalise": {"exceptions": [EXCEPTION]}}
    holder = app.routes[0].endpoint.__self__._policies  # type: ignore[attr-defined]
    assert holder.current.hash == reply.json()["policy"] != preview["file"]
    assert holder.current.canonicalise.form_for("t", "m").opt_in == ("volatile_to_end",)


async def test_a_file_that_has_changed_since_the_review_stays(tmp_path: Path) -> None:
    app, file = application(tmp_path), tmp_path / "policy.yaml"
    preview = (await apply(app, exceptions=[EXCEPTION])).json()
    mine = file.read_text() + "# mine\n"
    file.write_text(mine)
    for digest in (preview["file"], ""):
        reply = await apply(app, exceptions=[EXCEPTION], file=digest)
        assert (reply.status_code, file.read_text()) == (409, mine)
        assert "has changed since the change was reviewed" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "exceptions"),
        ({"exceptions": []}, "exceptions"),
        ({"exceptions": [EXCEPTION] * 21}, "exceptions"),
        ({"exceptions": [{**EXCEPTION, "opt_in": ["rot13"]}]}, "exceptions.0.opt_in.0"),
        ({"exceptions": [{**EXCEPTION, "level": "safe"}]}, "exceptions.0"),
        ({"exceptions": [{"level": "full"}]}, "exceptions.0.tenant"),
        ({"exceptions": [{**EXCEPTION, "model": []}]}, "exceptions.0.model"),
        ({"exceptions": [EXCEPTION], "path": "/etc/passwd"}, "path"),
    ],
)
async def test_a_malformed_request_names_the_field(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    reply = await apply(application(tmp_path), **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_a_change_that_would_make_the_policy_invalid_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, file = application(tmp_path), tmp_path / "policy.yaml"
    reply = await apply(app, exceptions=[{**EXCEPTION, "tenant": "missing"}])
    assert reply.status_code == 400
    assert "there is no tenant 'missing'" in reply.json()["error"]["message"]
    monkeypatch.setenv("KEY_OF_A", "x")
    deployments = [{**deployment, "api_key": {"env": "KEY_OF_A"}} for deployment in policy_of()["deployments"]]
    keyed = application(tmp_path, deployments=deployments)
    monkeypatch.delenv("KEY_OF_A")
    assert "KEY_OF_A is not set" in (await apply(keyed, exceptions=[EXCEPTION])).json()["error"]["message"]
    file.write_text("favourite: batch\n")
    assert "favourite" in (await apply(app, exceptions=[EXCEPTION])).json()["error"]["message"]


async def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = application(tmp_path)
    preview = (await apply(app, exceptions=[EXCEPTION])).json()

    def refuse(**_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("gateway.policy.edit.tempfile.mkstemp", refuse)
    reply = await apply(app, exceptions=[EXCEPTION], file=preview["file"])
    assert reply.status_code == 409
    assert "policy.yaml cannot be written: Permission denied" in reply.json()["error"]["message"]


async def test_only_recent_calls(tmp_path: Path) -> None:
    write_summaries(tmp_path)  # in November 2025
    assert (await ask(application(tmp_path), "?since=1h")).json()["calls"] == 0
    assert (await ask(application(tmp_path), "?since=90000d")).json()["calls"] == 5


@pytest.mark.parametrize(("policy", "enabled"), [({}, False), ({"diagnosis": {"sample": 0.5}}, True)])
async def test_without_summaries_the_report_is_empty(tmp_path: Path, policy: dict[str, Any], enabled: bool) -> None:
    reply = await ask(application(tmp_path, **policy), "?since=24h")
    nothing = {
        "calls": 0, "prompt_tokens": 0, "cached_tokens": 0, "replayed_calls": 0, "predicted_share": 0.0,
        "reported_share": 0.0, "findings": [], "proposals": [], "enabled": enabled,
    }  # fmt: skip
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
    original = read_summaries

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
