"""Instructor: structured answers by tools, JSON and JSON schema."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: Literal["Rome", "Paris"]


for mode, prompt in (
    (instructor.Mode.TOOLS, 'CALL City {"name": "Rome"}'),
    (instructor.Mode.JSON, 'ANSWER {"name": "Rome"}'),
    (instructor.Mode.JSON_SCHEMA, 'ANSWER {"name": "Rome"}'),
):
    if mode is instructor.Mode.JSON and os.environ["AGAINST"] != "scripted":
        continue  # in this mode, nothing but the prompt tells the model the schema
    client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
    city = client.chat.completions.create(
        model="m", response_model=City, messages=[{"role": "user", "content": prompt}], max_retries=0
    )
    assert isinstance(city, City), mode
