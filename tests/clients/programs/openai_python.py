"""OpenAI's client: chat, stream, tools, responses, embeddings."""

from typing import Any

from openai import OpenAI

client = OpenAI()
messages: Any = [{"role": "user", "content": "hi"}]
answer = client.chat.completions.create(model="m", messages=messages)
assert answer.choices[0].message.content and answer.usage and answer.usage.total_tokens
chunks = list(client.chat.completions.create(model="m", messages=messages, stream=True))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
with client.responses.stream(model="m", input="hi") as stream:
    assert stream.get_final_response().output_text
assert client.models.list().data
