"""Stored responses with the unmodified `openai` client: continued, read and deleted.

On one gateway, on two that share a Redis, and on one that is killed in between.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.e2e.processes import (
    DEMO,
    Gateway,
    Running,
    Wire,
    gateway,
    key,
    simple_policy,
    tenant,
    until,
)
from tests.e2e.test_responses import QUESTION, TOOL
from tests.gateway.endpoints.responses.translated import check_events, check_response, events_of
from tests.openai_spec import Validate
from tests.redis_server import RedisServer, own_redis_server

__all__ = ["own_redis_server"]
pytestmark = pytest.mark.e2e


def storing_policy(url: str, **fields: Any) -> dict[str, Any]:
    return simple_policy(
        url,
        responses={"keep": "30d"},
        tenants=[tenant("dev"), tenant("other"), tenant("not_stored", responses={"keep": "off"})],
        **fields,
    )


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, local_engine: Running) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("stored"), storing_policy(local_engine.url)) as started:
        yield started


def respond(client: openai.OpenAI, *, stream: bool = False, **fields: Any) -> Any:
    options: Any = {"model": DEMO, "max_output_tokens": 16, "temperature": 0, **fields}
    reply: Any = client.responses.create(**options, stream=stream)
    return [*reply][-1].response if stream else reply


def check_missing(client: openai.OpenAI, name: str) -> None:
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(name)
        assert caught.value.code == "not_found"
    with pytest.raises(openai.BadRequestError) as rejection:
        respond(client, input="x", previous_response_id=name)
    assert (rejection.value.code, rejection.value.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_continuing_by_id_equals_sending_the_conversation_and_hits_the_cache(front: Gateway, stream: bool) -> None:
    opening = f"{secrets.token_hex(16)} " * 10
    with front.client() as client:
        first = respond(client, input=opening, instructions="Be brief.", stream=stream)
        second = respond(client, input="Why?", instructions="Be brief.", previous_response_id=first.id, stream=stream)
        third = respond(client, input="And?", instructions="Be brief.", previous_response_id=second.id, stream=stream)
        assert [response.store for response in (first, second, third)] == [True] * 3
        assert second.usage.input_tokens_details.cached_tokens > 0.8 * first.usage.input_tokens
        assert third.usage.input_tokens_details.cached_tokens > 0.8 * second.usage.input_tokens
        by_hand: list[Any] = [{"role": "user", "content": opening}, *first.output]
        by_hand += [{"role": "user", "content": "Why?"}, *second.output, {"role": "user", "content": "And?"}]
        again = respond(client, input=by_hand, instructions="Be brief.", store=False, stream=stream)
        assert (again.output_text, again.usage.input_tokens) == (third.output_text, third.usage.input_tokens)
        assert not again.store and again.previous_response_id is None


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_loop(front: Gateway, stream: bool) -> None:
    options: Any = {"tools": [TOOL], "stream": stream, "max_output_tokens": 60}
    with front.client() as client:
        called = respond(client, input="Where is it?", tool_choice="required", **options)
        (*_, call) = called.output
        assert call.type == "function_call"
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "a box"}
        answer = respond(client, input=[output], tool_choice="none", previous_response_id=called.id, **options)
        assert answer.output_text
        by_hand: list[Any] = [{"role": "user", "content": "Where is it?"}, *called.output, output]
        again = respond(client, input=by_hand, tool_choice="none", **options)
        assert (again.output_text, again.usage.input_tokens) == (answer.output_text, answer.usage.input_tokens)
        (item,) = client.responses.input_items.list(answer.id)
        assert item.type == "function_call_output" and item.output == "a box"


def test_item_references(front: Gateway) -> None:
    """Some clients send a conversation as references if they assume that it is stored."""
    with front.client() as client:
        first = respond(client, input=QUESTION)
        question, more = {"role": "user", "content": QUESTION}, {"role": "user", "content": "Why?"}
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        by_reference = respond(client, input=[question, *references, more])
        by_hand = respond(client, input=[question, *first.output, more])
        assert (by_reference.output_text, by_reference.usage.input_tokens) == (
            by_hand.output_text,
            by_hand.usage.input_tokens,
        )
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            respond(client, input=references)


def test_a_response_is_retrieved_continued_and_deleted(front: Gateway, validate: Validate) -> None:
    with front.client() as client:
        made = respond(client, input=QUESTION, metadata={"job": "x"}, tools=[TOOL], tool_choice="none")
        shown = client.responses.retrieve(made.id)
        assert shown.to_dict() == made.to_dict()
        check_response(validate, shown.to_dict())
        branches = [respond(client, input=text, previous_response_id=made.id) for text in ("Why?", "How?")]
        client.responses.delete(made.id)
        check_missing(client, made.id)
        for branch in branches:
            assert client.responses.retrieve(branch.id).previous_response_id == made.id
            with pytest.raises(openai.BadRequestError) as caught:
                respond(client, input="x", previous_response_id=branch.id)
            assert caught.value.code == "previous_response_not_found" and made.id in caught.value.message
        deleted = httpx2.delete(
            f"{front.url}/v1/responses/{branches[0].id}", headers={"authorization": f"Bearer {key('dev')}"}
        )
        assert deleted.json() == {"id": branches[0].id, "object": "response", "deleted": True}


def test_input_items_are_listed_in_pages(front: Gateway) -> None:
    sent: list[Any] = [{"role": "user", "content": f"{number}"} for number in range(25)]
    with front.client() as client:
        made = respond(client, input=sent)
        for order in ("asc", "desc"):
            for limit in (3, 20, 100):
                items: Any = client.responses.input_items.list(made.id, order=order, limit=limit)
                texts = [item.content[0].text for item in items]  # the client iterates over all pages
                assert texts == [item["content"] for item in (sent if order == "asc" else sent[::-1])]
        page: Any = client.responses.input_items.list(made.id, order="asc", limit=2)
        after: Any = client.responses.input_items.list(made.id, order="asc", limit=2, after=page.data[-1].id)
        assert [item.content[0].text for item in after.data] == ["2", "3"] and after.has_more


def test_events_match_openais_specification(front: Gateway, validate: Validate) -> None:
    with front.client() as client:
        first = respond(client, input=QUESTION)
    body = {"model": DEMO, "input": "Why?", "max_output_tokens": 6, "previous_response_id": first.id, "stream": True}
    events = events_of(front.post("responses", body).content)
    check_events(validate, events)
    assert {event["response"]["store"] for event in events if "response" in event} == {True}
    assert {event["response"]["previous_response_id"] for event in events if "response" in event} == {first.id}


def test_input_tokens_of_a_continued_response_are_counted(front: Gateway) -> None:
    with front.client() as client:
        first = respond(client, input=QUESTION)
        counted = client.responses.input_tokens.count(model=DEMO, input="Why?", previous_response_id=first.id)
        second = respond(client, input="Why?", previous_response_id=first.id)
    assert second.usage is not None and counted.input_tokens == second.usage.input_tokens


def test_responses_are_visible_to_their_tenant_only(front: Gateway) -> None:
    with front.client() as mine, front.client("other") as theirs, front.client("not_stored") as not_stored:
        made = respond(mine, input=QUESTION)
        check_missing(theirs, made.id)
        with pytest.raises(openai.NotFoundError):
            not_stored.responses.retrieve(made.id)
        assert not respond(not_stored, input=QUESTION).store
        with pytest.raises(openai.BadRequestError) as caught:
            respond(not_stored, input="x", previous_response_id=made.id)
        assert "`responses: {keep: 30d}`" in caught.value.message
        assert mine.responses.retrieve(made.id).id == made.id


def test_nothing_is_stored_if_the_client_disconnects(front: Gateway) -> None:
    stored = front.metric("warmpath_responses_kept_total", outcome="kept")
    body = {"model": DEMO, "input": "Count.", "stream": True, "max_output_tokens": 1800}
    body["text"] = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "array", "minItems": 800}}}
    with Wire(front, "responses", body) as wire:
        wire.read_until(b"event: response.output_text.delta", times=3)
        call_id = wire.header("x-request-id")
    assert front.receipt(call_id)["outcome"] == "client_gone"
    with front.client() as client:
        check_missing(client, call_id.replace("req_", "resp_"))
    assert front.metric("warmpath_responses_kept_total", outcome="kept") == stored


@pytest.mark.slow
def test_two_gateways_share_responses_in_redis(
    tmp_path: Path, local_engine: Running, own_redis_server: RedisServer
) -> None:
    policy, storage = storing_policy(local_engine.url), own_redis_server.url
    with (
        gateway(tmp_path / "a", policy, storage=storage, replica="a") as a,
        gateway(tmp_path / "b", policy, storage=storage, replica="b") as b,
        a.client() as at_a,
        b.client() as at_b,
    ):
        name, fronts = None, (at_a, at_b)
        for turn in range(6):
            response = respond(fronts[turn % 2], input=f"{turn}?", previous_response_id=name, stream=turn > 2)
            assert fronts[(turn + 1) % 2].responses.retrieve(response.id).to_dict() == response.to_dict()
            name = response.id
        for each in fronts:
            (item,) = each.responses.input_items.list(response.id)
            assert item.type == "message"
        with b.client("other") as theirs:
            check_missing(theirs, response.id)
        at_b.responses.delete(response.id)
        check_missing(at_a, response.id)
        with own_redis_server.client() as redis:
            documents = redis.keys("wp:{dev}:document:*")
            assert len(documents) == 5 and all(0 < redis.ttl(each) <= 30 * 86400 for each in documents)
        own_redis_server.freeze()
        try:
            lost = respond(at_a, input=QUESTION)
            assert lost.output_text and lost.store is False
            for ask in (
                lambda: respond(at_a, input="x", previous_response_id=name),
                lambda: at_a.responses.retrieve(str(name)),
            ):
                with pytest.raises(openai.InternalServerError) as caught:
                    ask()
                assert (caught.value.status_code, caught.value.code) == (503, "storage_unavailable")
                assert caught.value.response.headers["retry-after"] == "1"
        finally:
            own_redis_server.thaw()
        assert "a response was not stored" in a.log.read_text()
        assert a.metric("warmpath_responses_kept_total", outcome="storage_away") == 1


@pytest.mark.slow
def test_a_response_whose_end_was_received_survives_a_kill(tmp_path: Path, local_engine: Running) -> None:
    """The gateway is killed as soon as the client has the end."""
    policy, storage = storing_policy(local_engine.url), f"sqlite:///{tmp_path / 'state.db'}"
    body = {"model": DEMO, "input": QUESTION, "max_output_tokens": 8, "stream": True}
    names: list[str] = []
    for number in range(3):
        with gateway(tmp_path / f"{number}", policy, storage=storage) as doomed:
            if names:
                body["previous_response_id"] = names[-1]
            with Wire(doomed, "responses", body) as wire:
                received = wire.read_until(b"event: response.incomplete")
                doomed.kill()
                received = wire.read_to_end()
            names.append(json.loads(received.split(b"data: ")[1].split(b"\n")[0])["response"]["id"])
    with gateway(tmp_path / "last", policy, storage=storage) as front, front.client() as client:
        assert client.responses.retrieve(names[-1]).previous_response_id == names[-2]
        assert respond(client, input="And?", previous_response_id=names[-1]).output_text


def test_batch_lines_are_stored_and_continue_responses(front: Gateway) -> None:
    with front.client() as client:
        first = respond(client, input=QUESTION)
        lines = [
            {"custom_id": f"{number}", "method": "POST", "url": "/v1/responses", "body": {"model": DEMO, **body}}
            for number, body in enumerate(
                [
                    {"input": "One?", "max_output_tokens": 4},
                    {"input": "Two?", "max_output_tokens": 4, "previous_response_id": first.id},
                    {"input": "Three?", "previous_response_id": "resp_none"},
                ]
            )
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
        until(lambda: client.batches.retrieve(batch.id).status == "completed", pause_seconds=0.05)
        batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id and batch.error_file_id
        answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        for each in answers:
            body = each["response"]["body"]
            assert body["store"] and client.responses.retrieve(body["id"]).id == body["id"]
        (rejected,) = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
        assert rejected["response"]["body"]["error"]["code"] == "previous_response_not_found"
        by_id = {each["custom_id"]: each["response"]["body"]["usage"]["input_tokens"] for each in answers}
        assert by_id["1"] > by_id["0"] + 8, "its prompt contains the history"
