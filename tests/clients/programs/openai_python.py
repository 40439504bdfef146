"""OpenAI's client: chats, streams, tools, JSON schemas, responses, embeddings, models."""

import os
from typing import Any, Literal

from openai import OpenAI
from pydantic import BaseModel

SCRIPTED = os.environ["AGAINST"] == "scripted"
ASK: Any = [{"role": "user", "content": 'CALL weather {"city": "Rome"}'}]
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Any = {"name": "weather", "parameters": {**PARAMETERS, "additionalProperties": False}, "strict": True}
TOOL: Any = {"type": "function", "function": FUNCTION}


class City(BaseModel):
    name: Literal["Rome", "Paris"]


def chats(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model="m", messages=messages)
    assert answer.choices[0].message.content and answer.usage and answer.usage.total_tokens
    chunks = list(
        client.chat.completions.create(
            model="m", messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage and chunks[-1].usage.total_tokens


def tools(client: OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(model="m", messages=ASK, tools=[TOOL], tool_choice=choice) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    call: Any = message.tool_calls[0]
    assert call.function.parsed_arguments["city"] == "Rome" or not SCRIPTED
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages: Any = [*ASK, message, result]
    text = client.chat.completions.create(model="m", messages=messages, tools=[TOOL]).choices[0].message.content
    assert text == "The tool said: sunny" or not SCRIPTED


def schemas(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": 'ANSWER {"name": "Rome"}'}]
    parsed = client.chat.completions.parse(model="m", messages=messages, response_format=City, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, City)
    response = client.responses.parse(model="m", input='ANSWER {"name": "Rome"}', text_format=City)
    assert isinstance(response.output_parsed, City)


def responses(client: OpenAI) -> None:
    with client.responses.stream(model="m", input="hi") as stream:
        assert stream.get_final_response().output_text
    tool: Any = {"type": "function", **FUNCTION}
    first = client.responses.create(model="m", input=ASK, tools=[tool], tool_choice="required")
    (call,) = [item for item in first.output if item.type == "function_call"]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    turns: Any = [*ASK, *first.output, output]
    last = client.responses.create(model="m", input=turns, tools=[tool])
    assert last.output_text == "The tool said: sunny" or not SCRIPTED


with OpenAI(max_retries=0) as openai:
    chats(openai)
    tools(openai)
    schemas(openai)
    responses(openai)
    assert openai.completions.create(model="m", prompt="hi").choices[0].text
    assert len(openai.embeddings.create(model="m", input=["a", "b"]).data) == 2
    assert openai.models.list().data and openai.models.retrieve("m").id == "m"
