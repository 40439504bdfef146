"""LlamaIndex's client of OpenAI-like servers: an answer and a stream."""

import os

from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model="m", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], is_chat_model=True
)
assert model.complete("hi").text
assert "".join(part.delta or "" for part in model.stream_complete("hi"))
