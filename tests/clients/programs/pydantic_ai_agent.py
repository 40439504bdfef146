"""Pydantic AI: an agent's answer and its usage."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

result = Agent(OpenAIChatModel("m")).run_sync("hi")
assert result.output
