"""LangChain: agents with a tool by OpenAI's chats, responses and Anthropic's messages; streams; structured answers."""

import os
from typing import Any, Literal

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

SCRIPTED = os.environ["AGAINST"] == "scripted"


class City(BaseModel):
    """A city."""

    name: Literal["Rome", "Paris"]


def weather(city: str) -> str:
    """Look the weather up."""
    return f"sunny in {city}"


models: list[Any] = [
    ChatOpenAI(model="m", stream_usage=True, max_retries=0),
    ChatOpenAI(model="m", use_responses_api=True, max_retries=0),
    ChatAnthropic(model_name="m", max_retries=0, timeout=None, stop=None, max_tokens_to_sample=200),
]
for model in models:
    answer = model.invoke("hi")
    assert answer.content and answer.usage_metadata, answer
    chunks = list(model.stream("hi"))
    assert "".join(chunk.text for chunk in chunks)
    asked: Any = {"messages": [{"role": "user", "content": 'CALL weather {"city": "Rome"}'}]}
    last = create_agent(model, tools=[weather]).invoke(asked)["messages"][-1]
    assert last.text == "The tool said: sunny in Rome" or not SCRIPTED, last
for method in ("function_calling", "json_schema"):
    prompt = 'CALL City {"name": "Rome"}' if method == "function_calling" else 'ANSWER {"name": "Rome"}'
    assert isinstance(models[0].with_structured_output(City, method=method).invoke(prompt), City)
