"""OpenAI's Agents SDK with its default, the Responses API, and with chats; a tool, and a stream."""

import asyncio
import os
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

SCRIPTED = os.environ["AGAINST"] == "scripted"
ASK = 'CALL weather {"city": "Rome"}'
set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """Look the weather up."""
    return f"sunny in {city}"


async def streamed(agent: Any) -> Any:
    result = Runner.run_streamed(agent, ASK)
    async for _ in result.stream_events():
        pass
    return result.final_output


models: list[Any] = ["m", OpenAIChatCompletionsModel("m", AsyncOpenAI())]
for model in models:
    agent = Agent(name="a", instructions="Be kind.", model=model, tools=[weather])
    for output in (Runner.run_sync(agent, ASK).final_output, asyncio.run(streamed(agent))):
        assert output == "The tool said: sunny in Rome" or not SCRIPTED, output
