"""Response bodies in OpenAI's format, with vLLM's additional fields. Pure functions of their arguments.

`Envelope.wrap` builds the object around the choices. The other functions build its parts: choices, deltas,
log-probabilities, usage and embeddings. `encode` and `event` convert a body to bytes. `event` adds the framing of a
server-sent event.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import Any

import orjson

from backend.engine.outputs import TokenLogprob
from backend.server.requests import ChatRequest, GenerationRequest
from backend.server.sequence import ChoiceDelta
from backend.server.tokenizer import TextCodec
from backend.server.usage_records import TokenUsage

DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]
TokenName = Callable[[int], str]  # returns the name under which log-probabilities report a token id


def encode(payload: Json | list[Json]) -> bytes:
    return orjson.dumps(payload)


def event(payload: Json) -> bytes:
    """Encodes a body as one server-sent event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class TextEvent:
    """Encodes server-sent events that differ in one text only. Several times faster than to encode each whole.

    `payload` returns an event's body for a text. It may print the text once.
    """

    _MARK = "<the text>"

    def __init__(self, payload: Callable[[str], Json]) -> None:
        self._before, _, self._after = event(payload(self._MARK)).rpartition(orjson.dumps(self._MARK))

    def __call__(self, text: str) -> bytes:
        return self._before + orjson.dumps(text) + self._after


def usage_object(usage: TokenUsage, *, prompt_tokens_details: bool = True) -> Json:
    """Returns OpenAI's usage object. `cached_tokens` counts the prompt tokens that were found in the prefix cache."""
    payload: Json = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
    if prompt_tokens_details:
        payload["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return payload


def prompt_usage_object(usage: TokenUsage, *, prompt_tokens_details: bool = True) -> Json:
    """Returns the usage of a request that generates nothing. `cached_tokens` is there only if there are any."""
    payload: Json = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    if prompt_tokens_details and usage.cached_tokens:
        payload["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return payload


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields that a response or all chunks of a stream have around their choices: id, object, created and model."""

    id: str
    object: str
    created: int
    model: str
    service_tier: str | None  # None if the request names no tier

    def wrap(self, choices: list[Json], usage: Json | None, *, with_usage: bool, extra: Json | None = None) -> Json:
        """Returns the choices with the common fields. `extra` contains vLLM's fields that the request asks for."""
        payload: Json = {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.service_tier is not None:
            payload["service_tier"] = self.service_tier
        if with_usage:
            payload["usage"] = usage
        return payload | (extra or {})


def chat_choice(index: int, message: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    """Returns a choice of a non-streaming chat response."""
    return {
        "index": index,
        "message": {"role": "assistant", **message, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


def chat_delta(index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
    """Returns a choice of a chunk in a chat stream."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def stop_reason(last: ChoiceDelta) -> Json:
    """Returns vLLM's `stop_reason` field of a complete choice: the request's stop string or token that ended it.

    The field is null if none of them ended the choice. The result is empty if the choice is not complete.
    """
    return {"stop_reason": last.stop_reason} if last.finish_reason else {}


def text_choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def token_namer(codec: TextCodec, request: GenerationRequest) -> TokenName:
    """Returns the function that names tokens in log-probabilities: by text, or by id if the request asks for ids.

    Different tokens can have equal texts.
    """
    return "token_id:{}".format if request.return_tokens_as_token_ids else codec.token_text


def chat_logprobs(codec: TextCodec, name: TokenName, logprobs: Sequence[TokenLogprob]) -> Json:
    """Returns log-probabilities in the format of /v1/chat/completions.

    Entries contain the token's bytes, because a token can be a part of a character.
    """

    def entry(token_id: int, logprob: float) -> Json:
        return {
            "token": name(token_id),
            "logprob": _finite(logprob),
            "bytes": list(codec.token_bytes(token_id)),
        }

    content = [
        {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*alternative) for alternative in token.top]}
        for token in logprobs
    ]
    return {"content": content, "refusal": None}


def requested_logprobs(codec: TextCodec, request: ChatRequest, deltas: Sequence[ChoiceDelta]) -> Json | None:
    """Returns the log-probabilities of several deltas. None if the request does not ask for them."""
    if not request.logprobs:
        return None
    return chat_logprobs(codec, token_namer(codec, request), [lp for delta in deltas for lp in delta.logprobs])


def echoed_logprobs(name: TokenName, prompt: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Json:
    """Returns the log-probabilities of an echoed prompt. The first token has none, because nothing precedes it."""
    first = name(prompt[0])
    rest = text_logprobs(name, logprobs, len(first))
    first_entry: Json = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    return {field: [*first_entry[field], *rest[field]] for field in first_entry}


def joined_logprobs(parts: Sequence[Json]) -> Json:
    """Merges several objects that `text_logprobs` returned into one, by concatenating each of their fields."""
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def prompt_logprobs(codec: TextCodec, logprobs: Sequence[TokenLogprob]) -> list[Json | None]:
    """Returns vLLM's `prompt_logprobs`: one object per prompt token, with token ids as keys. The first one is null."""

    def entry(token_id: int, logprob: float, rank: int) -> Json:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": codec.token_text(token_id)}

    return [
        None,
        *(
            {str(token.token_id): entry(token.token_id, token.logprob, token.rank)}
            | {str(id): entry(id, logprob, rank) for rank, (id, logprob) in enumerate(token.top, start=1)}
            for token in logprobs
        ),
    ]


def text_logprobs(name: TokenName, logprobs: Sequence[TokenLogprob], offset: int) -> Json:
    """Returns log-probabilities in the format of /v1/completions.

    `offset` is the position of the first token in the choice's text, in characters.
    """
    tokens = [name(token.token_id) for token in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(token.logprob) for token in logprobs],
        # The sampled token is always included, so there can be one more entry than requested.
        "top_logprobs": [
            {name(i): _finite(lp) for i, lp in (*token.top, (token.token_id, token.logprob))} for token in logprobs
        ],
        "text_offset": offsets,
    }


def embedding(index: int, values: Sequence[float], encoding_format: str) -> Json:
    """Returns one embedding object. The vector is a list of numbers if `encoding_format` is "float", else base64."""
    return {
        "object": "embedding",
        "index": index,
        "embedding": list(values) if encoding_format == "float" else _base64(values),
    }


def _base64(values: Sequence[float]) -> str:
    """Encodes numbers as little-endian float32 in base64, the format that OpenAI's clients request by default."""
    packed = array("f", values)
    if byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()


def _finite(logprob: float) -> float:
    """Replaces -inf by -9999.0, because JSON has no -inf. OpenAI uses -9999.0 for tokens that cannot be sampled."""
    return max(logprob, -9999.0)


def token_ids(deltas: Sequence[ChoiceDelta]) -> Json:
    """Returns vLLM's `token_ids` field with the tokens of all deltas."""
    return {"token_ids": [token_id for delta in deltas for token_id in delta.token_ids]}


def joined(deltas: Sequence[ChoiceDelta]) -> str:
    """Returns the concatenated text of several deltas."""
    return "".join(delta.text for delta in deltas)
