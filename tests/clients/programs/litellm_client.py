"""LiteLLM as a client: an answer, a stream, and Anthropic's API."""

import os
from typing import Any

import litellm

messages: Any = [{"role": "user", "content": "hi"}]
of = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
assert litellm.completion(model="openai/m", messages=messages, **of).choices[0].message.content
chunks = litellm.completion(model="openai/m", messages=messages, stream=True, **of)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
