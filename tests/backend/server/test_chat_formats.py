"""Chats with a scripted model, token by token, read by OpenAI's client and its stream accumulators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx2
import openai
import pytest

from backend.engine.async_engine import AsyncEngine
from backend.engine.outputs import FinishReason, StepOutput, Timing, TokenLogprob
from backend.engine.request import Request
from backend.parsers import REASONING_FORMATS, TOOL_FORMATS
from backend.server.app import create_app
from backend.server.components import ServerComponents
from backend.server.metrics import ServerMetrics
from backend.server.model import ServedModel, load_model
from backend.server.tracing import Tracer
from tests.tool_calls import written

DEMO = Path("backend/demo_model/weights")
MESSAGES: Any = [{"role": "user", "content": "Rain?"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "now")
]
ZIP, NONE = '{"zip": "8004", "tags": ["é", {"a": "}"}]}', "{}"
CALLS = {tools: written(tools, ("weather", ZIP), ("now", NONE)) for tools in TOOL_FORMATS}


class ScriptedStream:
    """Delivers scripted outputs one after the other, as `OutputStream` does."""

    def __init__(self, outputs: AsyncIterator[StepOutput]) -> None:
        self._outputs = outputs

    def listen(self, listener: Callable[[StepOutput], None]) -> None:
        self._delivery = asyncio.create_task(self._deliver(listener))

    async def _deliver(self, listener: Callable[[StepOutput], None]) -> None:
        async for output in self._outputs:
            listener(output)


class ScriptedEngine:
    """An engine that generates a given text for every request, some tokens per step."""

    def __init__(self, model: ServedModel) -> None:
        self.text = ""
        self.tokens_per_step = 1
        self.ends = FinishReason.STOP
        self.healthy, self.error = True, None
        self.requests: list[Request] = []
        self.kept_tokens: list[int] = []  # tokens kept of outputs that a stop string ended
        self._model = model

    def submit(self, request: Request) -> ScriptedStream:
        self.requests.append(request)
        return ScriptedStream(self._say(request))

    async def _say(self, request: Request) -> AsyncIterator[StepOutput]:
        now = time.time()
        timing = request.timing = Timing(now, now, now, now)
        tokens = self._model.codec.encode(self.text, add_special_tokens=False)
        for start in range(0, len(tokens), self.tokens_per_step):
            step = tokens[start : start + self.tokens_per_step]
            logprobs = tuple(TokenLogprob(token, -0.5) for token in step)
            yield StepOutput(request.request_id, tuple(step), logprobs=logprobs)
        (eos, *_) = self._model.eos_token_ids
        last = (eos,) if self.ends is FinishReason.STOP else ()
        logprobs = tuple(TokenLogprob(token, -0.5) for token in last)
        yield StepOutput(request.request_id, last, self.ends, logprobs=logprobs, timing=timing)

    def abort(self, request_id: str) -> None: ...

    def stop_early(self, request: Request, num_wanted: int) -> None:
        self.kept_tokens.append(num_wanted)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@asynccontextmanager
async def serve(
    tools: str, reasoning: str | None = None, special_tokens: tuple[str, ...] = ()
) -> AsyncIterator[tuple[ScriptedEngine, openai.AsyncOpenAI]]:
    demo = load_model(DEMO, "m", "m", 512)
    demo.codec.tokenizer.add_special_tokens([*special_tokens])
    model = replace(
        demo,
        tool_format=TOOL_FORMATS[tools],
        reasoning_format=REASONING_FORMATS[reasoning] if reasoning else None,
    )
    scripted = ScriptedEngine(model)
    engine = cast(AsyncEngine, scripted)
    components = ServerComponents(model, engine, 64, 64, ServerMetrics(engine, "m", 16), Tracer(None))
    transport = httpx2.ASGITransport(create_app(components, asyncio.get_running_loop().create_future()))
    async with (
        httpx2.AsyncClient(transport=transport) as http,
        openai.AsyncOpenAI(base_url="http://engine/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield scripted, client


async def both(client: openai.AsyncOpenAI, **options: Any) -> tuple[Any, Any]:
    """The same request whole, and streamed through the client's accumulator."""
    whole = await client.chat.completions.create(model="m", messages=MESSAGES, **options)
    async with client.chat.completions.stream(
        model="m", messages=MESSAGES, stream_options={"include_usage": True}, **options
    ) as stream:
        streamed = await stream.get_final_completion()
    assert streamed.usage == whole.usage
    return whole, streamed


def calls_of(completion: Any) -> list[tuple[str, str]]:
    return [(c.function.name, c.function.arguments) for c in completion.choices[0].message.tool_calls or ()]


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
@pytest.mark.parametrize("tools", [*TOOL_FORMATS])
async def test_tool_calls(tools: str, tokens_per_step: int) -> None:
    async with serve(tools) as (engine, client):
        engine.text, engine.tokens_per_step = CALLS[tools], tokens_per_step
        for completion in await both(client, tools=TOOLS):
            assert calls_of(completion) == [("weather", ZIP), ("now", NONE)]
            assert completion.choices[0].finish_reason == "tool_calls"
            assert not completion.choices[0].message.content
            first, second = completion.choices[0].message.tool_calls
            assert first.id != second.id
            if tools == "mistral":
                assert len(first.id) == 9


@pytest.mark.parametrize("tools", [*TOOL_FORMATS])
async def test_markers_that_are_special_tokens_reach_the_parsers_but_not_the_client(tools: str) -> None:
    markers = (*TOOL_FORMATS[tools].markers, "<think>", "</think>")
    async with serve(tools, "think", markers) as (engine, client):
        engine.text = f"<think>Hm.</think>{CALLS[tools]}"
        for completion in await both(client, tools=TOOLS):
            assert calls_of(completion) == [("weather", ZIP), ("now", NONE)]
            assert completion.choices[0].message.model_extra["reasoning_content"] == "Hm."
            assert not completion.choices[0].message.content


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_channels_of_gpt_oss(tokens_per_step: int) -> None:
    async with serve("harmony", "harmony", TOOL_FORMATS["harmony"].markers) as (engine, client):
        engine.tokens_per_step = tokens_per_step
        thought = "<|channel|>analysis<|message|>Rain, or sun?<|end|><|start|>assistant"
        engine.text = f"{thought}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ZIP}<|call|>"
        for completion in await both(client, tools=TOOLS):
            assert calls_of(completion) == [("weather", ZIP)]
            assert completion.choices[0].message.model_extra["reasoning_content"] == "Rain, or sun?"
            assert completion.choices[0].finish_reason == "tool_calls"
            assert not completion.choices[0].message.content
        engine.text = f"{thought}<|channel|>final<|message|>It rains."
        for completion in await both(client):
            assert completion.choices[0].message.content == "It rains."
            assert completion.choices[0].message.model_extra["reasoning_content"] == "Rain, or sun?"
            details = completion.usage.completion_tokens_details
            assert 5 < details.reasoning_tokens < completion.usage.completion_tokens


@pytest.mark.parametrize("tools", [*TOOL_FORMATS])
async def test_without_tools_or_with_tool_choice_none_calls_are_content(tools: str) -> None:
    async with serve(tools) as (engine, client):
        engine.text = CALLS[tools]
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            for completion in await both(client, **options):
                assert completion.choices[0].message.content == CALLS[tools]
                assert completion.choices[0].finish_reason == "stop"


async def test_a_truncated_call_does_not_change_the_finish_reason() -> None:
    async with serve("hermes") as (engine, client):
        engine.text, engine.ends = CALLS["hermes"][:60], FinishReason.LENGTH
        whole = await client.chat.completions.create(model="m", messages=MESSAGES, tools=TOOLS)
        assert whole.choices[0].finish_reason == "length"
        assert ZIP.startswith(calls_of(whole)[0][1])


@pytest.mark.parametrize("tools", [*TOOL_FORMATS])
async def test_reasoning_content_and_calls(tools: str) -> None:
    async with serve(tools, "think") as (engine, client):
        content = "" if not TOOL_FORMATS[tools].begins else "I look it up.\n"
        engine.text = f"<think>\nRain, or\nsun?\n</think>\n\n{content}{CALLS[tools]}"
        for completion in await both(client, tools=TOOLS):
            message = completion.choices[0].message
            assert message.model_extra["reasoning_content"] == "Rain, or\nsun?"
            assert message.model_extra["reasoning"] == "Rain, or\nsun?"  # vLLM's name
            assert (message.content or "") == content.strip()
            assert calls_of(completion) == [("weather", ZIP), ("now", NONE)]
            details = completion.usage.completion_tokens_details
            assert 5 < details.reasoning_tokens < completion.usage.completion_tokens
        hidden = await client.chat.completions.create(
            model="m", messages=MESSAGES, tools=TOOLS, extra_body={"include_reasoning": False}
        )
        assert not {"reasoning", "reasoning_content"} & (hidden.choices[0].message.model_extra or {}).keys()
        assert calls_of(hidden) == [("weather", ZIP), ("now", NONE)]


async def test_logprobs_and_token_ids_are_complete_with_parsers() -> None:
    async with serve("hermes", "think") as (engine, client):
        engine.text = f"<think>a b c</think>Here: {CALLS['hermes']}"
        options: Any = {"tools": TOOLS, "logprobs": True, "extra_body": {"return_token_ids": True}}
        whole = await client.chat.completions.create(model="m", messages=MESSAGES, **options)
        token_ids = whole.choices[0].model_extra["token_ids"]
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        # They include the token that ends the output, although it has no text.
        assert len(logprobs.content) == len(token_ids) == whole.usage.completion_tokens
        assert whole.model_extra is not None
        assert whole.model_extra["prompt_token_ids"] == engine.requests[0].prompt_token_ids
        streamed: list[int] = []
        tokens: list[str] = []
        stream: Any = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True, **options)
        async for chunk in stream:
            streamed += (chunk.choices[0].model_extra or {}).get("token_ids", [])
            tokens += [
                t.token for t in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else None) or ()
            ]
        assert streamed == token_ids
        assert tokens == [token.token for token in logprobs.content]


async def test_a_stop_string_ends_the_output_in_the_middle_of_a_step() -> None:
    """With speculation a step has several tokens. Those after the stop string are neither shown nor billed."""
    answers = []
    for tokens_per_step in (1, 2, 7):
        async with serve("hermes") as (engine, client):
            engine.text, engine.tokens_per_step = "One two three four five six seven eight nine.", tokens_per_step
            completion = await client.chat.completions.create(
                model="m", messages=MESSAGES, stop=["four"], logprobs=True, extra_body={"return_token_ids": True}
            )
            (choice,) = completion.choices
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert completion.usage is not None
            assert [completion.usage.completion_tokens] == engine.kept_tokens == [len(choice.logprobs.content)]
            assert choice.message.content == "One two three "
            assert choice.finish_reason == "stop"
            answers.append((choice.logprobs, completion.usage, choice.model_extra))
    assert answers[0] == answers[1] == answers[2]


async def test_priority_salt_and_deadline_reach_the_engine() -> None:
    async with serve("hermes") as (engine, client):
        engine.text = "Yes."
        before = time.time()
        await client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            extra_body={"priority": 10, "cache_salt": "s"},
            extra_headers={"x-request-deadline-ms": "1500"},
        )
        (request,) = engine.requests
        assert (request.priority, request.cache_salt, request.is_background) == (10, "s", True)
        assert before + 1.5 <= request.deadline <= time.time() + 1.5


async def test_a_passed_deadline_is_an_error_that_clients_do_not_retry() -> None:
    async with serve("hermes") as (engine, client):
        engine.text, engine.ends = "I beg", FinishReason.DEADLINE
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        assert caught.value.response.headers["x-should-retry"] == "false"
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError) as failed:
            _ = [chunk async for chunk in stream]
        assert failed.value.code == "deadline_exceeded"
        for wrong in ("0", "-5", "soon", "1e3", str(10**12)):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model="m", messages=MESSAGES, extra_headers={"x-request-deadline-ms": wrong}
                )
            assert refused.value.param == "x-request-deadline-ms"
