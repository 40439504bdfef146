"""The server through OpenAI's client: real process, real sockets, strictly validated responses.

`test_server_completions.py` has the endpoints beside chats, and `test_server_errors.py` the errors.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from tests.backend.server.common_requests import CHAT, GREEDY, MESSAGES

if TYPE_CHECKING:
    from tests.backend.server.conftest import RunningServer


pytestmark = pytest.mark.e2e


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
