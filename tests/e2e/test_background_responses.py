"""Responses in the background, with the unmodified `openai` client: on one gateway, on two, and on a killed one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.processes import DEMO, Gateway, Running, gateway, simple_policy, until
from tests.e2e.test_responses import NUMBERS, QUESTION
from tests.gateway.endpoints.responses.translated import check_response
from tests.openai_spec import Validate
from tests.redis_server import RedisServer, own_redis_server

__all__ = ["own_redis_server"]
pytestmark = pytest.mark.e2e

STORED = {"keep": "30d"}
LONG: Any = {  # an answer that fills almost the whole context of the model
    "model": DEMO,
    "input": "Count.",
    "max_output_tokens": 1800,
    "text": {"format": {"type": "json_schema", "name": "numbers", "schema": NUMBERS}},
    "background": True,
}
OPEN = ("queued", "in_progress")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, local_engine: Running) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("background"), simple_policy(local_engine.url, responses=STORED)) as started:
        yield started


def ended(client: openai.OpenAI, name: str) -> Any:
    return until(lambda: response if (response := client.responses.retrieve(name)).status not in OPEN else None)


def test_a_response_is_polled_and_its_stream_resumed(front: Gateway, validate: Validate) -> None:
    options: Any = {"model": DEMO, "input": QUESTION, "temperature": 0, "max_output_tokens": 60}
    with front.client() as client:
        plain = client.responses.create(**options)
        queued = client.responses.create(**options, background=True)
        assert queued.status == "queued" and queued.background
        response = ended(client, queued.id)
        check_response(validate, response.to_dict())
        assert response.output_text == plain.output_text
        stream: Any = client.responses.create(**{**options, "input": "Why?"}, background=True, stream=True)
        first = next(event for event in stream if event.sequence_number == 3)
        created = next(iter(client.responses.retrieve(queued.id, stream=True)))
        assert created.type == "response.created" and created.response.id == queued.id
        events = [*client.responses.retrieve(queued.id, stream=True, starting_after=2)]
        assert [event.sequence_number for event in events] == [*range(3, 3 + len(events))]
        assert events[-1].type == "response.completed" and events[-1].response.output_text == plain.output_text
        assert first.sequence_number == 3
        following = client.responses.create(**options, previous_response_id=queued.id)
        assert following.previous_response_id == queued.id
    receipt = front.receipt(queued.id.replace("resp_", "req_"))
    assert receipt["outcome"] == "complete" and receipt["exact"]


def test_a_response_is_cancelled(front: Gateway) -> None:
    with front.client() as client:
        name = client.responses.create(**LONG).id
        until(lambda: client.responses.retrieve(name).status == "in_progress")
        cancelled = client.responses.cancel(name)
        assert cancelled.status == "cancelled"
        assert client.responses.retrieve(name).status == client.responses.cancel(name).status == "cancelled"
        assert front.receipt(name.replace("resp_", "req_"))["outcome"] == "client_gone"
        done = client.responses.create(model=DEMO, input=QUESTION, max_output_tokens=4)
        with pytest.raises(openai.BadRequestError):
            client.responses.cancel(done.id)


@pytest.mark.slow
def test_another_gateway_polls_streams_and_cancels(
    tmp_path: Path, local_engine: Running, own_redis_server: RedisServer
) -> None:
    policy, storage = simple_policy(local_engine.url, responses=STORED), own_redis_server.url
    with (
        gateway(tmp_path / "a", policy, storage=storage, replica="a") as a,
        gateway(tmp_path / "b", policy, storage=storage, replica="b") as b,
        a.client() as at_a,
        b.client() as at_b,
    ):
        short = at_a.responses.create(model=DEMO, input=QUESTION, max_output_tokens=16, background=True)
        kinds = [event.type for event in at_b.responses.retrieve(short.id, stream=True)]
        assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
        assert at_b.responses.retrieve(short.id).to_dict() == at_a.responses.retrieve(short.id).to_dict()
        name = at_a.responses.create(**LONG).id
        until(lambda: at_b.responses.retrieve(name).status == "in_progress")
        assert at_b.responses.cancel(name).status == "cancelled"
        assert a.receipt(name.replace("resp_", "req_"))["outcome"] == "client_gone"


@pytest.mark.slow
def test_a_response_whose_gateway_is_killed_has_failed_and_is_billed_once(
    tmp_path: Path, local_engine: Running
) -> None:
    policy, storage = simple_policy(local_engine.url, responses=STORED), f"sqlite:///{tmp_path / 'state.db'}"
    with gateway(tmp_path / "a", policy, storage=storage) as doomed, doomed.client() as client:
        name = client.responses.create(**LONG).id
        until(lambda: client.responses.retrieve(name).status == "in_progress")
        doomed.kill()
    with gateway(tmp_path / "a", policy, storage=storage) as front, front.client() as client:
        response = client.responses.retrieve(name)  # a gateway of the same name ends the leases of its predecessor
        assert response.status == "failed" and response.error is not None
        assert response.error.message == "the gateway that ran this response has stopped"
        receipt = front.receipt(name.replace("resp_", "req_"))
        assert receipt["outcome"] != "complete" and receipt["output"] > 0
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model=DEMO, input="x", previous_response_id=name)
