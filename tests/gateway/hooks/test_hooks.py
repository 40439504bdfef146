"""Hooks through the phases of real requests: what they see, what they change, and what their failures do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.core.errors import BadRequest
from gateway.hooks import Answer, Reject, Request
from gateway.hooks.runner import HookRunner, _sees_model
from gateway.policy.hooks import Hook
from gateway.server.policy_checks import importable_hooks
from gateway.types import Principal
from tests.gateway.calls import a_policy
from tests.gateway.harness import DONE, Client, Rig, a_rig, answer, chat, counted, delta, tenant, usage_frame
from tests.gateway.hooks.functions import GO_ON, SEEN

FUNCTIONS = "tests.gateway.hooks.functions"
SECRET = "write to ann@example.com today"
MASKED = "write to [email] today"


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    SEEN.clear()
    GO_ON.clear()
    yield
    GO_ON.set()


def hook(before: str | None = None, after: str | None = None, **fields: Any) -> dict[str, Any]:
    paths = {"before": before and f"{FUNCTIONS}:{before}", "after": after and f"{FUNCTIONS}:{after}"}
    return {"name": "h", **{name: path for name, path in paths.items() if path}, **fields}


@asynccontextmanager
async def hooked(folder: Path, *hooks: dict[str, Any], **policy: Any) -> AsyncIterator[Rig]:
    async with a_rig(folder, hooks=[*hooks], **policy) as rig:
        rig.script(answer())
        yield rig


def said(text: str = SECRET) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_a_request_is_changed_before_anything_is_computed_from_it(tmp_path: Path) -> None:
    async with hooked(tmp_path, hook("mask")) as rig:
        assert (await rig.ask(chat(messages=said()))).status == 200
        call = rig.last_call
        assert json.loads(bytes(call.fields["messages"])) == said(MASKED)
        (seen,) = SEEN
        assert isinstance(seen, Request)
        assert (seen.tenant, seen.key_id, seen.endpoint, seen.model) == ("t", "dev", "chat/completions", "m")
        assert seen.call_id == call.id and seen.body["messages"] == said()


async def test_hooks_run_in_their_order_and_see_each_other_s_changes(tmp_path: Path) -> None:
    async with hooked(tmp_path, hook("mask"), hook("watch", name="second")) as rig:
        await rig.ask(chat(messages=said()))
        assert [seen.body["messages"] for seen in SEEN if isinstance(seen, Request)] == [said(), said(MASKED)]


@pytest.mark.parametrize("path", ["messages", "responses"])
async def test_every_endpoint_s_requests_are_seen_in_the_client_s_form(tmp_path: Path, path: str) -> None:
    async with hooked(tmp_path, hook("mask")) as rig:
        body = (
            {"model": "m", "max_tokens": 9, "messages": said()}
            if path == "messages"
            else {"model": "m", "input": SECRET}
        )
        assert (await rig.ask(Client(json.dumps(body).encode(), path=f"/v1/{path}"))).status == 200
        assert json.loads(bytes(rig.last_call.fields["messages"])) == said(MASKED)


async def test_a_rejected_request_is_sent_to_no_deployment(tmp_path: Path) -> None:
    async with hooked(tmp_path, hook("reject", name="secrets")) as rig:
        client = await rig.ask(chat())
        assert (client.status, client.json["error"]["code"]) == (422, "rejected_by_hook")
        assert (client.json["error"]["message"], client.json["error"]["hook"]) == ("no secrets, please", "secrets")
        assert not any(server.replies for server in rig.servers.values()) and not rig.receipts()


@pytest.mark.parametrize(("on_error", "status"), [("refuse", 500), ("continue", 200)])
@pytest.mark.parametrize("function", ["spoil_and_fail", "return_nonsense", "return_an_object", "sleep", "block"])
async def test_a_failing_hook_fails_its_request_or_is_passed_over_as_the_policy_says(
    tmp_path: Path, function: str, on_error: str, status: int
) -> None:
    async with hooked(tmp_path, hook(function, on_error=on_error, timeout="40ms")) as rig:
        client = await rig.ask(chat(messages=said()))
        assert client.status == status
        if status == 500:
            assert client.json["error"]["code"] == "hook_failed" and "'h'" in client.json["error"]["message"]
        else:
            assert json.loads(bytes(rig.last_call.fields["messages"])) == said()


async def test_hooks_see_the_named_tenants_and_models_only(tmp_path: Path) -> None:
    hooks = [hook("reject", tenants="u"), hook("reject", name="i", models=["other"])]
    async with hooked(tmp_path, *hooks, tenants=[tenant(), {"name": "u"}]) as rig:
        assert (await rig.ask(chat())).status == 200
        assert (await rig.ask(chat(model="other"))).status == 422


async def test_a_hook_of_a_model_sees_requests_by_its_aliases(tmp_path: Path) -> None:
    models = [{"name": "m", "aliases": ["nick"], "deployments": ["a"]}]
    for named, asked in (("m", "nick"), ("nick", "m"), ("m", "m")):
        assert _sees_model(Hook(name="h", before="m:f", models=(named,)), a_policy(models=models), asked)
    async with hooked(tmp_path, hook("reject", models="m"), models=models) as rig:
        assert (await rig.ask(chat(model="nick"))).status == 422


async def test_an_answer_is_changed_and_billed_as_the_deployment_counted(tmp_path: Path) -> None:
    async with hooked(tmp_path, hook(after="mask_answer")) as rig:
        rig.script(answer(SECRET, usage=counted(10, 7)))
        client = await rig.ask(chat())
        assert client.json["choices"][0]["message"]["content"] == MASKED
        (seen,) = SEEN
        assert isinstance(seen, Answer)
        assert (seen.texts, seen.model, seen.deployment) == ((SECRET,), "m", rig.receipts()[0]["deployment"])
        assert (rig.receipts()[0]["output"], rig.receipts()[0]["exact"]) == (7, True)


@pytest.mark.parametrize("change", [True, False])
async def test_a_stream_is_held_back_until_it_was_checked(tmp_path: Path, change: bool) -> None:
    frames = [delta("write to ann@"), delta("example.com"), delta(" today"), usage_frame(10, 3), DONE]
    async with hooked(tmp_path, hook(after="mask_answer" if change else "leave_answer")) as rig:
        rig.script(*frames)
        client = await rig.ask(chat(stream=True, stream_options={"include_usage": True}))
        assert client.status == 200 and client.content.endswith(DONE)
        assert (client.content == b"".join(frames)) is not change
        events = [json.loads(line[6:]) for line in client.content.splitlines() if line.startswith(b"data: {")]
        texts = [choice["delta"]["content"] for event in events for choice in event["choices"]]
        assert "".join(texts) == (MASKED if change else SECRET) and events[-1]["usage"] == counted(10, 3)
        assert rig.receipts()[0]["output"] == 3


@pytest.mark.parametrize(
    "value", [b'"\\ud800"', b"[" * 2_000 + b"]" * 2_000, b'"\xff"'], ids=["surrogate", "deep", "bytes"]
)
async def test_a_body_that_hooks_cannot_read_is_rejected(value: bytes) -> None:
    policy = a_policy(hooks=[hook("mask")])
    principal = Principal(policy.tenants_by_name["t"], "k")
    body = b' {"model": "m", "messages": [], "metadata": {"a": %b}}' % value
    with pytest.raises(BadRequest, match="hooks can read"):
        await HookRunner().before(body, policy, "/v1/chat/completions", "c", principal)
    form = b"--x\r\ncontent-disposition: form-data; name=model\r\n\r\nm\r\n--x--"
    assert await HookRunner().before(form, policy, "/v1/audio/transcriptions", "c", principal) == form
    assert not SEEN


@pytest.mark.parametrize(("on_error", "status"), [("refuse", 500), ("continue", 200)])
async def test_an_answer_in_parts_is_a_failure(tmp_path: Path, on_error: str, status: int) -> None:
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": SECRET}]
    async with hooked(tmp_path, hook(after="mask_answer", on_error=on_error)) as rig:
        rig.script(json.dumps({"choices": [{"message": {"content": parts}}], "usage": counted()}).encode())
        assert (await rig.ask(chat())).status == status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["messages", "responses"])
async def test_answers_of_other_endpoints_are_changed_too(tmp_path: Path, path: str, stream: bool) -> None:
    async with hooked(tmp_path, hook(after="mask_answer")) as rig:
        frames = [delta("write to ann@"), delta("example.com"), usage_frame(10, 3), DONE]
        rig.script(*(frames if stream else [answer(SECRET)]))
        where = {"max_tokens": 9, "messages": said()} if path == "messages" else {"input": SECRET}
        client = await rig.ask(
            Client(json.dumps({"model": "m", "stream": stream, **where}).encode(), path=f"/v1/{path}")
        )
        assert client.status == 200
        assert b"write to [email]" in client.content and b"ann@" not in client.content


def test_answers_that_hooks_read_pass_in_no_other_api() -> None:
    deployments = [{"name": "a", "provider": "anthropic", "base_url": "http://a.invalid/v1", "model": "x"}]
    policy: dict[str, Any] = {"deployments": deployments, "models": [{"name": "m", "deployments": ["a"]}]}
    assert a_policy(**policy, hooks=[hook("mask")]).native_models["messages"] == {"m"}
    assert not a_policy(**policy, hooks=[hook(after="mask_answer")]).native_models["messages"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_rejected_answer_is_withheld_and_billed(tmp_path: Path, stream: bool) -> None:
    async with hooked(tmp_path, hook(after="reject_answer")) as rig:
        rig.script(*([delta(SECRET), usage_frame(10, 7), DONE] if stream else [answer(SECRET, usage=counted(10, 7))]))
        client = await rig.ask(chat(stream=stream))
        assert (client.status, client.json["error"]["message"]) == (400, "the answer is withheld")
        assert b"ann@" not in client.content
        (receipt,) = rig.receipts()
        assert (receipt["outcome"], receipt["output"], receipt["exact"]) == ("complete", 7, True)


async def test_a_hook_that_forgets_a_text_fails(tmp_path: Path) -> None:
    async with hooked(tmp_path, hook(after="forget_a_text")) as rig:
        client = await rig.ask(chat())
        assert (client.status, client.json["error"]["message"]) == (500, "the hook 'h' must return 1 texts or None")


async def test_what_the_response_cache_replays_was_checked(tmp_path: Path) -> None:
    async with hooked(tmp_path, hook(after="mask_answer"), cache={"ttl": "1h"}) as rig:
        rig.script(answer(SECRET))
        for _ in range(2):
            client = await rig.ask(chat(temperature=0))
            assert client.json["choices"][0]["message"]["content"] == MASKED
        assert sum(len(server.replies) for server in rig.servers.values()) == 1


def test_functions_must_exist_and_be_callable() -> None:
    hooks = [
        {"name": "a", "before": "no.such.module:f"},
        {"name": "b", "before": f"{FUNCTIONS}:missing"},
        {"name": "c", "after": f"{FUNCTIONS}:SEEN"},
        hook("mask", name="d"),
    ]
    found = [*importable_hooks(a_policy(hooks=hooks))]
    assert [path for path, _ in found] == [("hooks", 0, "before"), ("hooks", 1, "before"), ("hooks", 2, "after")]
    assert all("cannot be imported" in message for _, message in found)


def test_wrong_hooks_are_refused() -> None:
    for wrong, problem in (
        ({"name": "a"}, "must have before or after"),
        ({"name": "a", "before": "os.system('x')"}, "before"),
        ({"name": "a", "before": "m:f", "tenants": ["stranger"]}, "there is no tenant 'stranger'"),
    ):
        with pytest.raises(ValueError, match=problem):
            a_policy(hooks=[wrong])
    with pytest.raises(ValueError, match="4xx"):
        Reject("no", status=500)
