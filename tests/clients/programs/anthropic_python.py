"""Anthropic's client: messages, streams, its tool runner, a thread, token counts, models."""

import os
from typing import Any

from anthropic import Anthropic, beta_tool

SCRIPTED = os.environ["AGAINST"] == "scripted"
HI: Any = [{"role": "user", "content": "hi"}]
ASK: Any = [{"role": "user", "content": 'CALL weather {"city": "Rome"}'}]


@beta_tool
def weather(city: str) -> str:
    """Look the weather up.

    Args:
        city: The name of the city.
    """
    return f"sunny in {city}"


with Anthropic(max_retries=0) as client:
    answer: Any = client.messages.create(model="m", max_tokens=100, messages=HI, system="Be kind.")
    assert answer.content[0].text and answer.usage.output_tokens
    with client.messages.stream(model="m", max_tokens=100, messages=HI) as stream:
        assert "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason in ("end_turn", "max_tokens")
    for streamed in (False, True):
        runner: Any = client.beta.messages.tool_runner(
            model="m", max_tokens=200, tools=[weather], messages=ASK, stream=streamed
        )
        last = runner.until_done()
        text = "".join(block.text for block in last.content if block.type == "text")
        assert text == "The tool said: sunny in Rome" or not SCRIPTED, text
    thread = client.beta.messages.thread(model="m", max_tokens=100, system="Be kind.")
    first, second = thread.send(HI[0]), thread.send({"role": "user", "content": 'ANSWER "done"'})
    assert thread.previous_message_id == second.id != first.id and len(thread.messages) == 4
    assert second.to_dict()["content"] == [{"type": "text", "text": "done"}] or not SCRIPTED
    # Servers without a tokenizer endpoint answer 501, so that no client takes an estimate for a count.
    assert SCRIPTED or client.messages.count_tokens(model="m", messages=HI).input_tokens > 0
    assert client.models.list().data[0].id and client.models.retrieve("m").id == "m"
