"""Cut streams that are resumed on another deployment: what the client gets, and what is billed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.providers.base import Fault, ProviderFailure, Sink, UpstreamResponse
from gateway.providers.text_events import TextSink
from gateway.routing.partial_answer import UNREAD_MAX_BYTES, PartialAnswer, ResumedAnswer
from gateway.types import Call
from tests.gateway.calls import a_call, a_policy
from tests.gateway.calls import chat as chat_body
from tests.gateway.harness import DONE, Client, Rig, a_rig, chat, counted, cut, delta, in_time, policy_of, settle
from tests.gateway.routing import rig as rig_module

CONTINUED = {"classes": {"realtime": {"continue_cut_streams": True}}}
ROLE = {"role": "assistant", "content": ""}


def event(name: str, delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    whole = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": ord(name), "model": f"by-{name}"}
    return b"data: " + json.dumps({**whole, "choices": choices, **more}).encode() + b"\n\n"


def words(name: str, *texts: str) -> list[bytes]:
    return [event(name, {"content": text}) for text in texts]


def cut_after(*texts: str) -> list[bytes | Exception | None]:
    return [event("a", ROLE), *words("a", *texts), cut()]


def finished_with(*texts: str, prompt: int = 12, **more: Any) -> list[bytes | Exception | None]:
    usage = {**counted(prompt, len(texts)), **more}
    return [event("b", ROLE), *words("b", *texts), event("b", {}, "stop"), event("b", None, usage=usage), DONE]


def events(client: Client) -> list[dict[str, Any]]:
    frames = [frame.removeprefix(b"data: ") for frame in client.content.split(b"\n\n") if frame]
    return [json.loads(frame) for frame in frames if frame != b"[DONE]"]


def text_of(client: Client) -> str:
    deltas = [choice["delta"] for event in events(client) for choice in event.get("choices", ())]
    return "".join(delta.get("content") or "" for delta in deltas)


async def ask(rig: Rig, body: bytes, path: str = "chat/completions") -> Client:
    return await rig.ask(Client(body, path=f"/v1/{path}"))


def request_sent_to(rig: Rig, name: str) -> dict[str, Any]:
    (reply,) = rig.servers[name].replies
    return {field: json.loads(bytes(value)) for field, value in reply.call.fields.items()}


def attempts(rig: Rig) -> list[tuple[str, str, bool]]:
    (receipt,) = rig.receipts()
    return [(a["deployment"], a["outcome"], a.get("continues", False)) for a in receipt["attempts"]]


async def test_the_client_gets_one_answer(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = tuple(cut_after("one", " two"))
        rig.servers["b"].script = tuple(finished_with(" three", " four"))
        client = await ask(rig, chat(stream=True, max_tokens=10, stream_options={"include_usage": True}))
        seen = events(client)
        assert client.content.endswith(DONE) and client.content.count(DONE) == 1
        assert text_of(client) == "one two three four"
        assert {(e["id"], e["created"], e["model"]) for e in seen} == {("chatcmpl-a", ord("a"), "by-a")}
        assert [e["choices"][0]["delta"].get("role") for e in seen if e["choices"]].count("assistant") == 1
        assert [e["warmpath"] for e in seen if "warmpath" in e] == [{"continued_at": "b"}]
        assert seen[-1]["usage"] == {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}

        rest = request_sent_to(rig, "b")
        assert rest["messages"][-1] == {"role": "assistant", "content": "one two"}
        assert (rest["continue_final_message"], rest["add_generation_prompt"]) == (True, False)
        assert rest["max_tokens"] == 8
        (receipt,) = rig.receipts()
        assert (receipt["outcome"], receipt["deployment"]) == ("complete", "b")
        assert (receipt["input_uncached"], receipt["output"], receipt["exact"]) == (10, 4, False)
        assert attempts(rig) == [("a", "cut", False), ("b", "ok", True)]
        assert rig.components.router.cut_streams == {"continued": 1, "given_up": 0}


@pytest.mark.parametrize("count", [2**64 - 1, 2**80, -5, True, "many", 10**15])
async def test_absurd_usage_of_the_second_deployment_loses_no_text_and_is_not_billed(
    tmp_path: Path, count: Any
) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 0}}
    absurd = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = tuple(cut_after("one", " two"))
        *text, _, done = finished_with(" three", " four")
        rig.servers["b"].script = (*text, absurd, done)
        client = await ask(rig, chat(stream=True, stream_options={"include_usage": True}))
        assert text_of(client) == "one two three four" and client.content.endswith(DONE)
        (receipt,) = rig.receipts()
        assert receipt["outcome"] == "complete" and receipt["implausible"] and not receipt["exact"]
        assert 0 < receipt["input_uncached"] < 100
        assert 4 <= receipt["output"] <= 6


async def test_a_completion_is_resumed_with_a_longer_prompt(tmp_path: Path) -> None:
    def text(*texts: str, finish: str | None = None) -> list[bytes]:
        choices = [[{"index": 0, "text": text, "finish_reason": finish}] for text in texts]
        return [b"data: " + json.dumps({"id": "x", "choices": each}).encode() + b"\n\n" for each in choices]

    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = (*text("one", " two"), cut())
        rig.servers["b"].continues_final_message = False
        rig.servers["b"].script = (*text(" three"), *text("", finish="stop"), DONE)
        body = json.dumps({"model": "m", "prompt": "zero ", "stream": True}).encode()
        client = await ask(rig, body, "completions")
        assert "".join(choice["text"] for event in events(client) for choice in event["choices"]) == "one two three"
        rest = request_sent_to(rig, "b")
        assert (rest["prompt"], rest["max_tokens"]) == ("zero one two", 14)


async def test_usage_in_every_chunk_makes_the_sum_exact(tmp_path: Path) -> None:
    servers = [{**server, "continuous_usage": True} for server in policy_of()["deployments"]]
    async with a_rig(tmp_path, deployments=servers, **CONTINUED) as rig:
        details = {"prompt_tokens_details": {"cached_tokens": 4}}
        rig.servers["a"].script = (
            event("a", ROLE, usage=counted(10, 0)),
            event("a", {"content": "one"}, usage={**counted(10, 1), **details}),
            event("a", {"content": " two"}, usage={**counted(10, 2), **details}),
            cut(),
        )
        rig.servers["b"].script = (
            event("b", {"content": " three"}, usage=counted(12, 1)), event("b", {}, "stop", usage=counted(12, 1)),
            event("b", None, usage=counted(12, 1)), DONE,
        )  # fmt: skip
        client = await ask(rig, chat(stream=True))
        assert text_of(client) == "one two three" and not any("usage" in event for event in events(client))
        (receipt,) = rig.receipts()
        buckets = (receipt["input_uncached"], receipt["cache_read"], receipt["output"], receipt["exact"])
        assert buckets == (6, 4, 3, True)


async def test_whitespace_at_the_cut_is_sent_once(tmp_path: Path) -> None:
    """A template may strip it, and it usually belongs to the next token."""
    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = tuple(cut_after("one", " \n"))
        rig.servers["b"].script = tuple(finished_with(" ", "\n two"))
        assert text_of(await ask(rig, chat(stream=True))) == "one \n two"
        assert request_sent_to(rig, "b")["messages"][-1]["content"] == "one"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2}, {"logprobs": True}, {"tools": [{"type": "function"}]}, {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}}, {"presence_penalty": 1}, {"max_tokens": 2},
    ],
)  # fmt: skip
async def test_a_request_for_more_than_text_is_not_resumed(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = tuple(cut_after("one", " two"))
        client = await ask(rig, chat(stream=True, **fields))
        assert events(client)[-1]["error"]["code"] == "upstream_cut" and DONE not in client.content
        assert attempts(rig) == [("a", "cut", False)]


@pytest.mark.parametrize(
    "frame",
    [
        event("a", {"reasoning_content": "hm"}),
        event("a", {"reasoning": "hm"}),
        event("a", {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]}),
        event("a", {"refusal": "no"}),
        event("a", {"content": [{"type": "text", "text": "in parts"}]}),
        event("a", {}, "stop"),
    ],
)
async def test_an_answer_with_more_than_text_is_not_resumed(tmp_path: Path, frame: bytes) -> None:
    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = (*cut_after("one")[:-1], frame, cut())
        client = await ask(rig, chat(stream=True))
        assert events(client)[-1]["error"]["code"] == "upstream_cut"
        assert attempts(rig) == [("a", "cut", False)]


async def test_fields_with_their_default_values_do_not_prevent_resuming(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = tuple(cut_after("one"))
        rig.servers["b"].script = tuple(finished_with(" two"))
        usual = {"n": 1, "tools": [], "response_format": {"type": "text"}, "presence_penalty": 0.0, "logprobs": None}
        assert text_of(await ask(rig, chat(stream=True, **usual))) == "one two"


@pytest.mark.parametrize("allowed", [True, False])
async def test_the_models_setting_overrides_that_of_the_class(tmp_path: Path, allowed: bool) -> None:
    models = [{"name": "m", "deployments": ["a", "b"], "continue_cut_streams": allowed}]
    classes = {"realtime": {"continue_cut_streams": not allowed}}
    async with a_rig(tmp_path, models=models, classes=classes) as rig:
        rig.servers["a"].script = tuple(cut_after("one"))
        rig.servers["b"].script = tuple(finished_with(" two"))
        client = await ask(rig, chat(stream=True))
        assert text_of(client) == ("one two" if allowed else "one")
        assert client.content.endswith(DONE) is allowed


async def test_a_stream_is_not_resumed_on_a_deployment_that_cannot_continue_messages(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **CONTINUED) as rig:
        for server in rig.servers.values():
            server.continues_final_message = False
        rig.servers["a"].script = tuple(cut_after("one"))
        client = await ask(rig, chat(stream=True))
        assert events(client)[-1]["error"]["code"] == "upstream_cut" and not rig.servers["b"].replies


async def test_a_fallback_resumes_if_no_deployment_of_the_model_can(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = tuple(cut_after("one"))
        rig.servers["b"].continues_final_message = False
        rig.servers["c"].script = tuple(finished_with(" two"))
        client = await ask(rig, chat(stream=True))
        assert text_of(client) == "one two" and client.content.endswith(DONE) and not rig.servers["b"].replies
        (receipt,) = rig.receipts()
        assert (receipt["outcome"], receipt["deployment"], receipt["model_served"]) == ("complete", "c", "served-by-c")


async def test_a_deployment_that_rejects_the_continuation_is_passed_over(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = tuple(cut_after("one"))
        rig.servers["b"].script = (ProviderFailure(Fault.REFUSED, "no prefill", status=400, body=b"{}"),)
        rig.servers["c"].script = tuple(finished_with(" two"))
        client = await ask(rig, chat(stream=True))
        assert text_of(client) == "one two" and client.content.endswith(DONE)
        assert attempts(rig) == [("a", "cut", False), ("b", "refused", False), ("c", "ok", True)]


async def test_a_stalled_deployment_does_not_resume_its_own_stream(tmp_path: Path) -> None:
    models = [{"name": "m", "deployments": ["a"], "continue_cut_streams": True}]
    async with a_rig(tmp_path, models=models, classes={"realtime": {"inter_token": "50ms"}}) as rig:
        rig.servers["a"].script = (event("a", ROLE), *words("a", "one"))
        client = await ask(rig, chat(stream=True))
        assert events(client)[-1]["error"]["code"] == "upstream_cut" and len(rig.servers["a"].replies) == 1


async def test_comments_are_no_progress(tmp_path: Path) -> None:
    async with a_rig(tmp_path, classes={"realtime": {"inter_token": "100ms"}}) as rig:
        rig.servers["b"].script = tuple(finished_with(" two"))
        serving = rig.begin(client := Client(chat(stream=True)))
        reply = await rig.reply()
        reply.say(event("a", ROLE), *words("a", "one"))
        while not serving.done():
            reply.say(b": ping\n\n")
            await asyncio.sleep(0.01)
        await in_time(serving)
        assert b'" two"' in client.content and [attempt[1] for attempt in attempts(rig)] == ["timeout", "ok"]


async def test_if_no_deployment_can_resume_the_client_gets_the_error(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = tuple(cut_after("one", " two"))
        rig.servers["a"].record = json.dumps({"usage": counted(10, 2)}).encode()
        rig.servers["b"].script = rig.servers["c"].script = (cut(),)
        client = await ask(rig, chat(stream=True))
        assert text_of(client) == "one two" and events(client)[-1]["error"]["code"] == "upstream_cut"
        (receipt,) = rig.receipts()
        assert attempts(rig)[0] == ("a", "cut", False) and {a[1] for a in attempts(rig)} == {"cut"}
        assert (receipt["outcome"], receipt["deployment"]) == ("upstream_cut", "a")
        assert (receipt["input_uncached"], receipt["output"], receipt["exact"]) == (10, 2, True)
        assert rig.components.router.cut_streams == {"continued": 0, "given_up": 1}


async def test_a_stream_is_resumed_once(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = tuple(cut_after("one"))
        rig.servers["b"].script = (*words("b", " two"), cut())
        client = await ask(rig, chat(stream=True))
        assert text_of(client) == "one two" and events(client)[-1]["error"]["code"] == "upstream_cut"
        assert attempts(rig) == [("a", "cut", False), ("b", "cut", True)]
        assert rig.receipts()[0]["outcome"] == "upstream_cut"


async def test_a_resumed_stream_with_more_than_text_is_cut(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = tuple(cut_after("one"))
        rig.servers["b"].script = (*words("b", " two"), event("b", {"reasoning_content": "hm"}), *words("b", " three"))
        client = await ask(rig, chat(stream=True))
        assert text_of(client) == "one two" and events(client)[-1]["error"]["code"] == "upstream_cut"


async def test_a_chunk_with_a_null_error_belongs_to_the_answer(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = tuple(cut_after("one"))
        rest = [event("b", {"content": " two"}, error=None), event("b", {}, "stop", error=None)]
        rig.servers["b"].script = (*rest, event("b", None, usage=counted(12, 1), error=None), DONE)
        client = await ask(rig, chat(stream=True))
        assert text_of(client) == "one two" and {told["id"] for told in events(client)} == {"chatcmpl-a"}


async def test_a_client_that_disconnects_after_a_resume_pays_for_both_parts(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = tuple(cut_after("one", " two"))
        rig.servers["b"].record = json.dumps({"usage": counted(12, 1)}).encode()
        client = Client(chat(stream=True))
        serving = rig.begin(client)
        for _ in range(100):
            await asyncio.sleep(0)
            if rig.servers["b"].replies:
                break
        rig.servers["b"].replies[0].say(*words("b", " three"))
        await settle()
        client.leave()
        await in_time(serving)
        (receipt,) = rig.receipts()
        assert receipt["outcome"] == "client_gone" and attempts(rig)[-1] == ("b", "client_gone", True)
        assert (receipt["input_uncached"], receipt["output"], receipt["exact"]) == (10, 3, False)


async def test_a_call_that_shares_the_answer_gets_the_resumed_one(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **CONTINUED) as rig:
        rig.servers["a"].script = tuple(cut_after("one"))
        rig.servers["b"].script = tuple(finished_with(" two"))
        body = chat(stream=True, temperature=0, stream_options={"include_usage": True})
        first, second = await ask(rig, body), await ask(rig, body)
        assert second.headers["x-warmpath-cache"] == "hit" and events(first) == events(second)
        assert {r["output"] for r in rig.receipts()} == {2}


async def test_a_long_stream_is_parsed_in_batches(tmp_path: Path) -> None:
    partial = PartialAnswer(1.0)
    frame = delta("word ")
    for _ in range(10_000):
        partial.add(frame)
    assert partial._unread_bytes <= UNREAD_MAX_BYTES + len(frame) and len(partial._unread) < 2000
    assert partial.text == "word " * 10_000 and partial.output_tokens == 50_000


pieces = st.lists(st.text(st.sampled_from('ab \né"\\東'), min_size=1, max_size=4), min_size=1, max_size=12)


@given(pieces, st.data())
def test_a_cut_at_any_position_loses_and_repeats_nothing(tokens: list[str], data: st.DataObject) -> None:
    """The second deployment splits the text into other tokens and chunks."""
    at = data.draw(st.integers(1, len(tokens)))
    partial = PartialAnswer(1.0)
    for token in tokens[:at]:
        partial.add(event("a", {"content": token}))
    text, whole = partial.text, "".join(tokens)
    known = text.rstrip() or text
    rest = ResumedAnswer(partial, overlap=text[len(known) :], usage_in_chunks=False)
    remaining, got = whole[len(known) :], text
    while remaining:
        size = data.draw(st.integers(1, 5))
        chunk = rest.rewrite(event("b", {"content": remaining[:size]}))
        for frame in filter(None, chunk.split(b"\n\n")):
            got += json.loads(frame[6:])["choices"][0]["delta"]["content"]
        remaining = remaining[size:]
    assert got == whole


class TextResponse(rig_module.ScriptedResponse):
    """A response that gives all chunks but the first to the text sink, if there is one."""

    async def stream_to(self, sink: Sink, text_sink: TextSink | None = None) -> bool:
        async for chunk in self:
            if not (sink(chunk) if text_sink is None else text_sink.take(chunk, 1)):
                return False
        return True


class TextScript(rig_module.Script):
    continues_final_message = True

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        self.call = call
        return TextResponse(self)


async def test_events_that_only_add_text_are_part_of_what_is_resumed() -> None:
    first = TextScript(*words("a", "one", " two"), cut())
    second = TextScript(*words("b", " three", " four"), DONE)
    rig = rig_module.Rig(a_policy(classes={"realtime": {"continue_cut_streams": True}}), a=first, b=second)
    call = a_call(chat_body(stream=True), rig.policy, now=asyncio.get_running_loop().time())
    chunks: list[bytes] = []
    texts: list[bytes] = []
    with await rig.queue.acquire_slot(call) as permit:
        async with rig.router.open(call, permit, rig.attempts) as upstream:
            chunks.append(await upstream.first())
            assert await upstream.stream_to(rig_module.sink_into(chunks), TextSink(rig_module.sink_into(texts)))
    assert chunks[0] == words("a", "one")[0] and texts == words("a", " two")
    assert json.loads(bytes(second.call.fields["messages"]))[-1]["content"] == "one two"
    assert b" three" in chunks[1] and b" four" in chunks[2] and b'"id":"chatcmpl-a"' in chunks[2]  # rewritten
