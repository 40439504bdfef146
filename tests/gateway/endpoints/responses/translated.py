"""Helpers that run requests and answers through the real translator, and check its results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from openai.types import responses
from pydantic import TypeAdapter

from gateway.endpoints.responses import ResponsesEndpoint, ResponsesTranslator
from gateway.prompts.reader import ParsedBody, read_fields
from tests.openai_spec import Validate

DONE = b"data: [DONE]\n\n"
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": None}
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}

_response = TypeAdapter(responses.Response)
_event: TypeAdapter[Any] = TypeAdapter(responses.ResponseStreamEvent)


def read(input: Any = "hello", **fields: Any) -> tuple[ResponsesTranslator, ParsedBody]:
    body = json.dumps({"model": "m", "input": input, **fields}).encode()
    translator = ResponsesEndpoint().translator("req_abc")
    return translator, translator.read(read_fields(body), body)


def chat_of(input: Any = "hello", **fields: Any) -> dict[str, Any]:
    """Return the fields of the chat that a request is translated to."""
    return {name: json.loads(bytes(value)) for name, value in read(input, **fields)[1].fields.items()}


def messages_of(*items: Any, **fields: Any) -> Any:
    return chat_of(list(items), **fields)["messages"]


def frame(delta: dict[str, Any] | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": delta or {}, **fields}
    return b"data: " + json.dumps({"model": "served", "choices": [choice]}).encode() + b"\n\n"


def usage_frame() -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"


def whole_answer(message: dict[str, Any], finish_reason: str | None = "stop", **choice: Any) -> bytes:
    choice_json = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason, **choice}
    return json.dumps({"model": "served", "choices": [choice_json], "usage": USAGE}).encode()


def answered(message: dict[str, Any], finish_reason: str | None = "stop", **fields: Any) -> Any:
    """Return the response for a whole answer."""
    return json.loads(read(**fields)[0].answer(whole_answer(message, finish_reason)))


def events_of(stream: bytes) -> list[Any]:
    """Parse a stream's events. Checks that each frame names its event's type, and that their numbers have no gap."""
    events = []
    for part in stream.decode().split("\n\n")[:-1]:
        if part.startswith(":"):
            continue
        name, _, data = part.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def streamed(chunks: Sequence[bytes], **fields: Any) -> list[Any]:
    """Return the events for a stream whose last chunk is its end."""
    translator, _ = read(stream=True, **fields)
    *earlier, last = chunks
    return events_of(
        b"".join([*(translator.frames(chunk, last=False) for chunk in earlier), translator.frames(last, last=True)])
    )


def folded(events: Sequence[Any]) -> Any:
    """Fold the events into output items, from deltas alone, and check the result against every `done` event."""
    output: dict[int, Any] = {}
    ended: set[int] = set()
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            output[event["output_index"]] = event["item"]
            continue
        if "output_index" not in event:
            continue
        assert event["output_index"] not in ended
        item = output[event["output_index"]]
        if kind == "output_item.done":
            final = event["item"]
            without_end = {name for name in final if name not in ("status", "encrypted_content")}
            assert {name: final[name] for name in without_end} == {name: item[name] for name in without_end}
            output[event["output_index"]] = final
            ended.add(event["output_index"])
            continue
        assert event["item_id"] == item["id"]
        _grow(item, kind, event)
    assert ended == output.keys()
    return [output[index] for index in sorted(output)]


def _grow(item: Any, kind: str, event: Any) -> None:
    match kind:
        case "content_part.added":
            assert event["content_index"] == len(item["content"])
            item["content"].append(event["part"])
        case "content_part.done":
            part = event["part"]
            assert {**part, "logprobs": None} == {**item["content"][event["content_index"]], "logprobs": None}
            item["content"][event["content_index"]] = part
        case "output_text.delta" | "reasoning_text.delta":
            item["content"][event["content_index"]]["text"] += event["delta"]
        case "refusal.delta":
            item["content"][event["content_index"]]["refusal"] += event["delta"]
        case "output_text.done" | "reasoning_text.done":
            assert item["content"][event["content_index"]]["text"] == event["text"]
        case "refusal.done":
            assert item["content"][event["content_index"]]["refusal"] == event["refusal"]
        case "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        case "function_call_arguments.done":
            assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
        case _:
            raise AssertionError(kind)


def check_response(validate: Validate, response: Any) -> None:
    """Check a response against OpenAI's specification and its SDK's types."""
    validate("Response", response)
    _response.validate_python(response)


def check_events(validate: Validate, events: Sequence[Any]) -> None:
    for event in events:
        validate("ResponseStreamEvent", event)
        _event.validate_python(event)
