"""LiteLLM as a client: chats, streams, tools, Anthropic's messages, responses, embeddings."""

import os
from typing import Any

import litellm

SCRIPTED = os.environ["AGAINST"] == "scripted"
of: Any = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
HI: Any = [{"role": "user", "content": "hi"}]
ASK: Any = [{"role": "user", "content": 'CALL weather {"city": "Rome"}'}]
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}

assert litellm.completion(model="openai/m", messages=HI, **of).choices[0].message.content
chunks = litellm.completion(model="openai/m", messages=HI, stream=True, **of)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
called = litellm.completion(model="openai/m", messages=ASK, tools=[TOOL], tool_choice="required", **of)
assert called.choices[0].message.tool_calls[0].function.name == "weather"
anthropic: Any = {"api_base": os.environ["ANTHROPIC_BASE_URL"], "api_key": os.environ["ANTHROPIC_API_KEY"]}
assert litellm.completion(model="anthropic/m", messages=HI, max_tokens=100, **anthropic).choices[0].message.content
chunks = litellm.completion(model="anthropic/m", messages=HI, max_tokens=100, stream=True, **anthropic)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
assert litellm.responses(model="openai/m", input="hi", **of).output
assert len(litellm.embedding(model="openai/m", input=["a", "b"], **of).data) == 2
