"""LlamaIndex's client of OpenAI-like servers: a completion, a stream, a function call."""

import os
from typing import Any

from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

SCRIPTED = os.environ["AGAINST"] == "scripted"
of: Any = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"], "max_retries": 0}
model = OpenAILike(model="m", is_chat_model=True, is_function_calling_model=True, **of)
assert model.complete("hi").text
assert "".join(part.delta or "" for part in model.stream_complete("hi"))


def weather(city: str) -> str:
    """Look the weather up."""
    return f"sunny in {city}"


tool = FunctionTool.from_defaults(weather)
asked = 'CALL weather {"city": "Rome"}'
answer = model.chat_with_tools([tool], user_msg=asked, tool_required=True)
(call,) = model.get_tool_calls_from_response(answer)
assert call.tool_name == "weather"
assert call.tool_kwargs == {"city": "Rome"} or not SCRIPTED
if SCRIPTED:
    assert str(model.predict_and_call([tool], user_msg=asked)) == "sunny in Rome"
