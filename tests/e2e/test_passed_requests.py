"""Requests that pass unchanged: reranks, scores, audio, images and listed paths, by real clients and real sockets."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.e2e.faults.upstreams import Request, Upstreams, listening
from tests.e2e.processes import PRICE, Gateway, gateway, simple_policy, tenant
from tests.gateway.providers.scripted_server import STREAM_END, STREAM_HEAD, chunked, json_response
from tests.gateway.providers.wires import data

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SOUND = bytes(range(256)) * 500  # no UTF-8, and with many commas
SPEECH = b"ID3" + bytes(range(256)) * 20
TRANSCRIPT = [
    data({"type": "transcript.text.delta", "delta": "he"}),
    b"event: transcript.text.delta\r\n" + data({"type": "transcript.text.delta", "delta": "llo"}),
    data({"type": "transcript.text.done", "text": "hello",
          "usage": {"type": "tokens", "input_tokens": 30, "output_tokens": 4, "total_tokens": 34}}),
]  # fmt: skip
SPEECH_EVENTS = data({"type": "speech.audio.delta", "audio": "SUQz"}) + data({"type": "speech.audio.done"})
PRICES = {**PRICE, "second": "0.001"}
NOT_FOUND = b'{"detail":"Not Found"}'
ANSWERS: dict[str, Any] = {
    "/v1/rerank": {"results": [{"index": 0}], "usage": {"prompt_tokens": 40, "total_tokens": 40}},
    "/v2/rerank": {"results": [], "meta": {"billed_units": {"search_units": 2}}},
    "/v1/score": {"data": [{"score": 0.5}], "usage": {"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9}},
    "/classify": {"data": [{"label": "a"}], "usage": {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0}},
    "/pooling": {"data": [], "usage": {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0}},
    "/tokenize": {"count": 2, "max_model_len": 4096, "tokens": [1, 2]},
    "/v1/audio/transcriptions": {"text": "hello", "usage": {"type": "duration", "seconds": 12.5}},
    "/v1/images/generations": {"created": 1, "data": [{"b64_json": "aGk="}, {"b64_json": "aGk="}]},
    "/v1/moderations": {"id": "m", "model": "served", "results": []},
    "/v1/ocr": {"pages": 3},
}  # fmt: skip


async def serve_all(request: Request) -> None:
    if request.path == "/v1/audio/transcriptions" and b'name="stream"' in request.content:
        await request.write(STREAM_HEAD + chunked(b"".join(TRANSCRIPT[:2])))
        if b"cut.wav" in request.content:
            request.reset()
        else:
            await request.write(chunked(TRANSCRIPT[2]) + STREAM_END)
    elif request.body.get("stream_format") == "sse":
        await request.write(STREAM_HEAD + chunked(SPEECH_EVENTS) + STREAM_END)
    elif request.path == "/v1/audio/speech":
        head = f"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ncontent-length: {len(SPEECH)}\r\n\r\n"
        await request.write(head.encode() + SPEECH)
    elif request.body.get("query") == "too long":
        await request.write(json_response(b'{"detail":"query: too long"}', "400 Bad Request"))
    elif request.path in ANSWERS:
        await request.write(json_response(json.dumps(ANSWERS[request.path]).encode()))
    else:
        await request.write(json_response(NOT_FOUND, "404 Not Found"))


async def serve_chats(request: Request) -> None:
    if request.path == "/v1/chat/completions":
        await request.whole()
    else:
        await request.write(json_response(NOT_FOUND, "404 Not Found"))


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Upstreams]]:
    with listening({"all": serve_all, "chats": serve_chats}) as upstreams:
        deployments = [
            {"name": name, "base_url": f"http://127.0.0.1:{port}/v1", "model": "served", "price": PRICES}
            for name, port in upstreams.ports.items()
        ]
        policy = simple_policy(
            "http://unused",
            deployments=deployments,
            models=[{"name": "m", "deployments": ["chats", "all"]}, {"name": "chat-only", "deployments": ["chats"]}],
            tenants=[tenant("dev"), tenant("limited", limits={"requests": "1/1h"})],
            passthrough=["/v1/ocr"],
        )
        with gateway(tmp_path_factory.mktemp("passed"), policy) as started:
            yield started, upstreams


@pytest.mark.parametrize(
    ("path", "upstream_path", "used"),
    [
        ("/v1/rerank", "/v1/rerank", {"input_uncached": 40}),
        ("/rerank", "/v1/rerank", {"input_uncached": 40}),
        ("/v2/rerank", "/v2/rerank", {"units": {"search": "2"}}),
        ("/v1/score", "/v1/score", {"input_uncached": 9}),
        ("/classify", "/classify", {"input_uncached": 7}),
        ("/v1/pooling", "/pooling", {"input_uncached": 5}),
        ("/tokenize", "/tokenize", {}),
        ("/v1/moderations", "/v1/moderations", {}),
        ("/v1/ocr", "/v1/ocr", {}),
    ],
)
def test_json_passes_with_the_deployments_model(
    front: tuple[Gateway, Upstreams], path: str, upstream_path: str, used: dict[str, Any]
) -> None:
    front_gateway, upstreams = front
    body = '{"model": "m", "query": "q", "documents": ["a", {"text": "é"}], "x": 1.50}'.encode()
    reply = front_gateway.post(f"..{path}", body)
    assert (reply.status_code, reply.json()) == (200, ANSWERS[upstream_path]), reply.text
    received = upstreams.requests["all"][-1]
    assert (received.path, received.body["model"]) == (upstream_path, "served")
    for value in ('["a", {"text": "é"}]', '"x":1.50'):  # as the client wrote it
        assert value.encode() in received.content
    receipt = front_gateway.receipt(reply.headers["x-request-id"])
    assert used.items() <= receipt.items() and receipt["operation"] == path.removeprefix("/v1").removeprefix("/")
    assert (receipt["cost"] is None) == ("input_uncached" not in used) and receipt["exact"] == bool(used)
    assert used or int(receipt["units"]["byte"]) > len(body)


def test_openais_client_for_audio_and_images(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, upstreams = front
    with front_gateway.client() as client:
        raw = client.audio.transcriptions.with_raw_response.create(
            model="m", file=("a.wav", io.BytesIO(SOUND), "audio/wav"), language="en"
        )
        assert raw.parse().text == "hello"
        received = upstreams.requests["all"][-1]
        assert SOUND in received.content and b'name="model"\r\n\r\nserved\r\n' in received.content
        receipt = front_gateway.receipt(raw.headers["x-request-id"])
        assert (receipt["units"], receipt["cost"], receipt["model_served"]) == ({"second": "12.5"}, "0.0125", "served")
        speech = client.audio.speech.create(model="m", voice="alloy", input="Hello.")
        assert speech.content == SPEECH and speech.response.headers["content-type"] == "audio/mpeg"
        images = client.images.with_raw_response.generate(model="m", prompt="A cat", n=2)
        assert len(images.parse().data or ()) == 2
        receipt = front_gateway.receipt(images.headers["x-request-id"])
        assert (receipt["units"], receipt["operation"]) == ({"image": "2"}, "images/generations")
        assert client.moderations.create(model="m", input="x").id == "m"


def test_streams_of_events_pass_as_they_come(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, _ = front
    with front_gateway.client() as client:
        raw = client.audio.transcriptions.with_raw_response.create(
            model="m", file=("a.wav", io.BytesIO(SOUND), "audio/wav"), stream=True
        )
        assert [each.type for each in raw.parse()][-1] == "transcript.text.done"
        receipt = front_gateway.receipt(raw.headers["x-request-id"])
        assert (receipt["input_uncached"], receipt["output"], receipt["exact"]) == (30, 4, True)
        cut = client.audio.transcriptions.with_raw_response.create(
            model="m", file=("cut.wav", io.BytesIO(SOUND), "audio/wav"), stream=True
        )
        with pytest.raises((openai.APIError, httpx2.TransportError)):
            list(cut.parse())
        receipt = front_gateway.receipt(cut.headers["x-request-id"])
        assert receipt["outcome"] == "upstream_cut" and int(receipt["units"]["byte"]) > len(SOUND)
    speech = front_gateway.post("audio/speech", {"model": "m", "voice": "a", "input": "x", "stream_format": "sse"})
    assert speech.content == SPEECH_EVENTS and speech.headers["content-type"].startswith("text/event-stream")
    assert int(front_gateway.receipt(speech.headers["x-request-id"])["units"]["byte"]) > len(SPEECH_EVENTS)
    whole = front_gateway.post("rerank", {"model": "m", "query": "q", "documents": [], "stream": True})
    assert whole.json() == ANSWERS["/v1/rerank"] and whole.headers["content-type"] == "application/json"


def test_errors_have_our_form(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, _ = front
    refused = front_gateway.post("rerank", {"model": "m", "query": "too long", "documents": []})
    assert refused.status_code == 400 and "query: too long" in refused.json()["error"]["message"]
    for body, param in (
        ({"query": "x"}, "model"),
        (b"--b\r\nx", None),
        (b"--b\r\nx: y\r\n\r\n1\r\n--b--\r\n", "model"),
    ):
        wrong = front_gateway.post("rerank", body)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param), wrong.text
    assert front_gateway.post("rerank", {"model": "other"}).status_code == 404
    assert front_gateway.post("unlisted", {"model": "m"}).json()["error"]["code"] == "unknown_url"


def test_a_deployment_without_the_path_still_gets_chats(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, _ = front
    for _ in range(8):
        lacking = front_gateway.post("rerank", {"model": "chat-only", "query": "q", "documents": ["a"]})
        assert (lacking.status_code, lacking.json()["error"]["code"]) == (501, "unsupported_operation")
    with front_gateway.client() as client:
        for _ in range(3):
            assert client.chat.completions.create(model="chat-only", messages=[{"role": "user", "content": "hi"}])


def test_limits_apply(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, _ = front
    body = {"model": "m", "query": "q", "documents": ["a"]}
    first, second = (front_gateway.post("rerank", body, "limited") for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 429)


def test_an_idempotency_key_replays_a_binary_answer(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, upstreams = front
    with front_gateway.client() as client:
        before = len(upstreams.requests["all"])
        for _ in range(2):
            speech = client.audio.speech.create(
                model="m", voice="alloy", input="Once.", extra_headers={"Idempotency-Key": "speech"}
            )
            assert speech.content == SPEECH and speech.response.headers["content-type"] == "audio/mpeg"
        assert len(upstreams.requests["all"]) == before + 1


def test_a_file_in_a_chat_endpoint_is_no_json(front: tuple[Gateway, Upstreams]) -> None:
    with front[0].client() as client, pytest.raises(openai.BadRequestError, match="not valid JSON"):
        client.post("/chat/completions", cast_to=object, files={"file": b"x"}, body={"model": "m"})
