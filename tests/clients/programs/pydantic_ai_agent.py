"""Pydantic AI: agents with a tool by OpenAI's chats, responses and Anthropic's messages; a stream; a typed answer."""

import asyncio
import os
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

SCRIPTED = os.environ["AGAINST"] == "scripted"
ASK = 'CALL weather {"city": "Rome"}'


class City(BaseModel):
    name: str


def weather(city: str) -> str:
    """Look the weather up."""
    return f"sunny in {city}"


async def streamed(agent: Any) -> str:
    async with agent.run_stream("hi") as stream:
        return str(await stream.get_output())


models: list[Any] = [OpenAIChatModel("m"), OpenAIResponsesModel("m"), AnthropicModel("m")]
for model in models:
    agent = Agent(model, tools=[weather])
    result = agent.run_sync(ASK)
    assert result.output == "The tool said: sunny in Rome" or not SCRIPTED, result.output
    assert asyncio.run(streamed(agent))
if SCRIPTED:
    assert Agent(models[0], output_type=City).run_sync('CALL final_result {"name": "Rome"}').output.name == "Rome"
