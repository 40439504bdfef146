"""Valid requests of every endpoint, and random changes of them."""

from __future__ import annotations

import json
import random
from typing import Any

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [
            {"type": "text", "text": "hi"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "low"}},
        ]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "max_tokens": 9, "temperature": 0.5,
    "stream": True, "stream_options": {"include_usage": True}, "n": 1, "stop": ["a"], "seed": 1, "user": "u",
    "metadata": {"a": "b"}, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
    "logprobs": True, "top_logprobs": 2, "reasoning_effort": "low", "service_tier": "auto", "prompt_cache_key": "k",
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "hi"}, {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"},
            {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
    ],
    "instructions": "Be brief.", "tools": [{"type": "function", **FUNCTION, "strict": True}], "tool_choice": "auto",
    "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "max_output_tokens": 20, "stream": True,
    "store": True, "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}, "truncation": "auto",
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "max_tokens": 9, "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "hi"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
            {"type": "document", "source": {"type": "file", "file_id": "f"}, "citations": {"enabled": True}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"},
                                          {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1", "is_error": True}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "bash_20250124", "name": "bash"},
              {"type": "web_search_20250305", "name": "web_search"}],
    "tool_choice": {"type": "auto"}, "thinking": {"type": "enabled", "budget_tokens": 5}, "stream": True,
    "stop_sequences": ["a"], "metadata": {"user_id": "u"}, "output_config": {"effort": "low"},
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": CHAT,
    "completions": {"prompt": ["hi", "ho"], "max_tokens": 9, "stream": False, "logprobs": 1, "echo": True},
    "embeddings": {"input": ["a", "b"], "encoding_format": "float", "dimensions": 3},
    "responses": RESPONSES,
    "responses/input_tokens": {name: RESPONSES[name] for name in ("input", "tools")},
    # The query has no meaning: it makes a path of its own for the table of results.
    "responses?background": {
        **RESPONSES, "background": True, "truncation": "disabled", "input": RESPONSES["input"][:3],
    },
    "responses?conversation": {**RESPONSES, "conversation": "conv_x"},
    "responses/compact": {"input": RESPONSES["input"][:3], "instructions": "Be brief."},
    "conversations": {"items": RESPONSES["input"][:3], "metadata": {"a": "b"}},
    "conversations/conv_x": {"metadata": {"a": "b"}},
    "conversations/conv_x/items": {"items": RESPONSES["input"]},
    "chat/completions?store": {**CHAT, "store": True},
    "chat/completions/x": {"metadata": {"a": "b"}},
    "messages": MESSAGES,
    "messages/count_tokens": {name: MESSAGES[name] for name in ("messages", "system", "tools")},
    "rerank": {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1},
    "score": {"text_1": "a", "text_2": ["b"]},
    "classify": {"input": "a"},
    "pooling": {"input": "a"},
    "tokenize": {"prompt": "a"},
    "detokenize": {"tokens": [1]},
    "moderations": {"input": "a"},
    "audio/speech": {"input": "a", "voice": "x", "stream_format": "sse"},
    "images/generations": {"prompt": "a", "n": 1},
    "batches": {"input_file_id": "file-x", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
}  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1e308, 2**63, 2**70, -0.0, "", "a" * 3000, "\ud800", "\x00", "é\U0001f600", [], {}, [[]],
    {"type": None}, {"type": "x"}, [None], "data:image/png;base64,%%%", {"": ""}, "model", "../../x", 10**400,
)  # fmt: skip


def changed(value: Any, random_: random.Random, chance: float) -> Any:
    """Return JSON with some values replaced, removed, repeated or added."""
    if random_.random() < chance:
        return random_.choice(ODD)
    if isinstance(value, dict):
        fields = {
            name: changed(inner, random_, chance) for name, inner in value.items() if random_.random() > chance / 2
        }
        if random_.random() < chance:
            fields[random_.choice(("type", "x", "content", "role", "id", "cache_control", "model", "stream"))] = (
                random_.choice(ODD)
            )
        return fields
    if isinstance(value, list):
        items = [changed(inner, random_, chance) for inner in value]
        return items * 2 if random_.random() < chance else items
    return value


def broken(body: bytes, random_: random.Random) -> bytes:
    """Return bytes of a body with an edit that may break its JSON or its UTF-8."""
    at = random_.randrange(len(body) + 1)
    kind = random_.randrange(4)
    if kind == 0:
        return body[:at]
    if kind == 1:
        return body[:at] + bytes(random_.randrange(256) for _ in range(3)) + body[at:]
    if kind == 2:
        return body[:at] + b"[" * random_.choice((5, 5000)) + body[at:]
    return b"--b\r\ncontent-disposition: form-data; name=model\r\n\r\nm\r\n--b--\r\n"[: random_.randrange(70)] + body


def encoded(body: Any) -> bytes:
    """Return the body as JSON. Lone surrogates stay escaped, as some clients send them."""
    return json.dumps(body).encode()
