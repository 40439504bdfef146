"""The server through OpenAI's client: real process, real sockets, strictly validated responses."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

if TYPE_CHECKING:
    from tests.backend.server.conftest import RunningServer

pytestmark = pytest.mark.e2e

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, world! " * 20}]
GREEDY: Any = {"temperature": 0, "max_tokens": 12}


def test_models(server: RunningServer) -> None:
    client = server.client()
    (model,) = client.models.list().data
    assert model.id == server.model == "tiny-llama"
    assert client.models.retrieve(model.id) == model
    assert model.model_dump()["max_model_len"] == 8192
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


def test_whole_and_streamed_chats_are_equal(server: RunningServer) -> None:
    client = server.client()
    whole = client.chat.completions.create(model=server.model, messages=MESSAGES, **GREEDY)
    assert whole.usage is not None
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    streamed: Any = {"stream": True, "stream_options": {"include_usage": True}, **GREEDY}
    chunks: Any = list(client.chat.completions.create(model=server.model, messages=MESSAGES, **streamed))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    first, *middle, finish, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert all(c.choices[0].finish_reason is None and c.choices[0].delta.role is None for c in middle)
    assert finish.choices[0].finish_reason == "length"
    assert finish.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 12
    assert all("usage" in c.model_fields_set and c.usage is None for c in chunks[:-1])
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1


async def test_the_async_client_streams(server: RunningServer) -> None:
    async with server.async_client() as client:
        stream = await client.chat.completions.create(model=server.model, messages=MESSAGES, stream=True, **GREEDY)
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_usage_can_be_sent_with_every_chunk(server: RunningServer) -> None:
    options: Any = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": True, **GREEDY}
    chunks: Any = server.client().chat.completions.create(model=server.model, messages=MESSAGES, **options)
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert len(counts) > 3


def test_the_prefix_cache_shows_in_the_usage(server: RunningServer) -> None:
    messages: Any = [{"role": "user", "content": "What the prefix cache has seen " * 20}]
    first, second = (
        server.client().chat.completions.create(
            model=server.model, messages=messages, extra_body={"cache_salt": "this test"}, **GREEDY
        )
        for _ in range(2)
    )
    assert first.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    # All full blocks, except that the last token is always computed.
    assert second.usage.prompt_tokens_details.cached_tokens == (second.usage.prompt_tokens - 1) // 16 * 16
    assert second.choices[0].message == first.choices[0].message
    other = server.client().chat.completions.create(
        model=server.model, messages=messages, extra_body={"cache_salt": "another"}, **GREEDY
    )
    assert other.usage is not None
    assert other.usage.prompt_tokens_details is not None
    assert other.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_separate_and_a_seed_repeats_them(server: RunningServer, stream: bool) -> None:
    def texts() -> list[str]:
        options: Any = {"max_tokens": 8, "n": 3, "seed": 7, "temperature": 1.5, "stream": stream}
        reply: Any = server.client().chat.completions.create(model=server.model, messages=MESSAGES, **options)
        found = ["", "", ""]
        if not stream:
            assert reply.usage.completion_tokens == 24
            return [choice.message.content for choice in reply.choices]
        for chunk in reply:
            found[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        return found

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_chat_logprobs(server: RunningServer) -> None:
    def create(**options: Any) -> Any:
        return server.client().chat.completions.create(
            model=server.model, messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY, **options
        )

    choice = create().choices[0]
    content = choice.logprobs.content
    assert len(content) == 12
    for token in content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # greedy
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    text = b"".join(bytes(token.bytes) for token in content).decode(errors="replace")
    assert text == choice.message.content
    streamed = [token for c in create(stream=True) if c.choices[0].logprobs for token in c.choices[0].logprobs.content]
    assert [token.token for token in streamed] == [token.token for token in content]


def test_stop_sequences_end_the_text_before_them(server: RunningServer) -> None:
    def create(**options: Any) -> Any:
        return server.client(strict=False).completions.create(
            model=server.model, prompt="The quick", temperature=0, max_tokens=24, **options
        )

    text = create().choices[0].text
    stop = text[8:11]
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    stopped = create(stop=[stop, "never in the text"])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert 0 < stopped.usage.completion_tokens < 24
    streamed = list(create(stop=stop, stream=True))
    assert "".join(c.choices[0].text for c in streamed) == stopped.choices[0].text
    assert stopped.choices[0].stop_reason == streamed[-1].choices[0].stop_reason == stop
    assert create().choices[0].stop_reason is None
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted


def test_stop_token_ids_and_min_tokens(server: RunningServer) -> None:
    def create(**extra: Any) -> Any:
        return server.client().completions.create(
            model=server.model,
            prompt="The quick",
            temperature=0,
            max_tokens=6,
            logprobs=0,
            extra_body={"return_token_ids": True, **extra},
        )

    plain = create()
    tokens = plain.choices[0].token_ids
    stopped = create(stop_token_ids=tokens)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens < 6
    assert len(stopped.choices[0].logprobs.tokens) == stopped.usage.completion_tokens
    assert (stopped.choices[0].text, stopped.choices[0].stop_reason) == ("", tokens[0])
    shown = create(stop_token_ids=tokens, include_stop_str_in_output=True).choices[0]
    assert (shown.finish_reason, shown.stop_reason, shown.token_ids) == ("stop", tokens[0], tokens[:1])
    assert shown.text == shown.logprobs.tokens[0] == plain.choices[0].logprobs.tokens[0]
    assert plain.choices[0].finish_reason == "length"
    assert plain.choices[0].stop_reason is None
    assert create(stop_token_ids=tokens, min_tokens=6).usage.completion_tokens == 6
    string = {"stop": plain.choices[0].text[0]}
    assert create(**string).usage.completion_tokens < 6
    assert create(**string, min_tokens=6).usage.completion_tokens == 6


def test_completions_accept_all_forms_of_a_prompt(server: RunningServer) -> None:
    client = server.client()

    def texts(prompt: Any, **options: Any) -> list[str]:
        reply = client.completions.create(model=server.model, prompt=prompt, temperature=0, max_tokens=5, **options)
        assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
        return [choice.text for choice in reply.choices]

    a, b = "The quick brown", "Hello"
    ids = [httpx2.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"] for text in (a, b)]
    (of_a,), (of_b,) = texts(a), texts(b)
    assert texts([a, b]) == [of_a, of_b]
    assert texts(ids[0]) == [of_a]
    assert texts(ids) == [of_a, of_b]
    assert texts([a, b], n=2) == [of_a, of_a, of_b, of_b]
    assert texts(a, echo=True) == [a + of_a]
    # OpenAI's type for these chunks forbids null, but finish_reason is null until the last chunk.
    streamed = server.client(strict=False).completions.create(
        model=server.model, prompt=[a, b], temperature=0, max_tokens=5, echo=True, stream=True
    )
    found = ["", ""]
    for chunk in streamed:
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == [a + of_a, b + of_b]


def test_special_tokens_are_shown_if_requested(server: RunningServer) -> None:
    def tokens(path: str, **fields: Any) -> list[int]:
        reply = httpx2.post(f"{server.base_url}/{path}/render", json={"model": server.model, **fields})
        rendered: Any = reply.json()
        return list((rendered if isinstance(rendered, dict) else rendered[0])["token_ids"])

    bos = 0
    assert tokens("completions", prompt="Hello")[0] == bos
    assert tokens("completions", prompt="Hello", add_special_tokens=True) == tokens("completions", prompt="Hello")
    assert tokens("completions", prompt="Hello", add_special_tokens=False) == tokens("completions", prompt="Hello")[1:]
    plain = tokens("chat/completions", messages=MESSAGES)
    assert tokens("chat/completions", messages=MESSAGES, add_special_tokens=False) == plain
    assert tokens("chat/completions", messages=MESSAGES, add_special_tokens=True) == [bos, *plain]


def test_completion_logprobs(server: RunningServer) -> None:
    reply = server.client().completions.create(
        model=server.model, prompt="The quick", temperature=0, max_tokens=5, logprobs=2
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or ()) == 5
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(5)]
    assert all(1 <= len(top) <= 2 for top in logprobs.top_logprobs)


def test_embeddings(server: RunningServer) -> None:
    client = server.client()
    inputs = ["Hello, world!", "Größe 東京", "x " * 600]
    plain = client.embeddings.create(model=server.model, input=inputs, encoding_format="float")
    vectors = [item.embedding for item in plain.data]
    for vector in vectors:
        assert len(vector) == 64
        assert math.isclose(math.hypot(*vector), 1, rel_tol=1e-5)
    # By default the client requests base64, and decodes it after its own strict validation.
    lenient = server.client(strict=False)
    for item, vector in zip(lenient.embeddings.create(model=server.model, input=inputs).data, vectors, strict=True):
        assert item.embedding == pytest.approx(vector, abs=1e-6)
    body = {"model": server.model, "input": inputs[0], "encoding_format": "base64"}
    raw = httpx2.post(f"{server.base_url}/embeddings", json=body).json()
    assert struct.unpack("<64f", base64.b64decode(raw["data"][0]["embedding"])) == pytest.approx(vectors[0], abs=1e-6)
    ids = [httpx2.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"] for text in inputs]
    assert plain.usage.prompt_tokens == sum(map(len, ids))
    for given in (ids, ids[0]):
        assert lenient.embeddings.create(model=server.model, input=given).data[0].embedding == pytest.approx(
            vectors[0], abs=1e-6
        )
    many = lenient.embeddings.create(model=server.model, input=["a", "b"] * 40).data
    assert len({tuple(item.embedding) for item in many[::2]}) == 1
    assert [item.index for item in many] == list(range(80))


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    text = "Hello, naïve 東京 🙂"
    counted = httpx2.post(f"{server.url}/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
    assert counted["max_model_len"] == 8192
    assert httpx2.post(f"{server.url}/detokenize", json={"tokens": counted["tokens"]}).json()["prompt"] == "<s>" + text
    chat = httpx2.post(f"{server.url}/tokenize", json={"messages": MESSAGES}).json()
    used = server.client().chat.completions.create(model=server.model, messages=MESSAGES, **GREEDY).usage
    assert used is not None
    assert chat["count"] == used.prompt_tokens


def test_the_request_id_is_returned_and_begins_the_response_id(server: RunningServer) -> None:
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 1}
    responses = [
        httpx2.post(f"{server.base_url}/chat/completions", json=body, headers={"x-request-id": "call-7"})
        for _ in range(2)
    ]
    for reply in responses:
        assert reply.headers["x-request-id"] == "call-7"
        assert reply.json()["id"].startswith("chatcmpl-call-7-")
    assert responses[0].json()["id"] != responses[1].json()["id"]
    assert len(httpx2.get(f"{server.url}/nowhere").headers["x-request-id"]) == 32


def test_tools_and_tool_history_reach_the_prompt(server: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"zip": "8004"}'}}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "no", "tool_call_id": "c1"},
    ]
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    with_tools, without = (
        server.client().chat.completions.create(model=server.model, messages=messages, **options, **GREEDY)
        for options in ({"tools": tools, "tool_choice": "auto"}, {})
    )
    assert with_tools.usage is not None
    assert without.usage is not None
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens


def test_an_echoed_prompt_has_logprobs_too(server: RunningServer) -> None:
    def create(**options: Any) -> Any:
        client = server.client(strict=False)
        return client.completions.create(
            model=server.model, prompt="The quick brown", temperature=0, echo=True, logprobs=2, **options
        )

    choice = create(max_tokens=3).choices[0]
    prompt = httpx2.post(f"{server.url}/tokenize", json={"prompt": "The quick brown"}).json()
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == prompt["count"] + 3 == len(logprobs.text_offset)
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert all(token in top for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True))
    assert "".join(logprobs.tokens) == "<s>" + choice.text
    # Scores a text and generates nothing, as evaluation harnesses do.
    scored = create(max_tokens=0)
    assert scored.choices[0].text == "The quick brown"
    assert scored.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[: prompt["count"]]
    assert (scored.usage.completion_tokens, scored.choices[0].finish_reason) == (0, "length")
    chunks = [chunk.choices[0] for chunk in create(max_tokens=3, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == choice.text
    for name in ("tokens", "text_offset"):
        assert [value for c in chunks if c.logprobs for value in getattr(c.logprobs, name)] == getattr(logprobs, name)


def test_prompt_logprobs_and_token_ids_in_vllms_format(server: RunningServer) -> None:
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    chat = server.client().chat.completions.create(model=server.model, messages=MESSAGES, extra_body=extra, **GREEDY)
    extra_fields = chat.model_extra or {}
    assert chat.usage is not None
    assert len(extra_fields["prompt_token_ids"]) == len(extra_fields["prompt_logprobs"]) == chat.usage.prompt_tokens
    assert extra_fields["prompt_logprobs"][0] is None
    for token_id, scored in zip(extra_fields["prompt_token_ids"][1:], extra_fields["prompt_logprobs"][1:], strict=True):
        assert scored[str(token_id)]["logprob"] <= max(entry["logprob"] for entry in scored.values()) <= 0
        by_rank = sorted(scored.values(), key=lambda entry: entry["rank"])
        assert by_rank[0]["rank"] == 1
        assert (by_rank[-1]["rank"] == 1) == (len(scored) == 1)
        assert by_rank == sorted(by_rank, key=lambda entry: -entry["logprob"])
    text = server.client().completions.create(model=server.model, prompt=[5, 6, 7], extra_body=extra, **GREEDY)
    extra_fields = text.choices[0].model_extra or {}
    assert extra_fields["prompt_token_ids"] == [5, 6, 7]
    assert len(extra_fields["token_ids"]) == 12
    stream = server.client(strict=False).completions.create(
        model=server.model, prompt=[5, 6, 7], extra_body={"return_token_ids": True}, stream=True, **GREEDY
    )
    extras = [chunk.choices[0].model_extra or {} for chunk in stream]
    assert [token for extra in extras for token in extra["token_ids"]] == extra_fields["token_ids"]
    assert [extra.get("prompt_token_ids") for extra in extras] == [[5, 6, 7]] + [None] * (len(extras) - 1)


def test_best_of(server: RunningServer) -> None:
    def create(**options: Any) -> Any:
        return server.client().completions.create(
            model=server.model, prompt=["Hello", "The"], temperature=1.2, max_tokens=6, seed=4, **options
        )

    every = create(n=6, logprobs=0).choices
    best = create(n=2, best_of=6)
    assert best.usage.completion_tokens == create(n=6).usage.completion_tokens
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    for first in (0, 6):
        of_prompt = every[first : first + 6]
        means = {c.text: sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in of_prompt}
        ranked = sorted(means, key=lambda text: -means[text])[:2]
        assert [choice.text for choice in best.choices[first // 3 : first // 3 + 2]] == ranked


def test_a_stop_string_can_be_included(server: RunningServer) -> None:
    def text(**options: Any) -> str:
        reply = server.client().completions.create(model=server.model, prompt="The quick", **GREEDY, **options)
        return reply.choices[0].text

    stop = text()[4:7]
    kept = text(stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept == text(stop=stop) + stop


def test_a_final_message_is_continued(server: RunningServer) -> None:
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "I would say "}]
    extra = {"add_generation_prompt": False, "continue_final_message": True}
    body = {"messages": messages, **extra}
    tokens = httpx2.post(f"{server.url}/tokenize", json=body).json()["tokens"]
    rendered = httpx2.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert rendered.endswith("<|im_start|>assistant\nI would say ")
    reply = server.client().chat.completions.create(model=server.model, messages=messages, extra_body=extra, **GREEDY)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(tokens)
    refused = httpx2.post(f"{server.url}/tokenize", json={"messages": messages, "continue_final_message": True})
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_rendered_requests_equal_computed_ones(server: RunningServer) -> None:
    body: Any = {"model": server.model, "messages": MESSAGES, "seed": 3, "stop": "x", "priority": 4, "n": 2}
    rendered = httpx2.post(f"{server.base_url}/chat/completions/render", json=body).json()
    assert rendered["token_ids"] == httpx2.post(f"{server.url}/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    params = rendered["sampling_params"]
    assert (params["n"], params["seed"], params["stop"], rendered["priority"]) == (2, 3, ["x"], 4)
    assert params["max_tokens"] == 8192 - len(rendered["token_ids"])
    # A prompt of token ids gives the same output as the messages.
    chat = server.client().chat.completions.create(model=server.model, messages=MESSAGES, **GREEDY)
    text = server.client().completions.create(model=server.model, prompt=rendered["token_ids"], **GREEDY)
    assert text.choices[0].text == chat.choices[0].message.content
    of_ids = {"model": server.model, "prompt": [[5, 6], [7]]}
    several = httpx2.post(f"{server.base_url}/completions/render", json=of_ids)
    assert [len(one["token_ids"]) for one in several.json()] == [2, 1]
    wrong = httpx2.post(f"{server.base_url}/chat/completions/render", json=body | {"top_p": 3})
    assert wrong.json()["error"]["param"] == "top_p"


def test_a_deadline_aborts_the_request(server: RunningServer) -> None:
    body = {"model": server.model, "messages": MESSAGES, "ignore_eos": True, "max_tokens": 8000}
    headers = {"x-request-deadline-ms": "150"}
    reply = httpx2.post(f"{server.base_url}/chat/completions", json=body, headers=headers, timeout=60)
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_exceeded"
    streamed = httpx2.post(
        f"{server.base_url}/chat/completions", json=body | {"stream": True}, headers=headers, timeout=60
    )
    *_, error, rest = streamed.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert rest == ""
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("warmpath:num_free_blocks") == 1024


CHAT = "/v1/chat/completions"
REFUSALS: list[tuple[str, dict[str, Any], int, str | None, str | None]] = [
    (CHAT, {"model": "other"}, 404, "model", "model_not_found"),
    (CHAT, {"max_tokens": 8192}, 400, "max_tokens", "context_length_exceeded"),
    (CHAT, {"max_completion_tokens": 8192}, 400, "max_completion_tokens", "context_length_exceeded"),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 9000}]}, 400, "messages", "context_length_exceeded"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", None),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice", None),
    (CHAT, {"reasoning_effort": "low"}, 400, "reasoning_effort", None),
    (CHAT, {"logit_bias": {"512": 1}}, 400, "logit_bias", None),
    (CHAT, {"stop_token_ids": [512]}, 400, "stop_token_ids", None),
    (CHAT, {"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", None),
    (CHAT, {"bogus": 1}, 400, "bogus", None),
    ("/v1/completions", {"prompt": []}, 400, "prompt", None),
    ("/v1/completions", {"prompt": [[1], "a"]}, 400, "prompt", None),
    ("/v1/completions", {"prompt": [512]}, 400, "prompt", None),
    ("/v1/completions", {"prompt": ["a"] * 9, "n": 128}, 400, "prompt", None),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", None),
    ("/v1/embeddings", {"input": [[]]}, 400, "input", None),
    ("/v1/embeddings", {"input": "a", "dimensions": 3}, 400, "dimensions", None),
    ("/v1/embeddings", {"input": "x " * 9000}, 400, "input", "context_length_exceeded"),
    ("/rerank", {"query": "a", "documents": ["b"]}, 400, "model", None),
    ("/score", {"text_1": "a", "text_2": "b"}, 400, "model", None),
    ("/tokenize", {}, 400, "prompt", None),
    ("/detokenize", {"tokens": [512]}, 400, "tokens", None),
]


@pytest.mark.parametrize(("path", "fields", "status", "param", "code"), REFUSALS)
def test_errors(
    server: RunningServer, path: str, fields: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    body = {"model": server.model} | ({"messages": MESSAGES} if path == CHAT else {}) | fields
    reply = httpx2.post(server.url + path, json=body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", CHAT, b"{", 400, None),
        ("POST", CHAT, b"[]", 400, None),
        ("POST", CHAT, b"", 400, None),
        ("POST", CHAT, b" " * (32 * 2**20 + 1), 413, "body_too_large"),
        ("GET", CHAT, b"", 405, "method_not_allowed"),
        ("POST", "/v1/responses", b"{}", 404, "unknown_url"),
        ("GET", "/", b"", 404, "unknown_url"),
    ],
)
def test_bodies_that_are_not_requests(
    server: RunningServer, method: str, path: str, content: bytes, status: int, code: str | None
) -> None:
    reply = httpx2.request(method, server.url + path, content=content)
    assert reply.status_code == status
    assert reply.json()["error"]["code"] == code
    assert reply.headers["content-type"] == "application/json"


def test_the_clients_exception_types(server: RunningServer) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=server.model, messages=MESSAGES, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)


def test_health_and_metrics(server: RunningServer) -> None:
    assert httpx2.get(f"{server.url}/health").status_code == 200
    before = server.metric("vllm:generation_tokens_total"), server.metric("vllm:time_to_first_token_seconds_count")
    tokens = server.metric("vllm:request_generation_tokens_sum")
    server.client().chat.completions.create(model=server.model, messages=MESSAGES, **GREEDY)
    assert server.metric("vllm:generation_tokens_total") == before[0] + 12
    assert server.metric("vllm:time_to_first_token_seconds_count") == before[1] + 1
    assert server.metric("vllm:request_generation_tokens_sum") == tokens + 12
    assert server.metric("vllm:cache_config_info", block_size="16", num_gpu_blocks="1024") == 1
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("warmpath:integrity") == 1
    assert server.metric("warmpath:num_free_blocks") == 1024
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    text = httpx2.get(f"{server.url}/metrics").text
    for name in (
        "vllm:prompt_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_inference_time_seconds_bucket",
        "vllm:request_prompt_tokens_bucket",
        "vllm:request_success_total",
    ):
        assert f"{name}{{" in text, name
        assert 'model_name="tiny-llama"' in text


def test_a_stream_is_framed_as_server_sent_events(server: RunningServer) -> None:
    body = {"model": server.model, "messages": MESSAGES, "stream": True, **GREEDY}
    reply = httpx2.post(server.url + CHAT, json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events)
