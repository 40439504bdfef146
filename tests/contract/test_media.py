"""Images, sound, video and files by every endpoint to every provider: passed, converted, or refused by name.

The gateway never fetches a URL. It passes a URL to servers that fetch it, and refuses it for the others.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.core.errors import BadRequest
from gateway.endpoints import ENDPOINTS
from gateway.policy import Deployment
from gateway.providers import PROVIDERS, ProviderFailure, make_provider
from gateway.providers.transport import HTTPTransport
from tests.gateway.calls import a_call

DATA = base64.b64encode(b"%PDF-1.4 not really").decode()
TEXT = base64.b64encode("grüße".encode()).decode()
URL = "https://example.com/it.bin"
TRANSLATING = ("anthropic", "gemini", "ollama")
AS_DATA, AS_URL, AS_TEXT = "data", "URL", "text"


def data_url(media_type: str, data: str = DATA) -> str:
    return f"data:{media_type};base64,{data}"


def chat_url(kind: str, url: str) -> dict[str, Any]:
    return {"type": kind, kind: {"url": url}}


def chat_file(**fields: str) -> dict[str, Any]:
    return {"type": "file", "file": fields}


def document(**source: str) -> dict[str, Any]:
    return {"type": "document", "source": source}


SOUND = {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}
# The media that each endpoint has words for, by a name for the table.
MEDIA: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "chat/completions": {
        "image": chat_url("image_url", data_url("image/png")),
        "image by URL": chat_url("image_url", URL),
        "sound": SOUND,
        "sound by URL": chat_url("audio_url", URL),
        "video": chat_url("video_url", data_url("video/mp4")),
        "video by URL": chat_url("video_url", URL),
        "PDF": chat_file(file_data=data_url("application/pdf"), filename="a.pdf"),
        "PDF by its name": chat_file(file_data=DATA, filename="a.pdf"),
        "text file": chat_file(file_data=data_url("text/plain", TEXT), filename="a.txt"),
        "image as a file": chat_file(file_data=data_url("image/png"), filename="a.png"),
        "other file": chat_file(file_data=data_url("application/zip"), filename="a.zip"),
        "uploaded file": chat_file(file_id="file-1"),
    },
    "responses": {
        "image": {"type": "input_image", "image_url": data_url("image/png")},
        "image by URL": {"type": "input_image", "image_url": URL},
        "uploaded image": {"type": "input_image", "file_id": "file-1"},
        "sound": SOUND,
        "PDF": {"type": "input_file", "file_data": data_url("application/pdf"), "filename": "a.pdf"},
        "PDF by URL": {"type": "input_file", "file_url": URL},
        "text file": {"type": "input_file", "file_data": data_url("text/plain", TEXT), "filename": "a.txt"},
        "uploaded file": {"type": "input_file", "file_id": "file-1"},
    },
    "messages": {
        "image": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
        "image by URL": {"type": "image", "source": {"type": "url", "url": URL}},
        "uploaded image": {"type": "image", "source": {"type": "file", "file_id": "file-1"}},
        "PDF": document(type="base64", media_type="application/pdf", data=DATA),
        "PDF by URL": document(type="url", url=URL),
        "text file": document(type="text", media_type="text/plain", data="grüße"),
        "document of parts": {
            "type": "document",
            "source": {
                "type": "content",
                "content": [
                    {"type": "text", "text": "grüße"},
                    {"type": "image", "source": {"type": "url", "url": URL}},
                ],
            },
        },
    },
}
PART = "messages[0].content[1]"
# What becomes of each medium: how the server gets it, or the field that the error names. `openai` stands for all
# servers that have OpenAI's API, which get chats as they are, and judge them themselves.
OUTCOMES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("chat/completions", "image"): {"openai": AS_DATA, "anthropic": AS_DATA, "gemini": AS_DATA, "ollama": AS_DATA},
    ("chat/completions", "image by URL"): {
        "openai": AS_URL, "anthropic": AS_URL, "gemini": AS_URL, "ollama": f"{PART}.image_url.url",
    },
    ("chat/completions", "sound"): {
        "openai": AS_DATA, "anthropic": f"{PART}.type", "gemini": AS_DATA, "ollama": f"{PART}.type",
    },
    ("chat/completions", "sound by URL"): {
        "openai": AS_URL, "anthropic": f"{PART}.type", "gemini": AS_URL, "ollama": f"{PART}.type",
    },
    ("chat/completions", "video"): {
        "openai": AS_DATA, "anthropic": f"{PART}.type", "gemini": AS_DATA, "ollama": f"{PART}.type",
    },
    ("chat/completions", "video by URL"): {
        "openai": AS_URL, "anthropic": f"{PART}.type", "gemini": AS_URL, "ollama": f"{PART}.type",
    },
    ("chat/completions", "PDF"): {
        "openai": AS_DATA, "anthropic": AS_DATA, "gemini": AS_DATA, "ollama": f"{PART}.file.file_data",
    },
    ("chat/completions", "PDF by its name"): {
        "openai": AS_DATA, "anthropic": AS_DATA, "gemini": AS_DATA, "ollama": f"{PART}.file.file_data",
    },
    ("chat/completions", "text file"): {
        "openai": AS_DATA, "anthropic": AS_TEXT, "gemini": AS_DATA, "ollama": AS_TEXT,
    },
    ("chat/completions", "image as a file"): {
        "openai": AS_DATA, "anthropic": AS_DATA, "gemini": AS_DATA, "ollama": AS_DATA,
    },
    ("chat/completions", "other file"): {
        "openai": AS_DATA, "anthropic": f"{PART}.file.file_data", "gemini": AS_DATA,
        "ollama": f"{PART}.file.file_data",
    },
    ("chat/completions", "uploaded file"): {
        "openai": "file-1", "anthropic": f"{PART}.file.file_id", "gemini": f"{PART}.file.file_id",
        "ollama": f"{PART}.file.file_id",
    },
    ("responses", "image"): {"openai": AS_DATA, "anthropic": AS_DATA, "gemini": AS_DATA, "ollama": AS_DATA},
    ("responses", "image by URL"): {
        "openai": AS_URL, "anthropic": AS_URL, "gemini": AS_URL, "ollama": f"{PART}.image_url.url",
    },
    ("responses", "uploaded image"): dict.fromkeys(("openai", *TRANSLATING), "input[0].content[1].file_id"),
    ("responses", "sound"): {
        "openai": AS_DATA, "anthropic": f"{PART}.type", "gemini": AS_DATA, "ollama": f"{PART}.type",
    },
    ("responses", "PDF"): {
        "openai": AS_DATA, "anthropic": AS_DATA, "gemini": AS_DATA, "ollama": f"{PART}.file.file_data",
    },
    ("responses", "PDF by URL"): {
        "openai": "messages", "anthropic": AS_URL, "gemini": AS_URL, "ollama": f"{PART}.file",
    },
    ("responses", "text file"): {"openai": AS_DATA, "anthropic": AS_TEXT, "gemini": AS_DATA, "ollama": AS_TEXT},
    ("responses", "uploaded file"): dict.fromkeys(("openai", *TRANSLATING), "input[0].content[1].file_id"),
    ("messages", "image"): {"openai": AS_DATA, "anthropic": AS_DATA, "gemini": AS_DATA, "ollama": AS_DATA},
    ("messages", "image by URL"): {
        "openai": AS_URL, "anthropic": AS_URL, "gemini": AS_URL, "ollama": f"{PART}.image_url.url",
    },
    # A deployment with `native: [messages]` gets it, because requests that cannot be translated pass to such ones.
    ("messages", "uploaded image"): {
        "openai": f"{PART}.source.type", "anthropic": f"{PART}.source.type", "gemini": f"{PART}.source.type",
        "ollama": f"{PART}.source.type",
    },
    ("messages", "PDF"): {
        "openai": AS_DATA, "anthropic": AS_DATA, "gemini": AS_DATA, "ollama": f"{PART}.file.file_data",
    },
    ("messages", "PDF by URL"): {
        "openai": "messages", "anthropic": AS_URL, "gemini": AS_URL, "ollama": f"{PART}.file",
    },
    ("messages", "text file"): {"openai": AS_TEXT, "anthropic": AS_TEXT, "gemini": AS_TEXT, "ollama": AS_TEXT},
    ("messages", "document of parts"): {
        "openai": AS_URL, "anthropic": AS_URL, "gemini": AS_URL, "ollama": f"{PART.replace('1', '2')}.image_url.url",
    },
}  # fmt: skip
LIKE_OPENAI = sorted(set(PROVIDERS) - set(TRANSLATING))


def body_of(endpoint: str, part: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "input_text" if endpoint == "responses" else "text", "text": "What is it?"}
    message = {"role": "user", "content": [text, part]}
    fields: dict[str, Any] = {"messages": {"max_tokens": 9, "messages": [message]}, "responses": {"input": [message]}}
    return {"model": "m", **fields.get(endpoint, {"messages": [message]})}


def outcome(endpoint: str, part: dict[str, Any], kind: str) -> str:
    """How the provider's server gets the part, or the field that the error names."""
    speaks = next(each for each in ENDPOINTS if each.path == endpoint)
    deployment = Deployment(name="d", provider=kind, base_url="http://x/v1", model="served")
    provider = make_provider(deployment, HTTPTransport(), lambda _: "")
    try:
        call = a_call(body_of(endpoint, part), endpoint=speaks)
        if (failure := provider.unsupported_error(call)) is not None:
            raise failure
        sent = json.loads(provider.render(call))
    except BadRequest as refused:
        return str(refused.param)
    except ProviderFailure as failure:
        return str(json.loads(failure.body)["error"]["param"])
    text = json.dumps(sent, ensure_ascii=False)
    known = {AS_URL: URL, AS_DATA: DATA, AS_TEXT: "grüße", "file-1": "file-1"}
    (found,) = {name for name, mark in known.items() if mark in text and name != AS_TEXT} or {
        AS_TEXT if "grüße" in text else AS_DATA if TEXT in text else "nothing"
    }
    return found


@pytest.mark.parametrize(("endpoint", "medium"), OUTCOMES)
def test_every_medium_passes_is_converted_or_is_refused_by_name(endpoint: str, medium: str) -> None:
    part, expected = MEDIA[endpoint][medium], OUTCOMES[endpoint, medium]
    found = {kind: outcome(endpoint, part, kind) for kind in ("openai", *TRANSLATING)}
    assert found == expected


@pytest.mark.parametrize("kind", LIKE_OPENAI)
def test_servers_with_openais_api_get_the_same(kind: str) -> None:
    for endpoint, medium in OUTCOMES:
        assert outcome(endpoint, MEDIA[endpoint][medium], kind) == OUTCOMES[endpoint, medium]["openai"], medium


def test_the_table_is_complete() -> None:
    assert {(endpoint, medium) for endpoint, media in MEDIA.items() for medium in media} == OUTCOMES.keys()
