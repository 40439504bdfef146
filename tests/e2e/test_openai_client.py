"""The unmodified `openai` client through gateway and engine, in strict mode, and checked against OpenAI's OpenAPI."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx2
import openai
import pytest

from tests.e2e.processes import DEMO, Gateway, chat, events
from tests.openai_spec import Validate, completion_chunk

pytestmark = pytest.mark.e2e

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


def test_chat(local_gateway: Gateway) -> None:
    with local_gateway.client() as client:
        reply = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=8)
        (choice,) = reply.choices
        assert choice.message.content
        assert choice.finish_reason in ("stop", "length")
        assert reply.usage is not None
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
        assert reply.usage.prompt_tokens_details is not None


@pytest.mark.parametrize("include_usage", [True, False, None])
def test_a_streamed_chat_equals_the_whole_answer(local_gateway: Gateway, include_usage: bool | None) -> None:
    options: Any = {"model": DEMO, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    stream_options: Any = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    with local_gateway.client() as client:
        whole = client.chat.completions.create(**options)
        chunks = list(client.chat.completions.create(**options, **stream_options, stream=True))
    with_choices = [chunk for chunk in chunks if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in with_choices) == whole.choices[0].message.content
    assert with_choices[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None
    if include_usage:
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert not chunks[-1].choices
    else:
        assert with_choices == chunks
        assert [chunk.usage for chunk in chunks] == [None] * len(chunks)


def test_several_choices(local_gateway: Gateway) -> None:
    options: Any = {"model": DEMO, "messages": MESSAGES, "temperature": 1, "n": 2, "max_tokens": 8}
    with local_gateway.client() as client:
        reply = client.chat.completions.create(**options)
        assert [choice.index for choice in reply.choices] == [0, 1]
        chunks = list(client.chat.completions.create(**options, stream=True))
        assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


def test_completions(local_gateway: Gateway) -> None:
    options: Any = {"model": DEMO, "prompt": "The KV cache", "temperature": 0, "max_tokens": 8}
    with local_gateway.client() as client:
        whole = client.completions.create(**options)
        assert whole.choices[0].text
        assert len(client.completions.create(**{**options, "prompt": ["a", "b"]}, n=2).choices) == 4
    # The client's strict types know no null `finish_reason` here, which OpenAI's own chunks have until the last one.
    with local_gateway.client(_strict_response_validation=False) as client:
        streamed = client.completions.create(**options, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_embeddings(local_gateway: Gateway) -> None:
    options: Any = {"model": DEMO, "input": ["hello", "world"]}
    with local_gateway.client() as client:
        floats = client.embeddings.create(**options, encoding_format="float")
    # By default, the client asks for base64 and decodes it itself, but checks strictly before it has decoded.
    with local_gateway.client(_strict_response_validation=False) as client:
        decoded = client.embeddings.create(**options)
        raw = client.embeddings.with_raw_response.create(**options)
    assert len(floats.data[0].embedding) > 8
    assert isinstance(raw.http_response.json()["data"][1]["embedding"], str)
    assert decoded.data[1].embedding == pytest.approx(floats.data[1].embedding, rel=1e-5, abs=1e-6)


def test_models(local_gateway: Gateway) -> None:
    with local_gateway.client() as client:
        assert [model.id for model in client.models.list()][:2] == [DEMO, "demo"]
        assert client.models.retrieve("demo").id == "demo"
    with local_gateway.client("elsewhere") as narrow:
        assert [model.id for model in narrow.models.list()] == ["dead"]
        with pytest.raises(openai.NotFoundError):
            narrow.models.retrieve(DEMO)


async def test_the_async_client(local_gateway: Gateway) -> None:
    async with local_gateway.async_client() as client:
        reply, embedding, models = await asyncio.gather(
            client.chat.completions.create(model=DEMO, messages=MESSAGES, temperature=0, max_tokens=8),
            client.embeddings.create(model=DEMO, input="hello", encoding_format="float"),
            client.models.list(),
        )
        stream = await client.chat.completions.create(
            model=DEMO, messages=MESSAGES, temperature=0, max_tokens=8, stream=True
        )
        text = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(text) == reply.choices[0].message.content
        assert len(embedding.data[0].embedding) > 8
        assert DEMO in [model.id async for model in models]
        completion = await client.completions.create(model=DEMO, prompt="Hello", max_tokens=4)
        assert completion.choices[0].text


def test_errors_raise_the_clients_exception_classes(local_gateway: Gateway) -> None:
    def rejection(kind: type[openai.APIStatusError], tenant: str = "dev", **changes: Any) -> openai.APIStatusError:
        options: Any = {"model": DEMO, "messages": MESSAGES, "max_tokens": 8} | changes
        with local_gateway.client(tenant) as client, pytest.raises(kind) as caught:
            client.chat.completions.create(**options)
        assert type(caught.value) is kind
        assert caught.value.request_id
        assert caught.value.type
        return caught.value

    assert rejection(openai.AuthenticationError, "unknown").code == "invalid_api_key"
    assert rejection(openai.PermissionDeniedError, "guest").code == "permission_denied"
    assert rejection(openai.NotFoundError, model="no-such-model").code == "model_not_found"
    assert rejection(openai.NotFoundError, "elsewhere").code == "model_not_found"
    assert rejection(openai.BadRequestError, max_tokens="many").param == "max_tokens"
    assert rejection(openai.BadRequestError, temperature=99).param == "temperature"  # the engine's word
    huge = [{"role": "user", "content": "x" * 33 * 2**20}]
    too_large = rejection(openai.APIStatusError, messages=huge)
    assert (too_large.status_code, too_large.code) == (413, "request_too_large")
    assert rejection(openai.InternalServerError, model="dead").status_code == 502
    header = {"x-class": "short-queue"}
    with local_gateway.client() as client:
        endless: Any = {"max_tokens": 1800, "extra_body": {"ignore_eos": True}, "stream": True}
        with client.chat.completions.create(model="one-at-a-time", messages=MESSAGES, **endless) as stream:
            next(iter(stream))
            full = rejection(openai.InternalServerError, model="one-at-a-time", extra_headers=header)
    assert (full.status_code, full.code) == (503, "overloaded")


@pytest.mark.slow
def test_a_limited_client_waits_for_retry_after(local_gateway: Gateway) -> None:
    options: Any = {"model": DEMO, "messages": MESSAGES, "max_tokens": 1}
    with local_gateway.client("paced", max_retries=0) as client, pytest.raises(openai.RateLimitError) as caught:
        for _ in range(5):
            client.chat.completions.create(**options)
    limited = caught.value
    assert limited.code == "rate_limit_exceeded"
    headers = limited.response.headers
    assert 0 < int(headers["retry-after-ms"]) <= 2000
    assert 1 <= int(headers["retry-after"]) <= 2
    assert headers["x-should-retry"] == "true"
    assert headers["x-ratelimit-limit-requests"] == "1"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    tries: list[tuple[int, float]] = []

    def note(response: httpx2.Response) -> None:
        tries.append((response.status_code, time.monotonic()))

    hooks = openai.DefaultHttpxClient(event_hooks={"response": [note]})
    with local_gateway.client("paced", max_retries=2, http_client=hooks) as client:
        assert client.chat.completions.create(**options).choices
        assert client.chat.completions.create(**options).choices
    statuses = [status for status, _ in tries]
    assert statuses[-1] == 200
    assert 429 in statuses
    assert statuses.count(200) == 2


def test_a_spent_budget_is_not_retried(local_gateway: Gateway) -> None:
    tries = []
    hooks = openai.DefaultHttpxClient(event_hooks={"response": [lambda response: tries.append(response.status_code)]})
    client = local_gateway.client("poor", max_retries=5, http_client=hooks)
    with client, pytest.raises(openai.RateLimitError) as caught:
        for _ in range(10):
            client.chat.completions.create(model=DEMO, messages=MESSAGES, max_tokens=20)
    assert caught.value.code == "insufficient_quota"
    assert caught.value.response.headers["x-should-retry"] == "false"
    # The last amount may still be reserved for the call before. Then the first rejection asks for a retry.
    assert tries[-1] == 429
    assert tries.count(429) <= 2
    assert tries.count(200) >= 1


@pytest.mark.parametrize(
    "extra",
    [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"service_tier": "flex"}, {"stop": "e"}, {"temperature": 0}],
)
def test_chat_matches_openais_specification(local_gateway: Gateway, validate: Validate, extra: dict[str, Any]) -> None:
    body = chat("Hello", max_tokens=6, **extra)
    for _ in range(2):  # the second one of temperature 0 comes from the cache
        validate("CreateChatCompletionResponse", local_gateway.post("chat/completions", body).json())
        for options in ({}, {"stream_options": {"include_usage": True}}):
            for chunk in events(local_gateway.post("chat/completions", body | {"stream": True, **options}).text):
                validate("CreateChatCompletionStreamResponse", chunk)


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"logprobs": 2}, {"echo": True}])
def test_completions_match_openais_specification(
    local_gateway: Gateway, validate: Validate, extra: dict[str, Any]
) -> None:
    body = {"model": DEMO, "prompt": "Hello", "max_tokens": 6, "temperature": 1, **extra}
    validate("CreateCompletionResponse", local_gateway.post("completions", body).json())
    for chunk in events(local_gateway.post("completions", body | {"stream": True}).text):
        validate("CreateCompletionResponse", completion_chunk(chunk))


def test_other_endpoints_match_openais_specification(local_gateway: Gateway, validate: Validate) -> None:
    for encoding in ("float", "base64"):
        body = {"model": DEMO, "input": ["a", "b"], "encoding_format": encoding}
        reply = local_gateway.post("embeddings", body).json()
        if encoding == "base64":  # the specification has numbers only
            for item in reply["data"]:
                item["embedding"] = [0.0]
        validate("CreateEmbeddingResponse", reply)
    with local_gateway.client() as client:
        validate("ListModelsResponse", client.models.with_raw_response.list().http_response.json())
        validate("Model", client.models.with_raw_response.retrieve(DEMO).http_response.json())
