"""Anthropic's client: a message and a stream."""

from typing import Any

from anthropic import Anthropic

client = Anthropic()
messages: Any = [{"role": "user", "content": "hi"}]
answer = client.messages.create(model="m", max_tokens=100, messages=messages)
assert answer.content[0].text and answer.usage.output_tokens  # type: ignore[union-attr]
with client.messages.stream(model="m", max_tokens=100, messages=messages) as stream:
    assert "".join(stream.text_stream) and stream.get_final_message().stop_reason == "end_turn"
