"""Instructor: a patched client answers a plain request."""

import instructor
from openai import OpenAI

client = instructor.from_openai(OpenAI(), mode=instructor.Mode.JSON)
assert client.client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
