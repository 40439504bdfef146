"""OpenAI's Agents SDK with its default, the Responses API, and with chats; a tool, and a stream."""

import asyncio
import os
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

SCRIPTED = os.environ["AGAINST"] == "scripted"
ASK = 'CALL weather {"city": "Rome"}'
set_tracing_disabled(True)


@function_tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """Look the weather up."""
    return f"sunny in {city}"


async def run(model: Any) -> None:
    agent = Agent(name="a", instructions="Be kind.", model=model, tools=[weather])
    whole = await Runner.run(agent, ASK)
    streamed = Runner.run_streamed(agent, ASK)
    async for _ in streamed.stream_events():
        pass
    for output in (whole.final_output, streamed.final_output):
        assert output == "The tool said: sunny in Rome" or not SCRIPTED, output


async def main() -> None:
    await run("m")
    await run(OpenAIChatCompletionsModel("m", AsyncOpenAI()))


asyncio.run(main())
