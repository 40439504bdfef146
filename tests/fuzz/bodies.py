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
# Placeholders such as `{response}` become ids that the gateway has given. In some paths a query has no meaning: it
# makes a row of its own in the table of results.
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": CHAT,
    "completions": {"prompt": ["hi", "ho"], "max_tokens": 9, "stream": False, "logprobs": 1, "echo": True},
    "completions?stream": {
        "prompt": "hi", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}, "suffix": "s",
        "stop": "x", "n": 1, "best_of": 1, "logit_bias": {"1": 1}, "user": "u", "temperature": 0,
    },
    "embeddings": {"input": ["a", "b"], "encoding_format": "float", "dimensions": 3},
    "responses": RESPONSES,
    "responses?previous": {**RESPONSES, "previous_response_id": "{response}"},
    "responses?reference": {"input": [{"type": "item_reference", "id": "{item}"}], "stream": True},
    "responses/input_tokens": {name: RESPONSES[name] for name in ("input", "tools")},
    "responses?background": {
        **RESPONSES, "background": True, "truncation": "disabled", "input": RESPONSES["input"][:3],
    },
    "responses?conversation": {**RESPONSES, "conversation": "{conversation}"},
    "responses/compact": {"input": RESPONSES["input"][:3], "instructions": "Be brief."},
    "responses/compact?previous": {"previous_response_id": "{response}", "input": RESPONSES["input"][:1]},
    "conversations": {"items": RESPONSES["input"][:3], "metadata": {"a": "b"}},
    "conversations/{conversation}": {"metadata": {"a": "b"}},
    "conversations/{conversation}/items": {"items": RESPONSES["input"][:3]},
    "chat/completions?store": {**CHAT, "store": True},
    "chat/completions/{chat}": {"metadata": {"a": "b"}},
    "messages": MESSAGES,
    "messages?create": {
        **MESSAGES, "thread": {"type": "create"}, "tools": MESSAGES["tools"][:2],
        "messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"},
    },
    "messages?continue": {
        "max_tokens": 9, "messages": [{"role": "user", "content": "ho"}], "stream": False,
        "thread": {"type": "continue", "previous_message_id": "{message}"},
    },
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
    "batches": {"input_file_id": "{file}", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
}  # fmt: skip
LIMITS = {"requests": "10/1m", "tokens": "100/1m", "budget": "1 USD/1d", "concurrency": 2}
# Requests to the admin API: method, path and body. They change nothing that the other requests need.
ADMIN: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("POST", "admin/keys", {"tenant": "fuzz", "id": "fuzz", "limits": LIMITS, "models": ["plain"], "expires": "1h"}),
    ("POST", "admin/keys/fuzz/rotate", {"overlap": "1h"}),
    ("DELETE", "admin/keys/fuzz", None),
    ("POST", "admin/tenants", {"name": "fuzz", "limits": LIMITS, "models": ["plain"], "parent": None}),
    ("PATCH", "admin/tenants/fuzz", {"limits": LIMITS, "disabled": False, "default_class": "batch"}),
    ("DELETE", "admin/tenants/fuzz", None),
    ("POST", "admin/admin-keys", {"id": "fuzz", "role": "viewer", "organisation": None, "expires": "1h"}),
    ("DELETE", "admin/admin-keys/fuzz", None),
    ("POST", "admin/explain?key=dev", {**CHAT, "model": "plain"}),
    ("POST", "admin/explain?key=dev&endpoint=messages", {**MESSAGES, "model": "plain"}),
    ("POST", "admin/explain?key=dev&endpoint=responses", {**RESPONSES, "model": "plain"}),
    ("POST", "admin/playground/chat/completions?key=dev", {**CHAT, "model": "plain"}),
    ("POST", "admin/playground/responses?key=dev", {**RESPONSES, "model": "plain"}),
    ("POST", "admin/policy/reload", {}),
    ("POST", "admin/diagnosis/apply", {"proposals": ["x"]}),
    ("DELETE", "admin/responses/fuzz", None),
    ("POST", "admin/batches/{batch}/cancel", None),
    *(("GET", path, None) for path in (
        "admin/state", "admin/me", "admin/keys", "admin/keys/fuzz", "admin/tenants", "admin/tenants/dev",
        "admin/tenants/x%00", "admin/limits/dev", "admin/limits/x", "admin/admin-keys", "admin/audit?limit=-1",
        "admin/audit", "admin/metrics", "admin/policy", "admin/policy/document", "admin/calls",
        "admin/calls?tenant=dev&limit=x", "admin/history", "admin/history?since=x", "admin/diagnosis", "admin/batches",
        "v1/organization/usage/completions?start_time=0", "v1/organization/usage/completions?start_time=x",
        "v1/organization/usage/embeddings?start_time=1&bucket_width=1h&limit=999", "v1/organization/costs",
        "v1/organization/costs?start_time=1&group_by=project_id", "v1/organization/projects",
        "v1/organization/projects/dev/api_keys", "v1/organization/projects/dev/api_keys/dev",
    )),
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1e308, 2**63, 2**70, -0.0, "", "a" * 3000, "\ud800", "\x00", "é\U0001f600", [], {}, [[]],
    {"type": None}, {"type": "x"}, [None], "data:image/png;base64,%%%", {"": ""}, "model", "../../x", 10**400,
    "{response}", "{conversation}", "{message}", "{chat}", {"type": "create"},
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


def upload(lines: list[Any]) -> tuple[bytes, str]:
    """Return a file of a batch as a form, and its content type."""
    content = b"\n".join(map(encoded, lines))
    parts = (b'name="purpose"\r\n\r\nbatch', b'name="file"; filename="a.jsonl"\r\n\r\n' + content)
    form = b"".join(b"--b\r\ncontent-disposition: form-data; %b\r\n" % part for part in parts)
    return form + b"--b--\r\n", "multipart/form-data; boundary=b"
